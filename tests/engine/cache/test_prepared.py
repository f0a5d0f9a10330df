"""Admissions that were prepared beside a round, when that round fails; states whose file is all."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.cache.storage.file_store import StateFileStore
from engine.protocol.events import Finished
from engine.protocol.failed import Failed
from engine.protocol.requests import KeepState
from tests.engine.cache.storage.test_named_state_file import files
from tests.engine.cache.test_named_states import Talk


def test_what_a_failed_round_was_to_bring_is_nobodys_beginning() -> None:
    """A state is moved by a round that fails, while a request was admitted that starts from it."""
    talk = Talk(share_slots=1, host_rows=6, most_steps=4, overlaps=True)
    talk.run(b"abc", 2, keep=KeepState(id="s"), owner="alice")
    talk.run(b"uvw", 2, keep=KeepState(id="t"), owner="bob")
    talk.run(b"x", 1, state="t", owner="bob")
    talk.submit(b"mnop", 60, owner="bob")
    talk.step()
    talk.step()
    talk.submit(b"k", 2, state="s", owner="alice")
    talk.runner.start_failures = [RuntimeError("out of memory")]
    while talk.runner.start_failures:
        talk.step()
    after = talk.submit(b"q", 3, state="s", owner="alice")
    begun: list[bytes] = []
    carry_out = talk.runner._carry_out

    def watched(plan):  # type: ignore[no-untyped-def]
        result = carry_out(plan)
        begun.extend(
            bytes(talk.runner.texts[one.key]) for one in plan.admit if one.request.owner == "alice"
        )
        return result

    talk.runner._carry_out = watched  # type: ignore[method-assign]
    talk.finish()
    assert all(text.startswith(b"abc") for text in begun)
    if not begun:  # then the state is lost, and who asks for it is told so
        assert not isinstance(talk.ends[after], Finished)


def settled(talk: Talk) -> None:
    """The disk has done what it was asked for."""
    talk.engine._cache.transfer.flush()
    talk.engine._cache.transfer.collect()


def test_a_failed_round_costs_no_state_that_a_file_has(tmp_path: Path) -> None:
    talk = Talk(share_slots=1, host_rows=6, state_folder=str(tmp_path))
    talk.run(b"abc", 2, keep=KeepState(id="s"), owner="alice")
    talk.finish()
    settled(talk)
    talk.run(b"k", 1, state="s", owner="alice")  # brings it to the device
    assert files(tmp_path)
    talk.runner.failures = [RuntimeError("out of memory")]
    failed = talk.run(b"uvw", 2, owner="bob")  # whose prompt pushes the state to main memory
    assert isinstance(failed, Failed)
    settled(talk)
    assert files(tmp_path)
    after = talk.run(b"k", 2, state="s", owner="alice")
    assert isinstance(after, Finished)
    assert bytes(after.tokens) == b"lm"


def test_a_state_that_no_row_has_room_for_is_refused(tmp_path: Path) -> None:
    talk = Talk(state_folder=str(tmp_path))
    talk.run(b"abc", 2, keep=KeepState(id="s"))
    talk.engine.close()
    without = Talk(share_slots=0, host_rows=0, state_folder=str(tmp_path))
    without.runner.outside = talk.runner.outside
    refused = without.run(b"k", 2, state="s")
    assert isinstance(refused, Failed) and refused.code == "state_quota"


def test_a_disk_that_is_full_leaves_the_former_states_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    talk = Talk(share_slots=1, host_rows=6, state_folder=str(tmp_path))
    talk.run(b"abc", 2, keep=KeepState(id="s"))
    talk.finish()
    settled(talk)
    (before,) = files(tmp_path)

    def full(*_: object) -> bytes:
        raise OSError("no space is left")

    monkeypatch.setattr(StateFileStore, "_write", full)
    talk.run(b"uvw", 2, keep=KeepState(id="s"))
    talk.finish()
    settled(talk)
    settled(talk)
    talk.engine.close()
    assert before.exists()
