"""Two engines of one model in one folder, as a reload has them: who sees what, who may change what,
and what is left when one of them has ended, however it did."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from engine.cache.storage.file_store import StateFileStore
from engine.cache.storage.folder_lock import FolderLock
from engine.cache.storage.state_folder import PREFIX_FOLDER
from engine.protocol.events import Finished
from engine.protocol.requests import KeepState
from tests.engine.cache.test_disk_tier import cached, prompt, settle, start
from tests.engine.cache.test_named_states import Talk, code, text

MODEL = "fake"


def beside(former: Talk, folder: Path, **options: Any) -> Talk:
    """An engine that starts while another one serves."""
    talk = Talk(state_folder=str(folder), **options)
    talk.runner.outside = former.runner.outside
    return talk


def file_store_of(talk: Talk) -> StateFileStore:
    file_store = talk.engine._cache.states._file_store
    assert file_store is not None
    return file_store


def listed(talk: Talk, **fields: Any) -> list[str]:
    return [state.id for state in talk.ask("list", **fields).states]


def turn(talk: Talk, more: bytes, count: int = 3) -> bytes:
    """Of the session "s"."""
    return text(talk.run(more, count, state="s", state_optional=True, keep=KeepState(id="s")))


def test_what_the_older_engine_writes_after_the_start_of_the_other_one_is_gone_on_from(
    tmp_path: Path,
) -> None:
    old = Talk(state_folder=str(tmp_path))
    assert turn(old, b"abc") == b"def"
    new = beside(old, tmp_path)
    assert new.ask("get", id="s").states[0].tokens == 6
    assert turn(old, b"m", 5) == b"nopqr", "longer, and with another end"
    assert new.ask("get", id="s").states[0].tokens == 12
    assert turn(new, b"") == b"stu"
    assert old.ask("get", id="s").states[0].tokens == 15
    assert turn(old, b"") == b"vwx", "nor does the older one go on from what it remembers"


def test_a_state_that_is_replaced_while_its_file_is_waited_for_is_not_taken_for_it(
    tmp_path: Path,
) -> None:
    old = Talk(state_folder=str(tmp_path))
    turn(old, b"abc")
    new = beside(old, tmp_path)
    late = new.submit(b"", 1, state="s")  # accepted, with what the file says now
    assert turn(old, b"uvw", 0) == b""
    new.finish()
    assert text(new.ends[late]) == b"x", "it goes on from what has replaced it"
    assert turn(new, b"abc") == b"def"


def test_one_turn_at_a_time(tmp_path: Path) -> None:
    old = Talk(state_folder=str(tmp_path))
    turn(old, b"abc")
    new = beside(old, tmp_path)
    under_way = old.submit(b"", 4, state="s", keep=KeepState(id="s"))
    old.step()
    assert code(new.run(b"", 1, state="s", keep=KeepState(id="s"))) == "state_busy"
    for action in ("delete", "move"):
        assert new.code(action, id="s") == "state_busy"
    assert new.code("fork", id="s", target="s") == "state_busy"
    assert text(new.run(b"", 1, state="s")) == b"g", "as it is, it may be used"
    old.engine.abort("c", [under_way])
    old.finish()
    assert turn(new, b"", 1) == b"g", "a turn that was aborted has not been"


def test_an_answer_is_told_when_the_other_engine_can_go_on_from_it(tmp_path: Path) -> None:
    old = Talk(state_folder=str(tmp_path))
    new = beside(old, tmp_path)
    for more in (b"abc", b"k", b"r"):
        id = old.submit(more, 2, state="s", state_optional=True, keep=KeepState(id="s"))
        while id not in old.ends:
            assert old.engine.has_work
            old.step()
        before = old.ends[id]
        assert isinstance(before, Finished) and before.state is not None
        assert new.ask("get", id="s").states[0].tokens == before.state.tokens
        assert new.code("move", id="s", target="s") == "ok", "nobody has it any more"


def test_what_calls_do_is_seen_when_they_are_answered(tmp_path: Path) -> None:
    old = Talk(state_folder=str(tmp_path))
    turn(old, b"abc")
    new = beside(old, tmp_path)
    for one, other in ((old, new), (new, old)):
        content = one.ask("export", id="s").content
        assert one.code("fork", id="s", target="t") == "ok"
        assert listed(other) == ["s", "t"] and other.code("get", id="t") == "ok"
        assert one.code("import", content=content, target="u") == "ok"
        assert text(other.run(b"", 1, state="u")) == b"g"
        assert one.code("move", id="u", target="v") == "ok"
        assert listed(other) == ["s", "t", "v"]
        assert other.code("get", id="u") == "state_not_found"
        assert one.code("delete", id="t") == one.code("delete", id="v") == "ok"
        assert other.code("get", id="t") == "state_not_found"
        assert listed(other) == ["s"]
        assert other.code("delete", id="v") == "state_not_found"


def test_a_state_that_has_moved_is_nowhere_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When that is answered, however slow the disk is."""
    unlink = Path.unlink

    def slowly(self: Path, missing_ok: bool = False) -> None:
        time.sleep(0.2)
        unlink(self, missing_ok)

    old = Talk(state_folder=str(tmp_path))
    turn(old, b"abc")
    new = beside(old, tmp_path)
    monkeypatch.setattr(Path, "unlink", slowly)
    assert old.code("move", id="s", target="t") == "ok"
    assert listed(new) == ["t"]


