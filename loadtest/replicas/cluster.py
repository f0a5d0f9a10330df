"""`minserve cluster` as a process of its own, and the processes of its replicas."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Sequence

START_SECONDS = 300.0
STOP_SECONDS = 120.0
REPLICA, ENGINE, CONTROLLER = "ray::ServeReplica:minserve", "engine.worker", "ray::ServeController"


def options(model: str, port: int, store: str) -> list[str]:
    """Return the options of every measured `minserve cluster`."""
    return [
        "--model", model, "--device", "cpu", "--threads", "1", "--port", str(port),
        "--deterministic", "--state-store", store,
    ]  # fmt: skip


class Cluster:
    """Replicas of one model behind a proxy; a context manager."""

    def __init__(self, port: int, store: str, model: str, replicas: int, *more: str) -> None:
        """Start it. Raises RuntimeError if it does not come up."""
        self.url = f"http://127.0.0.1:{port}"
        # A Ray that counts no CPUs for replicas places as many as it is told.
        self._options = ["--cpus", "0", *options(model, port, store), *more]
        self._lines: list[str] = []
        self._process = self._start(replicas)
        threading.Thread(target=self._read, daemon=True).start()
        until = time.monotonic() + START_SECONDS
        while not any("replicas are ready" in line for line in self._lines):
            if self._process.poll() is not None or time.monotonic() > until:
                self._process.kill()
                raise RuntimeError("minserve cluster did not start: " + "".join(self._lines[-20:]))
            time.sleep(0.1)

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        try:
            self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()

    def scale(self, replicas: int) -> None:
        """Deploy with another number of replicas. Raises RuntimeError if that fails."""
        process = self._start(replicas, "--address", "auto")
        told, _ = process.communicate()
        if process.returncode:
            raise RuntimeError(f"the number of replicas could not be changed: {told[-1000:]}")

    def _start(self, replicas: int, *more: str) -> subprocess.Popen[str]:
        command = ["cluster", "--replicas", str(replicas), *self._options, *more]
        return subprocess.Popen(
            [sys.executable, "-m", "service.cli", *command],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip

    def _read(self) -> None:
        assert self._process.stdout is not None
        self._lines.extend(self._process.stdout)


def pids(what: str) -> list[int]:
    """Return the processes of the replicas, of their engines, or of Ray's controller."""
    if what != ENGINE:
        return _pgrep("-f", f"^{what}")
    return [one for replica in _pgrep("-f", f"^{REPLICA}") for one in _children(replica)]


def _children(pid: int) -> Sequence[int]:
    return _pgrep("-f", "-P", str(pid), ENGINE)


def _pgrep(*arguments: str) -> list[int]:
    found = subprocess.run(["pgrep", *arguments], capture_output=True, check=False)
    return [int(one) for one in found.stdout.split()]
