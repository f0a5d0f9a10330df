"""One server under test: its processes, and what can be seen of them from outside."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from loadtest.served import free_port
from loadtest.with_httpx import httpx

SMALLEST = "shakespeare-mingru"  # the quickest bundled model to load; a token is a byte
START_SECONDS = 120.0
RETURN_SECONDS = 30.0  # for slots to come back, or for a server to
LOOK = 0.05


class Subject:
    """`minserve serve` with these settings, or with an engine of another `factory`.

    The model is SMALLEST unless the settings name another.
    """

    def __init__(
        self, factory: str = "engine.engine:Engine.load", stdout: IO[bytes] | int | None = None,
        before: Any = None, **settings: Any,
    ) -> None:  # fmt: skip
        """Create it without starting; `before` runs in the new process, before the server."""
        port = settings.get("port") or free_port()
        self.url = f"http://127.0.0.1:{port}"
        usual = {"model": SMALLEST, "device": "cpu", "threads": 1, "log_level": "error"}
        fields = {"port": port, **usual, **settings}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "loadtest.served", factory, json.dumps(fields)],
            stdout=subprocess.DEVNULL if stdout is None else stdout,
            stderr=subprocess.DEVNULL,
            preexec_fn=before,
        )

    def __enter__(self) -> Subject:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.terminate()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    async def started(self) -> None:
        """Return when it is ready. Raises RuntimeError if it never is."""
        if await self._ready(START_SECONDS) is None:
            raise RuntimeError("the server did not become ready")

    async def _ready(self, patience: float) -> float | None:
        """Return the seconds until it is ready; None if it has ended or is not in time."""
        begun = time.monotonic()
        async with httpx.AsyncClient(timeout=5) as client:
            while time.monotonic() - begun < patience and self.process.poll() is None:
                try:
                    if (await client.get(f"{self.url}/ready")).status_code == 200:
                        return time.monotonic() - begun
                except httpx.HTTPError:
                    pass
                await asyncio.sleep(LOOK)
        return None

    async def state(self) -> str:
        """Return its state: its exit code, or after how many seconds it was ready again."""
        seconds = await self._ready(RETURN_SECONDS)
        if seconds is not None:
            return f"ready after {seconds:.1f} s" if seconds > 2 * LOOK else "ready"
        code = self.process.poll()
        return "not ready" if code is None else f"exit code {code}"

    async def held(self) -> dict[str, float]:
        """Return requests and slots in use, by its metrics. Raises httpx.HTTPError."""
        async with httpx.AsyncClient(timeout=10) as client:
            text = (await client.get(f"{self.url}/metrics")).text
        found = {}
        for name in ("requests_running", "requests_waiting", "state_slots_used"):
            match = re.search(rf"^minserve_{name}(?:{{.*}})? (\S+)$", text, re.MULTILINE)
            found[name] = float(match[1]) if match else float("nan")
        return found

    async def idle(self, slots: float) -> float | None:
        """Return the seconds until nothing is in flight; None if it is not in time.

        At most `slots` slots may still be in use.
        """
        begun = time.monotonic()
        while time.monotonic() - begun < RETURN_SECONDS:
            try:
                held = await self.held()
            except httpx.HTTPError:
                return None
            requests = held["requests_running"] + held["requests_waiting"]
            if not requests and held["state_slots_used"] <= slots:
                return time.monotonic() - begun
            await asyncio.sleep(LOOK)
        return None

    def engine(self) -> int:
        """Return the engine's process id; of several engines, the first one's.

        Raises RuntimeError if there is none.
        """
        for pid in descendants(self.process.pid):
            if b"engine.worker" in _read(pid, "cmdline"):
                return pid
        raise RuntimeError("there is no engine process")

    def signal_engine(self, number: signal.Signals) -> None:
        os.kill(self.engine(), number)

    def kill(self) -> None:
        """End the server and all that it has started at once, as the loss of its machine does."""
        for pid in self.processes():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()

    def processes(self) -> list[int]:
        """The process ids of the server and of all that it has started."""
        return [self.process.pid, *descendants(self.process.pid)]

    def memory(self, pids: list[int] | None = None) -> float:
        """Return the memory of these processes, by default all, in MiB."""
        pages = 0
        for pid in self.processes() if pids is None else pids:
            fields = _read(pid, "statm").split()
            pages += int(fields[1]) if fields else 0
        return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def _read(pid: int, name: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:  # it has ended
        return b""


def descendants(pid: int) -> list[int]:
    """Return all processes that a process has started, directly or not."""
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            fields = _read(int(entry.name), "stat").rpartition(b")")[2].split()
            if fields:
                parents[int(entry.name)] = int(fields[1])
    found = [pid]
    for ancestor in found:
        found += [child for child, parent in parents.items() if parent == ancestor]
    return found[1:]
