"""API keys: how they are written down, checked and replaced."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from engine.errors import ConfigError
from service import keys
from service.keys import ApiKeys, parse_keys, single_key
from tests.service.harness import until

ALICE, BOB, NEW = "alice-0123456789abcdef", "bob:0123456789/+=~abcdef", "new-0123456789abcdef"


def write(path: Path, text: str, mode: int = 0o600) -> Path:
    path.write_text(text, encoding="utf-8")
    path.chmod(mode)
    return path


def test_files_and_environment_name_keys(tmp_path: Path) -> None:
    path = write(tmp_path / "keys", f"# ours\n\n  alice:{ALICE}\nbob {BOB}\r\nalice : {NEW}\n")
    found = ApiKeys(f"carol:{'c' * 16}, dave:{'d' * 16}", path)
    for key, name in ((ALICE, "alice"), (BOB, "bob"), (NEW, "alice"), ("c" * 16, "carol")):
        assert found.find(key.encode()) == (name, 0)
    for wrong in ("", "alice", ALICE[:-1], ALICE + "x", ALICE.upper(), f"alice:{ALICE}"):
        assert found.find(wrong.encode()) is None
    assert found.find(b"\xff" * 20) is None


def test_keys_have_priorities(tmp_path: Path) -> None:
    path = write(tmp_path / "keys", f"alice:{ALICE} priority=-10\nbob {BOB}   priority=7\n")
    found = ApiKeys(f"carol:{'c' * 16} priority=-1, dave:{'d' * 16}", path)
    for key, known in (
        (ALICE, ("alice", -10)),
        (BOB, ("bob", 7)),
        ("c" * 16, ("carol", -1)),
        ("d" * 16, ("dave", 0)),
    ):
        assert found.find(key.encode()) == known


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "no keys"),
        ("# nothing\n\n", "no keys"),
        (ALICE, "entry 1: allowed: name:key"),
        (f"a:{ALICE}\nbob", "entry 2: allowed: name:key"),
        (f"a:{ALICE} more", "entry 1"),
        (f"a:{ALICE} priority=", "entry 1"),
        (f"a:{ALICE} priority=1.5", "entry 1"),
        (f"a:{ALICE} priority=101", "entry 1: priority=101; allowed: -100 to 100"),
        (f"a:{ALICE}\na:{ALICE} priority=3", "entry 2: the key of a is listed before"),
        ("a:tooshort", "16 to 512"),
        (f"a:{'x' * 513}", "16 to 512"),
        (f"a:{ALICE}é", "16 to 512"),
        (f"a/b:{ALICE}", "the name is not valid"),
        (f"{'n' * 65}:{ALICE}", "the name is not valid"),
        (f"a:{ALICE}\nb:{ALICE}", "entry 2: the key of b is listed before"),
    ],
)
def test_mistakes_are_told_without_the_key(text: str, says: str, tmp_path: Path) -> None:
    path = write(tmp_path / "keys", text)
    with pytest.raises(ConfigError, match=says) as caught:
        ApiKeys(None, path)
    assert str(path) in caught.value.message
    for secret in (ALICE, "tooshort", "xxx"):
        assert secret not in caught.value.message


def test_an_empty_variable_is_no_open_door() -> None:
    with pytest.raises(ConfigError, match="MINSERVE_API_KEYS holds no keys"):
        ApiKeys("", None)
    with pytest.raises(ConfigError, match="MINSERVE_ADMIN_KEY"):
        single_key("", "admin", "MINSERVE_ADMIN_KEY")


def test_a_key_of_the_environment_cannot_be_anothers_in_the_file(tmp_path: Path) -> None:
    path = write(tmp_path / "keys", f"bob:{ALICE}")
    with pytest.raises(ConfigError, match="bob") as caught:
        ApiKeys(f"alice:{ALICE}", path)
    assert ALICE not in caught.value.message


def test_keys_are_not_kept(tmp_path: Path) -> None:
    assert ALICE.encode() not in b"".join(parse_keys(f"a:{ALICE}", "x"))


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        ApiKeys(None, tmp_path / "missing")
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="not UTF-8"):
        ApiKeys(None, tmp_path / "bytes")


@pytest.mark.parametrize(("mode", "warned"), [(0o600, False), (0o640, False), (0o644, True)])
def test_a_file_that_others_may_read_is_warned_of(
    mode: int, warned: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ApiKeys(None, write(tmp_path / "keys", f"a:{ALICE}", mode))
    assert ("readable by its owner only" in caplog.text) == warned


async def test_a_changed_file_is_read_again_and_a_broken_one_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    import asyncio

    monkeypatch.setattr(keys, "LOOK_SECONDS", 0.01)
    caplog.set_level(logging.INFO)
    path = write(tmp_path / "keys", f"alice:{ALICE}")
    found = ApiKeys(f"dave:{'d' * 16}", path)
    watch = asyncio.create_task(found.watch())
    try:
        write(path, f"alice:{NEW}")
        await until(lambda: found.find(NEW.encode()) == ("alice", 0))
        assert found.find(ALICE.encode()) is None
        assert found.find(b"d" * 16) == ("dave", 0)
        for step in (lambda: write(path, "nonsense"), path.unlink):
            caplog.clear()
            step()
            await until(lambda: "the keys stay as they were" in caplog.text)
            assert found.find(NEW.encode()) == ("alice", 0)
        other = write(tmp_path / "other", f"bob:{BOB}")
        other.rename(path)
        await until(lambda: found.find(BOB.encode()) == ("bob", 0))
        assert found.find(NEW.encode()) is None
    finally:
        watch.cancel()