def test_what_the_older_engine_is_writing_is_not_cleared_away(tmp_path: Path) -> None:
    old = Talk(state_folder=str(tmp_path))
    turn(old, b"abc")
    name = StateFileStore.name(MODEL, "", "u") + file_store_of(old)._temporary
    (tmp_path / name).write_bytes(b"as far as it has come")
    new = beside(old, tmp_path)
    new.ask("list")
    assert (tmp_path / name).exists()
    old.engine.close()
    new.ask("list")
    assert not (tmp_path / name).exists(), "nobody will finish it"


def test_nothing_expires_on_disk_while_there_are_two(tmp_path: Path) -> None:
    old = Talk(state_folder=str(tmp_path), state_ttl=100.0)
    turn(old, b"abc")
    new = beside(old, tmp_path, state_ttl=100.0)
    now = old.engine._cache.states._clock()
    old.engine._cache.states._clock = lambda: now + 200
    old.ask("list")
    assert old.code("get", id="s") == "state_not_found"
    assert turn(new, b"") == b"ghi"


def test_who_is_left_takes_stock(tmp_path: Path) -> None:
    old = Talk(state_folder=str(tmp_path))
    for id in ("a", "b", "c"):
        old.run(id.encode(), 1, keep=KeepState(id=id))
    new = beside(old, tmp_path)
    old.run(b"b", 2, keep=KeepState(id="b"))
    old.ask("delete", id="c")
    old.run(b"m", 1, keep=KeepState(id="d"))
    old.engine.close()
    new.engine._cache.collect()
    states = new.engine._cache.states
    assert sorted(named.id for named in states._index.all()) == ["a", "b", "d"]
    assert states.files == 3 and states.get("", "b").point.tokens == 3
    assert text(new.run(b"", 1, state="b")) == b"e"
    new.engine.close()
    third = beside(new, tmp_path)
    assert listed(third) == ["a", "b", "d"]


