"""What the server's own connection can do for a request beyond ASGI.

ASGI's `receive` and `send` are coroutines: to hear of a client that leaves takes a task for each
request, and whoever writes a chunk is a task, which the event loop has to wake for it. uvicorn's
protocol, which is ours in part, knows of both without. Under another server, or where h11 stands
in for httptools, requests have no Connection and ASGI has to do.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

from starlette.types import Scope, Send
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from service.scope import CONNECTION, PROTOCOL

try:
    from uvicorn.protocols.http.httptools_impl import RequestResponseCycle
except ImportError:  # httptools is not there
    RequestResponseCycle = None  # type: ignore[assignment, misc]

# Writes a part of the body, or nothing. False, and nothing is written, where that has to wait for
# the client or has become pointless: `send` then knows what to do. Between two turns of the event
# loop that does not change.
Write = Callable[[bytes], bool]


class GatheringTransport:
    """A transport that can keep what is written to it, so that it leaves in one piece."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self.written = 0  # bytes
        self._transport = transport
        self._kept: list[bytes] | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        self.written += len(data)
        if self._kept is None:
            self._transport.write(data)
        else:
            self._kept.append(data)

    def close(self) -> None:
        self.flush()
        self._transport.close()

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """What is written within leaves at its end."""
        self._kept = []
        try:
            yield
        finally:
            self.flush()

    def flush(self) -> None:
        """Ends that early."""
        kept, self._kept = self._kept, None
        if kept:
            self._transport.write(b"".join(kept))


class WatchedProtocol(AutoHTTPProtocol):  # type: ignore[misc, valid-type]
    """uvicorn's HTTP protocol, which tells a request's scope of itself and somebody of its end."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.on_lost: Callable[[], None] | None = None  # of the request that is being answered
        self.lost = False

    def on_headers_complete(self) -> None:
        """httptools has read a head."""
        self.scope[PROTOCOL] = self
        super().on_headers_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self.lost = True
        if self.on_lost is not None:
            self.on_lost()


class Connection:
    """A request's part in the connection that it came by."""

    __slots__ = ("_cycle", "_protocol", "_transport", "send")

    def __init__(self, protocol: WatchedProtocol, cycle: Any, send: Send) -> None:
        self._protocol = protocol
        self._cycle = cycle
        self._transport: GatheringTransport = cycle.transport
        # The server's own. What wraps it looks at the start of a stream only, so that the rest can
        # go straight to it.
        self.send = send

    @property
    def has_body(self) -> bool:
        """The request's body has come whole, so that reading it will not wait."""
        return not self._cycle.more_body

    def watch(self, on_lost: Callable[[], None]) -> Callable[[], None]:
        """`on_lost` is called if the client leaves (soon, where it has) before what this returns
        is. The body has been read."""

        def lost() -> None:
            # uvicorn tells it to the latest request of the connection alone.
            self._cycle.disconnected = True
            on_lost()

        if self._protocol.lost:
            asyncio.get_running_loop().call_soon(lost)
        else:
            self._cycle.flow.resume_reading()  # as `receive` does
        self._protocol.on_lost = lost
        return partial(self._unwatch, lost)

    def _unwatch(self, on_lost: Callable[[], None]) -> None:
        # The next request of the connection may have begun its own watch.
        if self._protocol.on_lost is on_lost:
            self._protocol.on_lost = None

    def gathered(self) -> AbstractContextManager[None]:
        """What is sent within leaves in one piece, at its end."""
        return self._transport.gathered()

    def flush(self) -> None:
        """What has been sent within `gathered` leaves now, and so does all that follows."""
        self._transport.flush()

    def writer(self) -> Write | None:
        """Writes in the middle of a stream whose head has been sent. None where only `send`
        can."""
        cycle = self._cycle
        if not cycle.chunked_encoding:
            return None
        flow, write = cycle.flow, cycle.transport.write

        def write_chunk(data: bytes) -> bool:
            if flow.write_paused or cycle.disconnected or cycle.response_complete:
                return False
            if data:
                write(b"%x\r\n%b\r\n" % (len(data), data))
            return True

        return write_chunk


def gathered(connection: Connection | None) -> AbstractContextManager[None]:
    """As its own, where there is one."""
    return nullcontext() if connection is None else connection.gathered()


def connect(scope: Scope, send: Send) -> None:
    """Gives the request its Connection, where it has one. `send` is the server's own."""
    protocol = scope.pop(PROTOCOL, None)
    if protocol is not None and RequestResponseCycle is not None:
        cycle: Any = getattr(send, "__self__", None)
        if isinstance(cycle, RequestResponseCycle):
            scope[CONNECTION] = Connection(protocol, cycle, send)
