"""The image's health check: exit code 0 if the server of this container answers /health with 200.

It asks where MINSERVE_UDS, or MINSERVE_PORT and MINSERVE_TLS_CERTIFICATE, say that the server is; a
port or path given as an option of `minserve serve` it cannot know. The certificate is not verified:
it names another host.
"""

from __future__ import annotations

import http.client
import os
import socket
import ssl
import sys

TIMEOUT = 12.0  # seconds; the server itself gives its engine MINSERVE_PING_TIMEOUT (10)


class UnixConnection(http.client.HTTPConnection):
    """A connection to a socket at a path."""

    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=TIMEOUT)
        self._path = path

    def connect(self) -> None:
        """Connects there; the host is only a header."""
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(TIMEOUT)
        self.sock.connect(self._path)


def connection() -> tuple[str, http.client.HTTPConnection]:
    """Where the server is, and a connection to it that is not made yet."""
    path = os.environ.get("MINSERVE_UDS")
    if path:
        return f"unix:{path}", UnixConnection(path)
    host, port = "127.0.0.1", int(os.environ.get("MINSERVE_PORT") or "8000")
    if os.environ.get("MINSERVE_TLS_CERTIFICATE"):
        context = ssl._create_unverified_context()
        secure = http.client.HTTPSConnection(host, port, timeout=TIMEOUT, context=context)
        return f"https://{host}:{port}", secure
    return f"http://{host}:{port}", http.client.HTTPConnection(host, port, timeout=TIMEOUT)


def main() -> int:
    where, asked = connection()
    try:
        asked.request("GET", "/health")
        answer = asked.getresponse()
        told = answer.read().decode()
    except (OSError, http.client.HTTPException) as error:
        print(f"{where}: {error}", file=sys.stderr)
        return 1
    if answer.status != 200:
        print(f"{where}: {answer.status} {told}", file=sys.stderr)
        return 1
    print(told)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
