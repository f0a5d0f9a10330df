"""A real server: `minserve serve` as a process of its own, on a real socket."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import httpx
import pytest

START_SECONDS = 120.0
SMALLEST = "shakespeare-mingru"  # the quickest bundled model to load; a token is a byte


class Server:
    """A running `minserve serve` and what it has written to its terminal."""

    def __init__(self, *options: str, model: str | None = SMALLEST) -> None:
        """`model`: None for the default one."""
        named = [] if model is None else ["--model", model]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "service.cli", "serve", "--port", "0", *named, *options],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.url = self._wait_for_url()
        self._wait_until_ready()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line)

    def _wait_for_url(self) -> str:
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline and self.process.poll() is None:
            if found := re.search(r"http://[\d.]+:\d+", "".join(self.lines)):
                return found[0]
            time.sleep(0.05)
        self.process.kill()
        raise AssertionError("the server did not start: " + "".join(self.lines))

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        with httpx.Client(base_url=self.url) as client:  # a new one for each question takes long
            while time.monotonic() < deadline and self.process.poll() is None:
                try:
                    if client.get("/ready").status_code == 200:
                        return
                except httpx.TransportError:  # it listens in a moment
                    pass
                time.sleep(0.05)
        self.process.kill()
        raise AssertionError("the server did not become ready: " + "".join(self.lines))

    def stop(self) -> int:
        """Ends it as an orchestrator would; returns the exit code."""
        self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(timeout=60)
        finally:
            self.process.kill()
            self._reader.join(timeout=5)


@pytest.fixture(
    scope="module",
    # What differs between the cells, the tests of models and golden texts ask.
    params=[SMALLEST, pytest.param("shakespeare-minlstm", marks=pytest.mark.slow)],
)
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    """Each model of bytes in turn."""
    running = Server("--device", "cpu", "--threads", "1", model=request.param)
    running.model = request.param  # type: ignore[attr-defined]
    yield running
    running.stop()
