"""Files of kept states: what else lies in their folder, what cannot be read, who shares it."""

from __future__ import annotations

import errno
import os
import socket
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from engine.cache.storage import file_store, snapshot
from engine.cache.storage.file_store import SUFFIX, TEMPORARY, StateFileStore
from engine.protocol.failed import Failed
from engine.protocol.requests import KeepState
from engine.protocol.state_calls import StateCall
from loadtest.fuzz.snapshots import without_digest
from tests.engine.cache.test_named_states import Talk, code, text

MODEL = "fake"  # the fake runner's fingerprint


def written(folder: Path, **options: Any) -> Talk:
    """An engine that has left the state "s" after b"abcdef", and waits for nothing."""
    talk = Talk(state_folder=str(folder), **options)
    talk.run(b"abc", keep=KeepState(id="s"))
    talk.engine.close()
    return talk


def files(folder: Path) -> list[Path]:
    """All but the engine's lock."""
    return sorted(path for path in folder.iterdir() if not path.name.endswith("-lock"))


def after(former: Talk, folder: Path, **options: Any) -> Talk:
    talk = Talk(state_folder=str(folder), **options)
    talk.runner.outside = former.runner.outside
    return talk


def test_a_folder_of_hostile_things(tmp_path: Path) -> None:
    former = written(tmp_path)
    (name,) = [path.name for path in files(tmp_path)]
    part = name.partition("-")[0] + "-"
    outside = tmp_path.parent / "outside.safetensors"
    outside.write_bytes((tmp_path / name).read_bytes())
    os.mkfifo(tmp_path / f"{part}pipe{SUFFIX}")
    (tmp_path / f"{part}folder{SUFFIX}").mkdir()
    (tmp_path / f"{part}loop{SUFFIX}").symlink_to(f"{part}loop{SUFFIX}")
    (tmp_path / f"{part}zero{SUFFIX}").symlink_to("/dev/zero")
    (tmp_path / f"{part}link{SUFFIX}").symlink_to(outside)
    with open(tmp_path / f"{part}huge{SUFFIX}", "wb") as file:
        file.truncate(2**40)
    with socket.socket(socket.AF_UNIX) as one:
        one.bind(str(tmp_path / f"{part}s{SUFFIX}"))
    (tmp_path / f"probe{TEMPORARY}").symlink_to(outside)
    os.mkfifo(tmp_path / f"pipe{TEMPORARY}")
    (tmp_path / f"folder{TEMPORARY}").mkdir()
    before = outside.read_bytes()
    talk = after(former, tmp_path)
    assert [state.id for state in talk.ask("list").states] == ["s"]
    assert text(talk.run(b"", 1, state="s")) == b"g"
    assert outside.read_bytes() == before


def test_nothing_is_written_through_a_link(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.write_bytes(b"precious")
    folder = tmp_path / "states"
    talk = Talk(state_folder=str(folder))
    name = StateFileStore.name(MODEL, "", "s")
    file_store = talk.engine._cache.states._file_store
    assert file_store is not None
    (folder / (name + file_store._temporary)).symlink_to(outside)
    (folder / name).symlink_to(outside)
    talk.run(b"abc", keep=KeepState(id="s"))
    talk.engine.close()
    assert outside.read_bytes() == b"precious"
    assert not (folder / name).is_symlink()
    assert text(after(talk, folder).run(b"", 1, state="s")) == b"g"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("ttl", "nan"),
        ("ttl", "inf"),
        ("ttl", "-1"),
        ("ttl", "1e300"),
        ("ttl", "soon"),
        ("created", "nan"),
        ("created", "-inf"),
        ("id", "a/b"),
        ("id", "other"),
        ("owner", "\ud800"),
    ],
)
def test_absurd_entries_are_not_taken_over(tmp_path: Path, field: str, value: str) -> None:
    talk = written(tmp_path)
    (path,) = files(tmp_path)
    shape = talk.engine._cache.config.layout
    found = snapshot.read(path.read_bytes(), shape)
    found.extra[field] = value
    path.write_bytes(snapshot.write(found, shape))
    assert after(talk, tmp_path).ask("list").states == []
    assert path.exists(), "it is left alone"


