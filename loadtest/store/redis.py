"""A Redis (or Valkey) of its own, which can be killed, paused and started again."""

from __future__ import annotations

import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

from loadtest.served import free_port

PROGRAMS = ("redis-server", "valkey-server")
START_SECONDS = 60.0


class RedisProcess:
    """A server that keeps what it has acknowledged: appendonly yes, noeviction."""

    def __init__(self, folder: Path, appendfsync: str = "always") -> None:
        """Create it without starting.

        Args:
            folder: where it keeps its data.
            appendfsync: Redis's option: always, everysec or no.

        Raises RuntimeError if no such server is installed.
        """
        found = next(filter(None, map(shutil.which, PROGRAMS)), None)
        if found is None:
            raise RuntimeError(
                f"neither of {', '.join(PROGRAMS)} is installed (apt-get install redis-server)"
            )
        self.port = free_port()
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self._process: subprocess.Popen[bytes] | None = None
        self._command = [
            found, "--port", str(self.port), "--bind", "127.0.0.1", "--save", "",
            "--dir", str(folder), "--appendonly", "yes", "--appendfsync", appendfsync,
            "--maxmemory-policy", "noeviction",
        ]  # fmt: skip

    def __enter__(self) -> RedisProcess:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.kill()

    def start(self) -> RedisProcess:
        """Start it, and return when it answers. Raises RuntimeError if it never does."""
        from redis import Redis, RedisError

        self._process = subprocess.Popen(self._command, stdout=subprocess.DEVNULL)
        until = time.monotonic() + START_SECONDS
        with Redis.from_url(self.url, socket_timeout=1) as client:
            while time.monotonic() < until and self._process.poll() is None:
                try:
                    client.ping()
                    return self
                except (RedisError, OSError):
                    time.sleep(0.02)
        raise RuntimeError("the Redis does not answer")

    def kill(self) -> None:
        """End it as a crash does, kill -9."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def pause(self) -> None:
        """Let it hang, its connections included."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """Undo `pause`."""
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)


def memory_of(url: str) -> dict[str, int]:
    """Return the bytes that the Redis at this URL uses: memory, data alone, and its log's."""
    from redis import Redis

    with Redis.from_url(url) as client:
        told: dict[str, Any] = client.info("memory")
        log: dict[str, Any] = client.info("persistence")
    return {
        "used_memory": int(told["used_memory"]),
        "used_memory_dataset": int(told["used_memory_dataset"]),
        "log": int(log.get("aof_current_size", 0)),
    }
