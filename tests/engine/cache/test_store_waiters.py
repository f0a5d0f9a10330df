"""Disks that fail: what is told of a state whose file could not be written, and what is left."""

from __future__ import annotations

import builtins
import errno
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from engine.cache.storage import file_store
from engine.cache.storage.file_store import TEMPORARY
from engine.protocol.events import Finished
from engine.protocol.failed import Failed
from engine.protocol.requests import KeepState
from engine.protocol.state_calls import StateCall, StateReply
from tests.engine.cache.storage.test_named_state_file import after, files
from tests.engine.cache.test_named_states import Talk, code, text
from tests.engine.cache.test_shared_folder import beside, listed, turn

ERRORS = [errno.ENOSPC, errno.EIO, errno.EROFS, errno.EDQUOT, errno.EACCES, errno.EFBIG]
Break = Callable[[pytest.MonkeyPatch, int], None]


def _open_fails(patch: pytest.MonkeyPatch, number: int) -> None:
    real = os.open

    def fake(path: Any, flags: int, *rest: Any, **more: Any) -> int:
        if flags & os.O_CREAT and str(path).endswith(TEMPORARY):
            raise OSError(number, os.strerror(number), str(path))
        return real(path, flags, *rest, **more)

    patch.setattr(os, "open", fake)


def _write_fails(patch: pytest.MonkeyPatch, number: int) -> None:
    """After a part of the file is there."""
    real = builtins.open

    def fake(file: Any, mode: str = "r", *rest: Any, **more: Any) -> Any:
        opened = real(file, mode, *rest, **more)
        if mode != "wb":
            return opened

        class Short:
            def __enter__(self) -> Short:
                return self

            def __exit__(self, *_: object) -> None:
                opened.close()

            def write(self, content: bytes) -> int:
                opened.write(content[:100])
                raise OSError(number, os.strerror(number))

        return Short()

    patch.setattr(file_store, "open", fake, raising=False)


def _replace_fails(patch: pytest.MonkeyPatch, number: int) -> None:
    def fake(self: Path, target: Any) -> None:
        raise OSError(number, os.strerror(number), str(self))

    patch.setattr(Path, "replace", fake)


def _unlink_fails(self: Path, missing_ok: bool = False) -> None:
    raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(self))


@contextmanager
def broken(by: Break = _write_fails, number: int = errno.ENOSPC) -> Iterator[None]:
    """A disk on which nothing can be written meanwhile."""
    with pytest.MonkeyPatch.context() as patch:
        by(patch, number)
        yield


def restarted(talk: Talk, folder: Path) -> Talk:
    talk.engine.close()
    return after(talk, folder)


def stored(end: Finished | Failed) -> bool | None:
    assert isinstance(end, Finished) and end.state is not None, end
    return end.state.stored


MUST = KeepState(id="s", must_last=True)


@pytest.mark.parametrize("number", ERRORS, ids=errno.errorcode.get)
@pytest.mark.parametrize("by", [_open_fails, _write_fails, _replace_fails])
def test_a_state_that_is_to_last_fails_and_the_former_one_stays(
    tmp_path: Path, by: Break, number: int
) -> None:
    talk = Talk(state_folder=str(tmp_path))
    assert stored(talk.run(b"abc", keep=MUST)) is True
    before = [path.name for path in files(tmp_path)]
    with broken(by, number):
        for id, stays in (("s", "the former state of its id stays"), ("new", "nothing is kept")):
            end = talk.run(b"k", keep=KeepState(id=id, must_last=True))
            assert isinstance(end, Failed) and end.code == "state_not_stored", end
            assert os.strerror(number) in end.message and stays in end.message
    assert [path.name for path in files(tmp_path)] == before, "nothing is left over"
    assert listed(talk) == ["s"] and talk.engine._cache.states.files == 1
    assert text(talk.run(b"", 1, state="s")) == b"g"
    later = restarted(talk, tmp_path)
    assert listed(later) == ["s"] and text(later.run(b"", 1, state="s")) == b"g"
    assert stored(later.run(b"k", keep=MUST)) is True, "nobody has the name any more"