def test_a_time_to_come_puts_the_end_off_no_further(tmp_path: Path) -> None:
    talk = written(tmp_path, state_ttl=50.0)
    (path,) = files(tmp_path)
    os.utime(path, (2**40, 2**40))
    (state,) = after(talk, tmp_path).ask("list").states
    assert state.expires < 2**40


def test_a_state_in_use_outlasts_restarts(tmp_path: Path) -> None:
    """Its time begins anew with every use, also for an engine that knows its file alone."""
    talk = written(tmp_path, state_ttl=100.0)
    (path,) = files(tmp_path)
    for action in ("get", "export", "run"):
        begun = time.time()
        os.utime(path, (begun - 80, begun - 80))
        talk = after(talk, tmp_path)
        (state,) = talk.ask("list").states
        assert state.expires < begun + 21, "to be listed is no use"
        if action == "run":
            assert text(talk.run(b"", 1, state="s")) == b"g"
        else:
            assert talk.code(action, id="s") == "ok"
        talk.engine.close()
        talk = after(talk, tmp_path)
        (state,) = talk.ask("list").states
        assert state.expires > begun + 99
        talk.engine.close()


def test_not_every_use_is_told_to_the_disk(tmp_path: Path) -> None:
    talk = written(tmp_path, state_ttl=800.0)
    (path,) = files(tmp_path)
    now = time.time()
    os.utime(path, (now - 90, now - 90))
    talk = after(talk, tmp_path)
    file_store = talk.engine._cache.states._file_store
    assert file_store is not None
    assert talk.code("get", id="s") == "ok" and file_store.pending == 0
    talk.engine._cache.states._clock = lambda: now + 20
    assert talk.code("get", id="s") == "ok" and file_store.pending == 1
    assert talk.code("get", id="s") == "ok" and file_store.pending == 1
    talk.engine.close()
    assert path.stat().st_mtime == pytest.approx(now + 20)


def test_what_has_taken_a_files_name_is_not_made_younger(tmp_path: Path) -> None:
    one = StateFileStore(tmp_path, MODEL)
    told: list[Any] = []
    one.write("x", lambda: b"content", told.append)
    one.close()
    (tmp_path / "y").write_bytes(b"another")
    (tmp_path / "y").replace(tmp_path / "x")
    one.touch("x", told[0], 5.0, told.append)
    one.close()
    assert isinstance(told[1], FileNotFoundError) and (tmp_path / "x").stat().st_mtime > 5
    one.touch("x", one.tag("x"), 5.0, told.append)
    one.close()
    assert told[2] == one.tag("x") and (tmp_path / "x").stat().st_mtime == 5


def test_models_share_a_folder(tmp_path: Path) -> None:
    class Other(Talk):
        def __init__(self, **options: Any) -> None:
            super().__init__(**options)
            self.runner.info = msgspec.structs.replace(self.runner.info, fingerprint="other")
            self.engine = type(self.engine)(self.runner)

    one = written(tmp_path)
    other = Other(state_folder=str(tmp_path))
    assert other.ask("list").states == []
    other.run(b"xyz", 0, keep=KeepState(id="s"))
    other.engine.close()
    assert len(files(tmp_path)) == 2
    assert text(after(one, tmp_path).run(b"", 1, state="s")) == b"g"
    again = Other(state_folder=str(tmp_path))
    assert [state.tokens for state in again.ask("list").states] == [3]


def out_of_rows(talk: Talk, id: str = "s") -> Any:
    """The kept state of a name, which lies in its files alone from now on."""
    kept = talk.engine._cache.states.get("", id).point.state
    assert kept.written
    talk.engine._cache.tiers.free_row(kept)
    assert not kept.has_row
    return kept


def test_a_file_that_cannot_be_read_just_now_is_read_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    talk = written(tmp_path)
    kept = out_of_rows(talk)
    read = file_store._read

    def busy(path: Path, most: int) -> bytes:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(file_store, "_read", busy)
    failed = talk.run(b"", 1, state="s")
    assert isinstance(failed, Failed) and failed.code == "step_failed"
    assert "Too many open files" in failed.message
    assert talk.code("export", id="s") == "step_failed"
    monkeypatch.setattr(file_store, "_read", read)
    assert kept.files and text(talk.run(b"", 1, state="s")) == b"g"


