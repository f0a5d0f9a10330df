"""A Redis (or Valkey) of its own for tests, which can be killed, paused and started again."""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
import time
from contextlib import suppress
from pathlib import Path

PROGRAM = shutil.which("redis-server") or shutil.which("valkey-server")
MISSING = "" if PROGRAM else "redis-server is not installed (apt-get install redis-server)"

MOST_PORT = 55_535  # in a cluster a Redis also listens on the port 10,000 above


def free_port() -> int:
    """A port that nothing listens on."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


class RedisServer:
    """A server in a folder; it keeps what it was told, as the guide asks for."""

    def __init__(self, folder: Path, *options: str, port: int = 0) -> None:
        self.port = port or free_port()
        while not port and self.port > MOST_PORT:
            self.port = free_port()
        self.folder = folder
        self.options = options
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def start(self) -> RedisServer:
        """Start it and wait until it answers."""
        assert PROGRAM is not None
        self.folder.mkdir(parents=True, exist_ok=True)
        given = [
            PROGRAM, "--port", str(self.port), "--bind", "127.0.0.1", "--save", "",
            "--appendonly", "yes", "--appendfsync", "always", "--dir", str(self.folder),
            "--maxmemory-policy", "noeviction", *self.options,
        ]  # fmt: skip
        self._process = subprocess.Popen(given, stdout=subprocess.DEVNULL)
        for _ in range(500):
            with suppress(OSError):
                answer = self.command(b"PING")
                if answer.startswith((b"+PONG", b"-NOAUTH")):
                    return self
            assert self._process.poll() is None, "it has ended"
            time.sleep(0.01)
        raise AssertionError("it does not answer")

    def command(self, line: bytes) -> bytes:
        """Send one command and return the beginning of the answer."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=2) as one:
            one.sendall(line + b"\r\n")
            return one.recv(65536)

    def kill(self) -> None:
        """End it as a crash does; `start` brings back what it had written."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def pause(self) -> None:
        """Let it hang, connections and all."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """Undo `pause`."""
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def stop(self) -> None:
        """End it, whatever its state."""
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait()