@pytest.mark.parametrize("number", ERRORS, ids=errno.errorcode.get)
@pytest.mark.parametrize("by", [_open_fails, _write_fails, _replace_fails])
def test_an_answer_is_given_whose_state_is_not_stored(
    tmp_path: Path, by: Break, number: int
) -> None:
    talk = Talk(state_folder=str(tmp_path))
    assert turn(talk, b"abc") == b"def"
    with broken(by, number):
        end = talk.run(b"k", keep=KeepState(id="s"), state="s")
        assert text(end) == b"lmn" and stored(end) is False
        assert turn(talk, b"", 2) == b"op", "in memory the session goes on"
        new = talk.run(b"k", keep=KeepState())
        assert stored(new) is False
        assert isinstance(new, Finished) and new.state is not None
        assert talk.ask("get", id=new.state.id).states[0].stored is False
    assert len(files(tmp_path)) == 1, "that of the session's first turn"
    later = restarted(talk, tmp_path)
    assert listed(later) == ["s"] and text(later.run(b"", 1, state="s")) == b"g"


def test_a_disk_with_room_again_stores_the_next_turn(tmp_path: Path) -> None:
    talk = Talk(state_folder=str(tmp_path))
    turn(talk, b"abc")
    with broken():
        turn(talk, b"")
    end = talk.run(b"", 2, state="s", keep=KeepState(id="s"))
    assert text(end) == b"jk" and stored(end) is True
    assert talk.engine._cache.states.files == len(files(tmp_path)) == 1
    assert text(restarted(talk, tmp_path).run(b"", 1, state="s")) == b"l"


def test_calls_that_keep_fail_and_change_nothing(tmp_path: Path) -> None:
    talk = Talk(state_folder=str(tmp_path))
    for id in ("s", "t"):
        talk.run(id.encode(), 1, keep=KeepState(id=id))
    content = talk.ask("export", id="s").content
    before = [(one.id, one.tokens, one.created) for one in talk.ask("list").states]
    with broken():
        for target in ("t", "new", ""):
            assert talk.code("import", content=content, target=target) == "state_not_stored"
            assert talk.code("fork", id="s", target=target) == "state_not_stored"
            assert talk.code("move", id="s", target=target) == "state_not_stored"
        assert talk.code("move", id="s", target="s") == "state_not_stored"
        assert [(one.id, one.tokens, one.created) for one in talk.ask("list").states] == before
        brief = talk.ask("import", content=content, brief=True)
        assert brief.failed is None and text(talk.run(b"", 1, state=brief.states[0].id)) == b"u"
        assert talk.code("delete", id=brief.states[0].id) == "ok"
    manager = talk.engine._cache
    assert not manager.states.locks._reserved and not manager.states._new_of
    assert listed(restarted(talk, tmp_path)) == ["s", "t"]
    assert talk.code("move", id="s", target="t") == "ok"


def test_rows_of_states_that_were_not_stored_come_free(tmp_path: Path) -> None:
    talk = Talk(state_folder=str(tmp_path), share_slots=2, host_rows=2)
    with broken():
        for number in range(20):
            end = talk.run(bytes([97 + number]), 0, keep=KeepState(id=f"s{number}", must_last=True))
            assert code(end) == "state_not_stored"
    assert talk.engine._cache.tiers._requiring_rows.total == 0
    assert stored(talk.run(b"a", 0, keep=MUST)) is True


def test_a_file_that_cannot_be_removed_is_told(tmp_path: Path) -> None:
    talk = Talk(state_folder=str(tmp_path))
    turn(talk, b"abc")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "unlink", _unlink_fails)
        failed = talk.ask("delete", id="s").failed
    assert failed is not None and failed.code == "state_not_stored"
    assert "Read-only file system" in failed.message
    assert listed(talk) == ["s"] and text(talk.run(b"", 1, state="s")) == b"g", "it is there still"
    assert talk.engine._cache.states.files == 1
    assert listed(restarted(talk, tmp_path)) == ["s"]


