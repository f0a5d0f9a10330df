"""Listening sockets: one for each API process, all on one port.

The kernel spreads connections over them evenly (SO_REUSEPORT), where one socket that all accept
from would give a burst to whoever wakes first. The process that starts the others makes the sockets
and keeps them open: connections that wait for a process that has died are there for the next one.
"""

from __future__ import annotations

import socket

BACKLOG = 2048


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
    """Its URL."""
    host, port = listener.getsockname()[:2]
    return f"{'https' if tls else 'http'}://{f'[{host}]' if ':' in host else host}:{port}"