def test_rounds_do_not_ask_for_other_engines_every_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a file system of another machine that is a call to it."""
    talk = Talk(state_folder=str(tmp_path))
    states = talk.engine._cache.states
    now = states._clock()
    states._clock = lambda: now
    asked: list[bool] = []
    alone = FolderLock.alone.fget
    assert alone is not None
    monkeypatch.setattr(
        FolderLock, "alone", property(lambda self: asked.append(alone(self)) or asked[-1])
    )
    talk.run(b"abc", 50)
    assert len(asked) <= 1
    now += 2
    talk.run(b"abc", 1)
    assert 1 <= len(asked) <= 2, "but now and then"


def test_a_state_without_a_file_stays_its_engines(tmp_path: Path) -> None:
    old = Talk(state_folder=str(tmp_path), disk_state_bytes=0)
    assert turn(old, b"abc") == b"def"
    new = beside(old, tmp_path)
    assert listed(old) == ["s"] and listed(new) == []
    assert turn(old, b"") == b"ghi"
    new.engine.close()
    assert listed(old) == ["s"]


def test_cached_states_are_read_by_both_and_counted_by_one(tmp_path: Path) -> None:
    folder = tmp_path / PREFIX_FOLDER
    old = start(tmp_path)
    cached(old, prompt(0))
    cached(old, prompt(1))
    for number in range(2, 8):
        cached(old, prompt(number))
        settle_beside(old)
    new = start(tmp_path, old)
    before = {path.name for path in folder.iterdir()}
    assert before and any(cached(new, prompt(number)) == 300 for number in range(8))
    for number in range(10, 20):
        cached(new, prompt(number))
        settle_beside(new)
    assert {path.name for path in folder.iterdir()} <= before, "it adds nothing"
    cached(old, prompt(30))
    settle_beside(old)
    settle(old)
    old.engine.close()
    new.engine._cache.collect()
    disk = new.engine._cache.disk
    assert not disk._left
    assert disk.bytes == sum(path.stat().st_size for path in folder.iterdir())
    assert cached(new, prompt(30)) == 300, "it was the last that the older one wrote"
    for number in range(40, 50):
        cached(new, prompt(number))
        settle_beside(new)
    assert not {path.name for path in folder.iterdir()} <= before


def settle_beside(talk: Talk) -> None:
    """What is under way to the disk is there; the folder stays this engine's too."""
    talk.finish()
    transfer = talk.engine._cache.transfer
    transfer.flush()
    transfer.collect()


HOLDER = """
import sys, time
from pathlib import Path
from engine.cache.storage.folder_lock import FolderLock
lock = FolderLock(Path(sys.argv[1]))
assert lock.acquire("s")
print("held", flush=True)
time.sleep(600)
"""


def test_a_killed_process_holds_nothing(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    mine = FolderLock(path)
    assert mine.alone and mine.acquire("t")
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, str(path)], stdout=subprocess.PIPE)
    try:
        assert holder.stdout is not None and holder.stdout.readline() == b"held\n"
        assert not mine.alone and not mine.acquire("s") and mine.acquire("t")
    finally:
        os.kill(holder.pid, signal.SIGKILL)
        holder.communicate()
    assert mine.alone and mine.acquire("s")
    mine.close()


def test_locks_are_of_an_engine_and_not_of_a_process(tmp_path: Path) -> None:
    one, other = FolderLock(tmp_path / "lock"), FolderLock(tmp_path / "lock")
    assert not one.alone and not other.alone
    assert one.acquire("a") and one.acquire("a") and other.acquire("b")
    assert not other.acquire("a") and not one.acquire("b")
    one.release("a")
    assert other.acquire("a")
    other.close()
    assert one.alone and one.acquire("a") and one.acquire("b")
    one.close()
    one.release("a")
    assert one.acquire("a"), "who has closed it does as it likes"


def test_a_link_is_no_lock(tmp_path: Path) -> None:
    (tmp_path / "target").touch()
    (tmp_path / "lock").symlink_to(tmp_path / "target")
    with pytest.raises(OSError, match="lock"):
        FolderLock(tmp_path / "lock")


def test_without_locks_an_engine_takes_itself_for_the_only_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def unsupported(self: FolderLock, kind: int, byte: int) -> None:
        raise OSError("no locks available")

    monkeypatch.setattr(FolderLock, "_set", unsupported)
    talk = Talk(state_folder=str(tmp_path))
    assert turn(talk, b"abc") == b"def" and turn(talk, b"") == b"ghi"
    assert "only one engine may use this folder" in caplog.text


def test_a_system_without_such_locks_has_one_engine(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("sys.platform", "darwin")
    lock = FolderLock(tmp_path / "lock")
    assert "only one engine may use this folder" in caplog.text
    assert lock.alone and lock.acquire("name")
    lock.release("name")
    lock.close()