def test_who_could_not_delete_a_state_can_try_again(tmp_path: Path) -> None:
    talk = Talk(state_folder=str(tmp_path))
    turn(talk, b"abc")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "unlink", _unlink_fails)
        for _ in range(2):
            assert talk.code("delete", id="s") == "state_not_stored"
        assert code(talk.run(b"k", keep=KeepState(id="s", must_last=True))) == "state_not_stored"
        assert listed(talk) == ["s"]
    assert talk.code("delete", id="s") == "ok"
    assert files(tmp_path) == [] and talk.engine._cache.states.files == 0
    assert not talk.engine._cache.states.locks._reserved
    assert talk.engine._cache.tiers._requiring_rows.total == 0
    assert stored(talk.run(b"k", keep=MUST)) is True


def test_what_a_folder_may_hold_is_a_bound_that_is_told(tmp_path: Path) -> None:
    most = Talk().engine._cache.config.layout.most_bytes
    talk = Talk(state_folder=str(tmp_path), disk_state_bytes=most)
    assert stored(talk.run(b"abc", keep=MUST)) is True
    assert stored(talk.run(b"abc", keep=MUST)) is True, "it takes its own place"
    end = talk.run(b"abc", keep=KeepState(id="t", must_last=True))
    assert isinstance(end, Failed) and "disk_state_bytes are used up" in end.message
    assert stored(talk.run(b"abc", keep=KeepState(id="t"))) is False
    assert talk.code("fork", id="s") == "state_not_stored"


