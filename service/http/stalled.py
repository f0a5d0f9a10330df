"""Clients that read nothing of what they are sent, or do not end what they send: their connections
are cut.

A transport that is closed waits until its buffer is empty, which such a client puts off for ever;
so it is aborted, which ends the request as a client's leaving does. This holds for whatever is
being written: streams, plain answers, errors. (The heads of requests: `service.http.heads`; their
bodies: `service.routes.base`.)
"""

from __future__ import annotations

import asyncio
import resource
import socket
import struct
import sys
from collections.abc import Callable, Collection, Iterable
from functools import cache
from typing import Any

from service.http.heads import BoundedHeads

LOOKS = 4  # at every connection, within the time that it may stall


class MeteredTransport:
    """A transport, and how much of what was written to it the client's side has taken."""

    __slots__ = ("_moved", "_taken", "_transport", "_write", "_written", "is_closing")

    def __init__(self, transport: asyncio.Transport, now: float) -> None:
        self._transport = transport
        self._write = transport.write
        self.is_closing = transport.is_closing  # asked for each request
        self._written = 0  # bytes
        self._taken = 0  # bytes of what was written, at the latest look
        self._moved = now  # when that last changed, or there was nothing to take

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        self._written += len(data)
        self._write(data)

    def cut_if_stalled(self, now: float, timeout: float) -> bool:
        """Aborts where something waits and nothing has been taken for `timeout` seconds; whether
        that was so."""
        waiting = self._transport.get_write_buffer_size()
        taken = self._written - waiting
        if not waiting or taken != self._taken:
            self._taken, self._moved = taken, now
        elif now - self._moved >= timeout:
            # By a reset: the kernel's buffer, which may be megabytes, goes too.
            handle = self._transport.get_extra_info("socket")
            handle.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self._transport.abort()
            return True
        return False


class MeteredProtocol(BoundedHeads):
    """uvicorn's HTTP protocol over a metered transport."""

    def connection_made(self, transport: asyncio.Transport) -> None:
        now = asyncio.get_running_loop().time()
        super().connection_made(MeteredTransport(transport, now))  # type: ignore[arg-type]
        if len(self.connections) > most_connections():
            close_idle(self.connections)


@cache
def most_connections() -> int:
    """Beyond so many, idle ones are closed early: each is an open file, as is much else."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return sys.maxsize if soft == resource.RLIM_INFINITY else soft * 3 // 4


def close_idle(connections: Collection[Any]) -> None:
    """Closes an eighth of those of these protocols that await another request, the ones that have
    for the longest; at least one, where there is one."""
    idle = [one for one in connections if one.timeout_keep_alive_task is not None]
    idle.sort(key=lambda one: one.timeout_keep_alive_task.when())
    for protocol in idle[: max(len(idle) // 8, 1)]:
        protocol.transport.close()


async def cut_stalled(
    connections: Iterable[Any], stall: float, receive: float, on_cut: Callable[[str], None]
) -> None:
    """Watches over the protocols in `connections`, a live collection, until it is cancelled.
    Seconds: `stall` without a read, `receive` for a request's head. `on_cut` is told why one was
    cut: metrics.CUTS."""

    def look() -> None:  # not in the loop below, which would hold the last one while it sleeps
        now = asyncio.get_running_loop().time()
        for protocol in list(connections):
            if isinstance(protocol, MeteredProtocol):
                if protocol.cut_if_late(now, receive):
                    on_cut("late_head")
                if protocol.transport.cut_if_stalled(now, stall):
                    on_cut("stalled")

    while True:
        await asyncio.sleep(min(stall, receive) / LOOKS)
        look()
