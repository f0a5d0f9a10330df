"""Runs commands, in this process or as a user does, and a small trained folder to run them on."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from service import cli
from tests.once import made_once

ROOT = Path(__file__).resolve().parents[2]
TEXT = "To be, or not to be: that is the question.\n" * 60
TINY = [
    *("--layers", "1", "--d-model", "16", "--batch", "4", "--window", "32", "--steps", "6"),
    *("--evaluate-every", "3", "--device", "cpu", "--threads", "1"),
]


def command(*arguments: str | Path) -> list[str]:
    return [sys.executable, "-m", "service.cli", *map(str, arguments)]


def environment() -> dict[str, str]:
    path = os.pathsep.join([str(ROOT), *filter(None, sys.path)])
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}


@dataclass(frozen=True)
class Done:
    """What a command left."""

    returncode: int
    stdout: str
    stderr: str


Minserve = Callable[..., Done]


@pytest.fixture
def minserve(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Minserve:
    """Runs one command in this process, where torch is loaded already."""

    def run(*arguments: str | Path, stdin: bytes = b"") -> Done:
        words = [str(argument) for argument in arguments]
        monkeypatch.setattr(sys, "argv", ["minserve", *words])
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        capsys.readouterr()
        code = cli.main(words)
        return Done(code, *capsys.readouterr())

    return run


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Commands of this process find one CPU, and the next test finds torch as it was.

    The threads of several test processes would wait for each other.
    """
    before = torch.get_num_threads()
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0})
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def text_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "text.txt"
    path.write_text(TEXT)
    return path


@pytest.fixture(scope="session")
def trained(text_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint folder that `minserve train` wrote, in a process of its own."""

    def make(folder: Path) -> None:
        done = subprocess.run(
            command("train", "--data", text_file, "--out", folder / "tiny", *TINY),
            capture_output=True,
            text=True,
            env=environment(),
        )
        assert done.returncode == 0, done.stderr
        assert "Traceback" not in done.stderr

    return made_once(tmp_path_factory, "trained", make) / "tiny"
