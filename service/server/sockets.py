"""Listening sockets and TLS: one socket for each API process, on one port or one Unix socket path.

On a port the sockets use SO_REUSEPORT, and the kernel spreads connections over them evenly. (With a
single shared socket, the process that wakes first would take a whole burst.) The parent process
creates the sockets and keeps them open, so that connections that wait for a process that has died
are served by its successor. A Unix socket is shared by all processes; a free one takes the next
connection.
"""

from __future__ import annotations

import socket
import ssl
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from engine.errors import ConfigError
from service.server.unix_socket import UnixListener
from service.settings import Settings

BACKLOG = 2048
CIPHERS = "ECDHE+AESGCM:ECDHE+CHACHA20"  # for TLS 1.2; all ciphers of TLS 1.3 are good


@contextmanager
def listening(settings: Settings) -> Iterator[list[socket.socket]]:
    """Open a listening socket for each API process; at the end remove the Unix socket's path.

    Raises OSError if the address is in use or does not belong to this machine.
    """
    count = settings.api_workers
    with ExitStack() as stack:
        if settings.uds is None:
            listeners = listen(settings.host, settings.port, count)
        else:
            listener = UnixListener(settings.uds, BACKLOG)
            stack.callback(listener.close)
            listeners = [listener.socket, *(listener.socket.dup() for _ in range(count - 1))]
        for each in listeners:
            stack.enter_context(each)
        yield listeners


def listen(host: str, port: int, count: int = 1) -> list[socket.socket]:
    """Return `count` listening sockets on one port; port 0 stands for a free one.

    Raises OSError if the port is in use or the host is not an address of this machine.
    """
    family, _, _, _, address = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    # Without SO_REUSEPORT first: it fails if another program listens there with SO_REUSEPORT.
    first = socket.create_server(address[:2], family=family, backlog=BACKLOG)
    if count == 1:
        return [first]
    address = first.getsockname()
    first.close()
    return [
        socket.create_server(address[:2], family=family, backlog=BACKLOG, reuse_port=True)
        for _ in range(count)
    ]


def address_of(listener: socket.socket, tls: bool) -> str:
    """Return the URL of a listening socket, or "unix:" and its path."""
    if listener.family == socket.AF_UNIX:
        return f"unix:{listener.getsockname()}"
    host, port = listener.getsockname()[:2]
    return f"{'https' if tls else 'http'}://{f'[{host}]' if ':' in host else host}:{port}"


def check_tls(certificate: Path | None, key: Path | None) -> None:
    """Raise ConfigError for certificate and key files that cannot be used; both None: no TLS."""
    if certificate is None:
        if key is not None:
            raise ConfigError(
                "--tls-key is given without --tls-certificate; allowed: both, or the certificate "
                "alone"
            )
        return
    for path in filter(None, (certificate, key)):
        try:
            path.open("rb").close()
        except OSError as error:
            raise ConfigError(f"{path} cannot be read: {error.strerror or error}") from error
    try:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        # Without this, OpenSSL would ask for a passphrase on the terminal.
        context.load_cert_chain(certificate, key, password=lambda: "")
    except ssl.SSLError as error:
        raise ConfigError(
            f"no certificate with its key can be read from {certificate}"
            + (f" and {key}" if key else "")
            + f" ({error.reason or error}); allowed: PEM files, the key without passphrase"
        ) from error
