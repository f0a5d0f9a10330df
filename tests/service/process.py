"""A server in a process of its own, with a fake engine in its worker, under a test's eyes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
import sys
from types import SimpleNamespace
from engine.client import socket_transport as transport
from service.server.server import serve
from service.settings import Settings
transport.sys = SimpleNamespace(executable=PYTHON or sys.executable, path=sys.path)
options = {"port": PORT, "max_slots": 4, "stall_timeout": STALL, **OPTIONS}
sys.exit(serve(Settings(**options), "ENGINE"))
"""


class Process:
    """A server under test; `lines` is what it says, `output` what it prints."""

    def __init__(
        self,
        port: int = 0,
        engine: str = "tests.engine.fake:fake_engine",
        stall_timeout: float = 60,
        python: str | None = None,  # that runs the worker
        **settings: Any,
    ) -> None:
        program = PROGRAM.replace("ENGINE", engine).replace("PORT", str(port))
        program = program.replace("STALL", str(stall_timeout))
        program = program.replace("PYTHON", repr(python)).replace("OPTIONS", repr(settings))
        self.popen = subprocess.Popen(
            [sys.executable, "-c", program],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            start_new_session=True,  # a process group of its own
            env=os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)])},
        )
        self.lines: list[str] = []
        self.output: list[str] = []
        self._readers = [
            threading.Thread(target=self._read, args=pair, daemon=True)
            for pair in ((self.popen.stderr, self.lines), (self.popen.stdout, self.output))
        ]
        for reader in self._readers:
            reader.start()

    def _read(self, stream: Any, lines: list[str]) -> None:
        for line in stream:
            lines.append(line.rstrip())

    def said(self, pattern: str) -> re.Match[str]:
        """Waits until a line of the log matches."""
        return self._await(pattern, self.lines)

    def printed(self, pattern: str) -> re.Match[str]:
        """Waits until a line of the output matches."""
        return self._await(pattern, self.output)

    def _await(self, pattern: str, lines: list[str]) -> re.Match[str]:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            for line in list(lines):
                if match := re.search(pattern, line):
                    return match
            ended = self.popen.poll() is not None
            if ended and not any(reader.is_alive() for reader in self._readers):
                break
            time.sleep(0.01)
        raise AssertionError(f"never said {pattern!r}: {lines}")

    @property
    def url(self) -> str:
        return self.said(r"listening on (https?://\S+)")[1]

    def exit_code(self) -> int:
        code = self.popen.wait(60)
        for reader in self._readers:
            reader.join(10)
        return code


@contextmanager
def serving(**options: Any) -> Iterator[Process]:
    process = Process(**options)
    try:
        yield process
    finally:
        process.popen.kill()
        process.popen.wait()


def children(pid: int) -> list[int]:
    """The processes that this one has started."""
    path = Path(f"/proc/{pid}/task/{pid}/children")
    if not path.exists():
        pytest.skip("needs /proc")
    return [int(child) for child in path.read_text().split()]


def running_module(pid: int, module: str) -> list[int]:
    """The processes that this one has started to run this module."""
    return [child for child in children(pid) if module.encode() in _arguments(child)]


def _arguments(pid: int) -> list[bytes]:
    """What the process was started with; nothing of one that has ended meanwhile."""
    with suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    return []