@pytest.mark.parametrize("damage", ["gone", "cut"])
def test_another_names_file_is_as_good(tmp_path: Path, damage: str) -> None:
    talk = written(tmp_path)
    talk.ask("fork", id="s", target="t")
    talk.finish()
    talk.engine.close()
    kept = out_of_rows(talk)
    names = {id: StateFileStore.name(MODEL, "", id) for id in ("s", "t")}
    assert kept.files == kept.written == set(names.values())
    for name in sorted(names.values()):
        path = tmp_path / name
        if damage == "gone":
            path.unlink()
        else:
            path.write_bytes(path.read_bytes()[:-1])
        if len(kept.files) == 2:
            assert text(talk.run(b"", 1, state="t")) == b"g"
            out_of_rows(talk)
            kept.files = kept.written = {one for one in names.values() if one != name}
    assert code(talk.run(b"", 1, state="s")) == "state_not_found"
    assert talk.code("export", id="t") == "state_not_found"
    assert kept.files == set()


def test_a_file_on_its_way_counts_as_none(tmp_path: Path) -> None:
    """While the only whole file goes, the state needs its row."""
    talk = written(tmp_path)
    kept = talk.engine._cache.states.get("", "s").point.state
    talk.engine.ask("c", StateCall(call=1, action="fork", id="s", target="t"))
    assert kept.written == {StateFileStore.name(MODEL, "", "s")}
    talk.engine.ask("c", StateCall(call=2, action="delete", id="s"))
    assert not kept.written
    talk.finish()
    talk.engine.close()
    assert kept.written == {StateFileStore.name(MODEL, "", "t")}
    assert [reply.failed for _, reply in talk.engine.replies()] == [None, None]


def test_a_disk_that_is_full_counts_what_lies_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    talk = written(tmp_path)

    def full(path: Path, content: bytes, sync: bool) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(file_store, "_write_new", full)
    for id in ("s", "t"):
        talk.run(b"xyz", 0, keep=KeepState(id=id))
        talk.finish()
        talk.engine.close()
    assert talk.engine._cache.states.files == len(files(tmp_path)) == 1, "the former state's"
    assert talk.code("delete", id="s") == "ok"
    assert talk.engine._cache.states.files == 0
    assert files(tmp_path) == []


def test_what_is_written_is_not_held(tmp_path: Path) -> None:
    one = StateFileStore(tmp_path, MODEL)
    told: list[object] = []
    one.write("x", lambda: b"content", told.append)
    one.close()
    assert told == [one.tag("x")] and (tmp_path / "x").read_bytes() == b"content"


def flipped(path: Path, at: int) -> None:
    """One bit of a float, which stays finite."""
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


def test_a_bit_that_flips_on_the_disk_is_found(tmp_path: Path) -> None:
    """By an engine that starts, and by one that has read the file before."""
    talk = written(tmp_path)
    talk.run(b"abc", keep=KeepState(id="t"))
    talk.engine.close()
    out_of_rows(talk, "t")
    (tail,) = [len((tmp_path / StateFileStore.name(MODEL, "", "t")).read_bytes()) - 4]
    for at in (tail - 100, tail):  # of the state; of its tail, the last token
        flipped(tmp_path / StateFileStore.name(MODEL, "", "t"), at)
        assert [one.id for one in after(talk, tmp_path).ask("list").states] == ["s"]
        kept = talk.engine._cache.states.get("", "t").point.state
        kept.files = kept.written = {StateFileStore.name(MODEL, "", "t")}
        assert code(talk.run(b"", 1, state="t")) == "state_not_found"
        flipped(tmp_path / StateFileStore.name(MODEL, "", "t"), at)
    kept.files = kept.written = {StateFileStore.name(MODEL, "", "t")}
    assert text(talk.run(b"", 1, state="t")) == b"g"


def test_files_of_the_former_format_are_taken_over(tmp_path: Path) -> None:
    talk = written(tmp_path)
    (path,) = files(tmp_path)
    path.write_bytes(without_digest(path.read_bytes()))
    later = after(talk, tmp_path)
    assert text(later.run(b"", 1, state="s")) == b"g"
    assert text(later.run(b"", 1, state="s", keep=KeepState(id="s"))) == b"g"
    later.engine.close()
    assert b"minserve.state.3" in path.read_bytes(), "a turn later it has a digest"