@pytest.mark.parametrize("options", [{}, {"state_folder": "x", "disk_state_bytes": 0}])
def test_without_a_place_for_files_nothing_is_said_of_them(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    if options:
        options = {**options, "state_folder": str(tmp_path)}
    talk = Talk(**options)
    assert stored(talk.run(b"abc", keep=MUST)) is None
    assert talk.ask("fork", id="s").states[0].stored is None
    assert talk.ask("get", id="s").states[0].stored is None


def errors_told(talk: Talk, work: Callable[[], object]) -> int:
    """What the stats of all messages say of them."""
    told = 0
    step = talk.engine.step

    def counted(*rest: Any) -> Any:
        nonlocal told
        events = step(*rest)
        told += max((one.stats.store_errors for one in events.values()), default=0)
        return events

    talk.engine.step = counted  # type: ignore[method-assign]
    work()
    del talk.engine.step
    return told


def test_every_failure_is_counted_once(tmp_path: Path) -> None:
    talk = Talk(state_folder=str(tmp_path))
    content = talk.ask("export", id="s").content if talk.run(b"abc", keep=MUST) else b""
    with broken():
        assert errors_told(talk, lambda: talk.run(b"k", keep=MUST)) == 1
        assert errors_told(talk, lambda: turn(talk, b"k")) == 1
        # Nobody has a part in the rounds of these.
        assert errors_told(talk, lambda: talk.ask("import", content=content)) == 1
        assert errors_told(talk, lambda: talk.ask("fork", id="s")) == 1
    assert errors_told(talk, lambda: turn(talk, b"k")) == 0


class Hanging:
    """A disk that writes nothing until it is let go."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.let_go = threading.Event()
        write = file_store._write_new

        def waiting(path: Path, content: bytes, sync: bool = False) -> None:
            assert self.let_go.wait(30)
            write(path, content, sync)

        patch.setattr(file_store, "_write_new", waiting)


@pytest.fixture
def hanging(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Talk, Hanging]]:
    talk = Talk(state_folder=str(tmp_path), share_slots=8)
    disk = Hanging(monkeypatch)
    yield talk, disk
    disk.let_go.set()
    talk.finish()


def test_what_need_not_last_does_not_wait_for_the_disk(hanging: tuple[Talk, Hanging]) -> None:
    talk, disk = hanging
    brief, lasting = KeepState(id="s", brief=True), KeepState(id="t")
    first, waits = talk.submit(b"abc", 2, keep=brief), talk.submit(b"abc", 2, keep=lasting)
    for _ in range(20):
        talk.step()
    assert stored(talk.ends[first]) is False and waits not in talk.ends
    second = talk.submit(b"", 1, state="s", keep=brief)
    for _ in range(20):
        talk.step()
    assert text(talk.ends[second]) == b"f"
    disk.let_go.set()
    talk.finish()
    assert stored(talk.ends[waits]) is True
    assert text(talk.run(b"", 1, state="s")) == b"g"


def test_only_the_answer_waits_for_the_disk(hanging: tuple[Talk, Hanging]) -> None:
    talk, disk = hanging
    waits = talk.submit(b"abc", keep=KeepState(id="s"))
    must = talk.submit(b"abc", keep=KeepState(id="t", must_last=True))
    for letter in b"aklm":
        other = talk.submit(bytes([letter]), 2)
        for _ in range(20):
            talk.step()
        assert text(talk.ends[other]) == bytes([letter + 1, letter + 2])
    assert waits not in talk.ends and must not in talk.ends
    assert talk.engine._scheduler._slots.used == 0, "no slot is held for that"
    assert code(talk.ends.pop(busy(talk, "s"))) == "state_busy"
    assert talk.code("get", id="s") == "state_not_found", "it is not there yet"
    disk.let_go.set()
    talk.finish()
    assert stored(talk.ends[waits]) is True and stored(talk.ends[must]) is True


@pytest.mark.parametrize("keep", [None, KeepState(id="t")])
def test_who_waits_for_a_file_goes_on_from_what_has_replaced_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keep: KeepState | None
) -> None:
    """The state is there before and after, so it is there for who came between."""
    talk = Talk(state_folder=str(tmp_path))
    turn(talk, b"abc")
    talk = restarted(talk, tmp_path)  # which has it in the file alone
    disk = Hanging(monkeypatch)
    new = talk.submit(b"k", 0, keep=MUST)
    for _ in range(20):
        talk.step()
    reader = talk.submit(b"", 2, state="s", keep=keep)
    for _ in range(5):
        talk.step()
    assert not talk.ends, "its read stands behind the write"
    disk.let_go.set()
    talk.finish()
    assert stored(talk.ends[new]) is True
    assert text(talk.ends[reader]) == b"lm"
    queued = talk.engine._scheduler._queue._queued.of("")
    assert queued == (0, 0) and talk.engine._scheduler._slots.used == 0
    assert text(talk.run(b"", 1, state="s")) == b"l"


def busy(talk: Talk, id: str) -> int:
    """A request that wants the name of a state that is being written."""
    request = talk.submit(b"k", 1, keep=KeepState(id=id))
    for _ in range(5):
        talk.step()
    return request


@pytest.mark.parametrize("how", ["abort", "timeout", "shutdown"])
def test_who_waits_for_a_disk_that_hangs_is_told_once(
    hanging: tuple[Talk, Hanging], how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    talk, disk = hanging
    monkeypatch.setattr("engine.engine.STORE_SECONDS", 0.05)
    ends: list[int] = []
    now = [1000.0]
    talk.engine._clock = lambda: now[0]
    may = talk.submit(b"abc", keep=KeepState(id="s"), timeout=50.0)
    must = talk.submit(b"abc", keep=KeepState(id="t", must_last=True), timeout=50.0)
    for _ in range(20):
        talk.step()
    talk.engine.ask("c", StateCall(call=5, action="fork", id="s"))  # there is none yet
    ((_, reply),) = talk.engine.replies()
    assert reply.failed is not None and not talk.ends
    match how:
        case "abort":
            talk.engine.abort("c", [may, must])
        case "timeout":
            now[0] += 51
        case "shutdown":
            talk.engine.abort_all()
    talk.step()
    assert text(talk.ends[may]) == b"def" and stored(talk.ends[may]) is False
    assert code(talk.ends[must]) == "state_not_stored"
    ends += [may, must]
    assert text(talk.ends.pop(may)) == b"def"
    talk.ends.clear()
    assert talk.ask("get", id="s").states[0].stored is False, "it can be gone on from"
    disk.let_go.set()
    talk.finish()
    assert talk.ends == {}, "a second terminal event"
    assert [state.stored for state in talk.ask("list").states] == [True, True]
    assert not talk.engine._cache.states.waiters


def test_an_import_that_waits_is_answered_at_the_end(
    hanging: tuple[Talk, Hanging], monkeypatch: pytest.MonkeyPatch
) -> None:
    talk, _ = hanging
    monkeypatch.setattr("engine.engine.STORE_SECONDS", 0.05)
    made = talk.run(b"abc", keep=KeepState(store=False, export=True))
    assert isinstance(made, Finished)
    talk.engine.ask("c", StateCall(call=1, action="import", content=made.snapshot, target="u"))
    for _ in range(20):
        talk.step()
    assert talk.engine.replies() == []
    talk.engine.abort_all()
    replies: list[StateReply] = [reply for _, reply in talk.engine.replies()]
    assert [one.failed and one.failed.code for one in replies] == ["state_not_stored"]


def test_a_round_that_fails_before_the_file_is_written_loses_the_state(tmp_path: Path) -> None:
    talk = Talk(state_folder=str(tmp_path))
    turn(talk, b"abc")
    id = talk.submit(b"", 2, state="s", keep=KeepState(id="s"))
    while talk.engine._scheduler._table:
        talk.step()
    talk.runner.failures.append(RuntimeError("boom"))
    talk.finish()
    assert code(talk.ends[id]) == "step_failed"
    assert turn(talk, b"", 1) == b"g", "what was kept before stays"
    assert text(restarted(talk, tmp_path).run(b"", 1, state="s")) == b"h"


def test_an_engine_that_could_not_write_is_not_thrown_back_by_the_file(tmp_path: Path) -> None:
    """Beside another one, to which the folder is all that there is."""
    old = Talk(state_folder=str(tmp_path))
    turn(old, b"abc")
    with broken():
        turn(old, b"")
    new = beside(old, tmp_path)
    assert turn(old, b"", 0) == b"" and new.ask("get", id="s").states[0].tokens == 9
    with broken():
        assert turn(old, b"") == b"jkl"
        assert old.ask("get", id="s").states[0].tokens == 12
        assert old.ask("list").states[0].tokens == 12
    assert new.ask("get", id="s").states[0].tokens == 9
    new.engine.close()
    old.engine._cache.states._asked = 0.0
    old.step()
    assert old.ask("list").states[0].tokens == 12
    assert old.code("delete", id="s") == "ok" and files(tmp_path) == []


def test_with_fsync_file_and_folder_are_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    real = os.fsync

    def noted(descriptor: int) -> None:
        done.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", noted)
    talk = Talk(state_folder=str(tmp_path / "write"))
    talk.run(b"abc", keep=MUST)
    assert done == [], "by default nothing waits for that"
    talk = Talk(state_folder=str(tmp_path / "fsync"), state_sync="fsync")
    assert stored(talk.run(b"abc", keep=MUST)) is True
    file, folder = done
    assert file.endswith(TEMPORARY) and folder == str(tmp_path / "fsync")


@pytest.mark.parametrize("of", ["file", "folder"])
def test_an_fsync_that_fails_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, of: str
) -> None:
    talk = Talk(state_folder=str(tmp_path), state_sync="fsync")
    talk.run(b"abc", keep=MUST)
    real = os.fsync

    def fails(descriptor: int) -> None:
        if Path(os.readlink(f"/proc/self/fd/{descriptor}")).is_dir() == (of == "folder"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        real(descriptor)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fails)
        end = talk.run(b"xyz", 0, keep=MUST)
        assert isinstance(end, Failed) and end.code == "state_not_stored", end
        assert os.strerror(errno.EIO) in end.message
        assert stored(talk.run(b"xyz", 0, keep=KeepState(id="t"))) is False
    # A file that has its name has it; memory follows.
    tokens = {"file": 6, "folder": 3}[of]
    for engine in (talk, restarted(talk, tmp_path)):
        assert engine.ask("get", id="s").states[0].tokens == tokens
    assert not [path for path in tmp_path.iterdir() if path.name.endswith(TEMPORARY)]
