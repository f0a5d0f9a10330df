"""`serve` in a process of its own, the fake engine in a worker: socket, signals, exit codes."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
import sys
from engine.client import EngineClient
from engine.transport import ProcessTransport
from service.server import serve
from service.settings import Settings
EngineClient.spawn = lambda config: EngineClient(ProcessTransport(config, engine="ENGINE"))
sys.exit(serve(Settings(port=PORT, max_slots=4)))
"""


class Process:
    """A server under test; `lines` is what it says."""

    def __init__(self, port: int = 0, engine: str = "tests.engine.fake:fake_engine") -> None:
        program = PROGRAM.replace("ENGINE", engine).replace("PORT", str(port))
        self.popen = subprocess.Popen(
            [sys.executable, "-c", program],
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)])},
        )
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.popen.stderr is not None
        for line in self.popen.stderr:
            self.lines.append(line.rstrip())

    def said(self, pattern: str) -> re.Match[str]:
        """Waits until a line matches."""
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            for line in list(self.lines):
                if match := re.search(pattern, line):
                    return match
            if self.popen.poll() is not None and not self._reader.is_alive():
                break
            time.sleep(0.01)
        raise AssertionError(f"never said {pattern!r}: {self.lines}")

    @property
    def url(self) -> str:
        return self.said(r"listening on (http://\S+)")[1]

    def exit_code(self) -> int:
        code = self.popen.wait(60)
        self._reader.join(10)
        return code


@contextmanager
def serving(**options: Any) -> Iterator[Process]:
    process = Process(**options)
    try:
        yield process
    finally:
        process.popen.kill()
        process.popen.wait()


def test_it_serves_and_sigterm_finishes_what_is_in_flight() -> None:
    with serving() as process:
        process.said("ready: fake")
        with httpx.Client(base_url=process.url, timeout=60) as client:
            assert client.get("/ready").status_code == 200
            body = {"prompts": [[97]], "max_tokens": 5000, "ignore_eos": True, "stream": True}
            with client.stream("POST", "/v1/generate", json=body) as response:
                lines = response.iter_lines()
                assert next(lines).startswith("data: ")
                process.popen.send_signal(signal.SIGTERM)
                process.said("shutting down")
                process.popen.send_signal(signal.SIGTERM)  # said twice is said once
                # The socket stays open while it drains, for an honest 503.
                with httpx.Client(base_url=process.url, timeout=60) as other:
                    answer = other.get("/ready")
                rest = [line for line in lines if line]
            assert answer.status_code == 503
            assert (len(rest), rest[-1]) == (5000, "data: [DONE]")
        assert process.exit_code() == 0
        assert not any("Traceback" in line for line in process.lines)


def test_a_second_interrupt_does_not_wait() -> None:
    with serving() as process:
        process.said("ready: fake")
        with httpx.Client(base_url=process.url, timeout=60) as client:
            body = {"prompts": [[97]], "max_tokens": 10**6, "ignore_eos": True, "stream": True}
            with client.stream("POST", "/v1/generate", json=body) as response:
                lines = response.iter_lines()
                next(lines)
                process.popen.send_signal(signal.SIGINT)
                process.said("shutting down")
                process.popen.send_signal(signal.SIGINT)
                *_, last, done = [line for line in lines if line]
        assert '"finish_reason":"abort"' in last
        assert done == "data: [DONE]"
        assert process.exit_code() == 0
        assert not any("Traceback" in line for line in process.lines)


def test_a_port_in_use_is_one_line_and_code_2() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with serving(port=port) as process:
            assert process.exit_code() == 2
            (line,) = process.lines
            assert f"127.0.0.1:{port}" in line and "in use" in line


def test_the_engines_death_ends_streams_with_an_error_and_the_process_with_code_1() -> None:
    with serving() as process:
        process.said("ready: fake")
        (worker,) = _children(process.popen.pid)
        with httpx.Client(base_url=process.url, timeout=60) as client:
            body = {"prompts": [[97]], "max_tokens": 10**6, "ignore_eos": True, "stream": True}
            with client.stream("POST", "/v1/generate", json=body) as response:
                lines = response.iter_lines()
                next(lines)
                os.kill(worker, signal.SIGKILL)
                last = [line for line in lines if line][-1]
        assert last.startswith('data: {"error":') and "engine_dead" in last
        assert process.exit_code() == 1
        assert not any("Traceback" in line for line in process.lines)


def test_a_model_that_cannot_be_loaded_is_an_error_and_code_2() -> None:
    with serving(engine="tests.service.test_server:no_such_checkpoint") as process:
        assert process.exit_code() == 2
        # The worker's own log has it too.
        assert process.lines.count("minserve: error: no such checkpoint") == 1, process.lines
        assert not any("Traceback" in line for line in process.lines)


def no_such_checkpoint(_: object) -> None:
    """An engine factory, for the worker."""
    from engine.errors import CheckpointError

    raise CheckpointError("no such checkpoint")


def _children(pid: int) -> list[int]:
    path = Path(f"/proc/{pid}/task/{pid}/children")
    if not path.exists():
        pytest.skip("needs /proc")
    return [int(child) for child in path.read_text().split()]


def test_an_idle_server_stops_at_once() -> None:
    with serving() as process:
        process.said("ready: fake")
        process.popen.send_signal(signal.SIGINT)
        assert process.exit_code() == 0
