"""Runs commands as a user does, and a small trained folder to run them on."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TEXT = "To be, or not to be: that is the question.\n" * 60
TINY = [
    *("--layers", "1", "--d-model", "16", "--batch", "4", "--window", "32", "--steps", "6"),
    *("--evaluate-every", "3", "--device", "cpu", "--threads", "1"),
]

Minserve = Callable[..., subprocess.CompletedProcess[str]]


def command(*arguments: str | Path) -> list[str]:
    return [sys.executable, "-m", "service.cli", *map(str, arguments)]


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="session")
def minserve() -> Minserve:
    """Runs one command in a process of its own, without a terminal."""

    def run(*arguments: str | Path, stdin: bytes = b"") -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            command(*arguments), input=stdin, capture_output=True, env=environment(), timeout=120
        )
        return subprocess.CompletedProcess(
            done.args, done.returncode, done.stdout.decode(), done.stderr.decode()
        )

    return run


@pytest.fixture(scope="session")
def text_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "text.txt"
    path.write_text(TEXT)
    return path


@pytest.fixture(scope="session")
def trained(minserve: Minserve, text_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint folder that `minserve train` wrote."""
    folder = tmp_path_factory.mktemp("trained") / "tiny"
    done = minserve("train", "--data", text_file, "--out", folder, *TINY)
    assert done.returncode == 0, done.stderr
    return folder
