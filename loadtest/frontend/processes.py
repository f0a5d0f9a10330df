"""The processes of a measurement: servers on a core of their own, and their CPU time."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from loadtest.with_httpx import httpx

START_SECONDS = 60.0
PR_SET_PDEATHSIG = 1  # of Linux


@contextmanager
def server(
    command: list[str], port: int, core: int | None, path: str = "/ready"
) -> Iterator[subprocess.Popen[bytes]]:
    """Run `python -m COMMAND`, and yield it once it answers at `path`.

    Raises RuntimeError if it never does.
    """

    def prepare() -> None:
        # It ends with this process, however that ends.
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if core is not None:
            os.sched_setaffinity(0, {core})

    process = subprocess.Popen(
        [sys.executable, "-m", *command],
        stdout=subprocess.DEVNULL,
        preexec_fn=prepare,
    )
    try:
        deadline = time.monotonic() + START_SECONDS
        while True:
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{command[0]} did not start")
            try:
                httpx.get(f"http://127.0.0.1:{port}{path}").raise_for_status()
                break
            except httpx.HTTPError:
                time.sleep(0.1)
        yield process
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def kill(process: subprocess.Popen[bytes]) -> None:
    """Kill a server and the processes that it has started, all at once.

    So none of them logs the end of another. They may have ended already.
    """
    process.send_signal(signal.SIGSTOP)
    with suppress(FileNotFoundError, ProcessLookupError):
        for thread in Path(f"/proc/{process.pid}/task").iterdir():
            for child in (thread / "children").read_text(encoding="ascii").split():
                os.kill(int(child), signal.SIGKILL)
    process.kill()


def cpu_seconds(pid: int) -> float:
    """Return the CPU seconds that a process has used."""
    with open(f"/proc/{pid}/stat", encoding="ascii") as file:
        fields = file.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
