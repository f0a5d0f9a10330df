"""Listening sockets and their TLS: one socket for each API process, all on one port, or at one
path (a unix socket).

The kernel spreads connections over them evenly (SO_REUSEPORT), where one socket that all accept
from would give a burst to whoever wakes first. The process that starts the others makes the sockets
and keeps them open: connections that wait for a process that has died are there for the next one.
A path has one socket, which all share: who is free takes the next connection.
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
CIPHERS = "ECDHE+AESGCM:ECDHE+CHACHA20"  # of TLS 1.2; those of 1.3 are all good


@contextmanager
def listening(settings: Settings) -> Iterator[list[socket.socket]]:
    """A listening socket for each API process; a path is removed at the end. Raises OSError: what
    is asked for is in use, or not ours."""
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
    """So many listening sockets. Raises OSError: the port is in use, the host is not ours."""
    family, _, _, _, address = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    # Alone, it finds out whether anybody else is there, who might allow sharing too.
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
    """Its URL, or unix: and its path."""
    if listener.family == socket.AF_UNIX:
        return f"unix:{listener.getsockname()}"
    host, port = listener.getsockname()[:2]
    return f"{'https' if tls else 'http'}://{f'[{host}]' if ':' in host else host}:{port}"


def check_tls(certificate: Path | None, key: Path | None) -> None:
    """Raises ConfigError for files that cannot serve TLS; None of both is plain HTTP."""
    if certificate is None:
        if key is not None:
            raise ConfigError("--tls-key is given without --tls-certificate; allowed: both")
        return
    for path in filter(None, (certificate, key)):
        try:
            path.open("rb").close()
        except OSError as error:
            raise ConfigError(f"{path} cannot be read: {error.strerror or error}") from error
    try:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        # A passphrase would be asked for on the terminal.
        context.load_cert_chain(certificate, key, password=lambda: "")
    except ssl.SSLError as error:
        raise ConfigError(
            f"no certificate with its key can be read from {certificate}"
            + (f" and {key}" if key else "")
            + f" ({error.reason or error}); allowed: PEM files, the key without passphrase"
        ) from error
