"""Connection: writes to and watches a request's connection more cheaply than ASGI allows.

ASGI's `receive` and `send` are coroutines. With them, noticing that a client disconnects takes one
task per request, and each written chunk takes a wake-up of a task. A Connection does both without a
task, through uvicorn's protocol object (`service.http.uvicorn_protocol` extends it and lists the
parts of uvicorn's internals that are used). Requests have no Connection under another server or
where h11 replaces httptools; then ASGI is used.
"""

from __future__ import annotations

import asyncio
import select
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from starlette.types import Message, Scope, Send

from service.http.scope import CONNECTION, PROTOCOL

if TYPE_CHECKING:
    from service.http.uvicorn_protocol import HttpProtocol

try:
    from uvicorn.protocols.http.httptools_impl import STATUS_LINE
    from uvicorn.protocols.http.httptools_impl import RequestResponseCycle as RequestResponseCycle
except ImportError:  # httptools is not installed on systems other than Linux
    RequestResponseCycle = None  # type: ignore[assignment, misc]

# A key of an http.response.start message: the first part of the body, which is written in one piece
# with the head. "more_body" then says whether more parts follow, as in an http.response.body. Only
# requests with this key in their scope may be answered so: their middleware knows of it.
FIRST = "minserve.first"

LAST_CHUNK = b"0\r\n\r\n"
_as_line = b"%b: %b\r\n".__mod__  # takes a header: (name, value)


def _as_lines(headers: list[tuple[bytes, bytes]]) -> bytes:
    """Return headers as lines. Raises ValueError for a header with a line break in it."""
    lines = b"".join(map(_as_line, headers))
    if not lines.count(b"\r") == lines.count(b"\n") == len(headers):
        raise ValueError(f"a header has a line break: {headers}")
    return lines


class _DefaultLines:
    """The lines of uvicorn's default headers, rendered again only when uvicorn makes a new list.

    It makes one each second, for the date.
    """

    def __init__(self) -> None:
        self._headers: list[tuple[bytes, bytes]] = []
        self._lines = b""

    def of(self, headers: list[tuple[bytes, bytes]]) -> bytes:
        """Return headers as lines. The list must not be changed afterwards."""
        if headers is not self._headers:
            self._headers, self._lines = headers, _as_lines(headers)
        return self._lines


_default_lines = _DefaultLines()


class Writer:
    """Writes the rest of a chunked response straight to the transport, after its head was sent."""

    __slots__ = ("_connection", "_cycle", "_flow", "_write")

    def __init__(self, connection: Connection, cycle: Any) -> None:
        self._connection = connection
        self._cycle = cycle
        self._flow = cycle.flow
        self._write = cycle.transport.write

    def is_open(self) -> bool:
        """Whether a part can be written now; if not, use `send`.

        False if the write would have to wait for the client, the client has disconnected or the
        response has ended. Within one iteration of the event loop only a write changes that.
        """
        cycle = self._cycle
        return not (self._flow.write_paused or cycle.disconnected or cycle.response_complete)

    def write(self, data: bytes) -> None:
        """Write the next part of the body; b"" writes nothing."""
        if data:  # _chunk, inlined: this runs for every delivery to a stream
            self._write(b"%x\r\n%b\r\n" % (len(data), data))

    def end(self, data: bytes) -> None:
        """Write the last part of the body and end the response."""
        self._write(_chunk(data) + LAST_CHUNK)
        self._connection.end()


class Connection:
    """The connection of one HTTP/1.1 request, made by `connect`: writes, and watches the client."""

    __slots__ = ("_cycle", "_protocol", "_send")

    knows_chunks = True  # whether the client understands the chunked transfer coding

    def __init__(self, protocol: HttpProtocol, cycle: Any, send: Send) -> None:
        self._protocol = protocol
        self._cycle = cycle
        self._send = send

    async def send(self, message: Message) -> None:
        """Send an ASGI message, which may have FIRST.

        Middleware looks at the start of a response only, so the rest may bypass it. Waits for a
        client that reads slowly, and does nothing once the client has disconnected. Raises
        ValueError for a header with a line break and for a body whose length is not its
        content-length.
        """
        if FIRST not in message:
            return await self._send(message)
        cycle = self._cycle
        if cycle.flow.write_paused and not cycle.disconnected:
            await cycle.flow.drain()
        if cycle.disconnected:
            return
        # uvicorn logs accesses, sends no body for HEAD and refuses a second answer.
        if cycle.access_log or cycle.response_started or cycle.scope["method"] == "HEAD":
            for part in _parted(message):
                await self._send(part)
        else:
            self._begin(message, message[FIRST], message["more_body"])

    def _begin(self, message: Message, body: bytes, more: bool) -> None:
        """Write the head and the first part of a body in one piece.

        uvicorn writes two pieces, which costs several times as much. It also looks for headers that
        the service never sends: a transfer-encoding, and values of `connection` other than close.
        """
        cycle, headers = self._cycle, message["headers"]
        lines = _default_lines.of(cycle.default_headers) + _as_lines(headers)
        by_name = dict(headers)
        if by_name.get(b"connection") == b"close":
            cycle.keep_alive = False
        elif not cycle.keep_alive:
            lines += b"connection: close\r\n"
        length, left = by_name.get(b"content-length"), 0
        in_chunks = length is None and self.knows_chunks
        if in_chunks:
            lines += b"transfer-encoding: chunked\r\n"
            body = _chunk(body) + (b"" if more else LAST_CHUNK)
        elif length is not None:
            left = int(length) - len(body)
            if left < 0 or (left and not more):
                raise ValueError("the body is not as long as its content-length")
        cycle.response_started, cycle.waiting_for_100_continue = True, False
        cycle.chunked_encoding, cycle.expected_content_length = in_chunks, left
        cycle.transport.write(b"%b%b\r\n%b" % (STATUS_LINE[message["status"]], lines, body))
        if not more:
            self.end()

    def end(self) -> None:
        """End the response after its last part has been written."""
        cycle = self._cycle
        cycle.response_complete = True
        cycle.message_event.set()
        if not cycle.keep_alive:
            cycle.transport.close()
        cycle.on_response()

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The event loop of the connection; asking asyncio costs a system call in Python 3.11."""
        loop: asyncio.AbstractEventLoop = self._protocol.loop
        return loop

    @property
    def has_body(self) -> bool:
        """Whether the whole request body has arrived, so that reading it does not wait."""
        return not self._cycle.more_body

    def watch(self, on_lost: Callable[[], None]) -> Callable[[], None]:
        """Call `on_lost` when the client disconnects, or soon if it has already.

        Returns the function that ends the watch. The request's body must have been read.
        """

        def lost() -> None:
            # uvicorn sets this for the latest request of the connection only.
            self._cycle.disconnected = True
            on_lost()

        if self._protocol.lost:
            asyncio.get_running_loop().call_soon(lost)
        else:
            self._cycle.flow.resume_reading()  # as `receive` does
        self._protocol.on_lost = lost
        return partial(self._unwatch, lost)

    def watch_unread(self, on_lost: Callable[[], None]) -> Callable[[], None]:
        """Watch as `watch` does, while more of the body may arrive.

        `receive` then reports the disconnect, too.
        """

        def lost() -> None:
            self._cycle.disconnected = True  # as in `watch`
            self._cycle.message_event.set()
            on_lost()

        if self._protocol.lost:
            self.loop.call_soon(lost)
        self._protocol.on_lost = lost
        return partial(self._unwatch, lost)

    def await_end(self) -> Callable[[], None]:
        """Abort the connection when the client closes its side, even with unread data before.

        For the time in which nobody reads the rest of the body. Returns the function that ends the
        watch.
        """
        transport = self._cycle.transport
        return _Ends(self.loop, transport.get_extra_info("socket"), transport.abort).close

    def _unwatch(self, on_lost: Callable[[], None]) -> None:
        # The next request of the connection may have started its own watch already.
        if self._protocol.on_lost is on_lost:
            self._protocol.on_lost = None

    def writer(self) -> Writer | None:
        """Return a Writer for a response whose head has been sent, or None if it is not chunked."""
        cycle = self._cycle
        if not cycle.chunked_encoding:
            return None
        return Writer(self, cycle)


class _Ends:
    """Watches for the peer's close of a socket that the event loop does not read.

    It uses epoll's EPOLLRDHUP; on systems without it, nothing is reported.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, handle: Any, on_end: Callable[[], None]
    ) -> None:
        self._loop = loop
        self._on_end = on_end
        self._poll: Any = None
        if not hasattr(select, "EPOLLRDHUP"):  # not Linux
            return
        with suppress(OSError, ValueError):  # the socket is closed, or no more files can be opened
            poll = select.epoll()
            try:
                poll.register(handle.fileno(), select.EPOLLRDHUP)
                loop.add_reader(poll.fileno(), self._ended)
            except BaseException:
                poll.close()
                raise
            self._poll = poll

    def _ended(self) -> None:
        self.close()  # else epoll would report it again and again
        self._on_end()

    def close(self) -> None:
        """End the watch."""
        if self._poll is not None:
            self._loop.remove_reader(self._poll.fileno())
            self._poll.close()
            self._poll = None


class OldConnection(Connection):
    """The connection of an HTTP/1.0 request, whose client does not know the chunked coding.

    A body without a length ends with the connection (RFC 9112, 6.1 and 6.3); uvicorn would send it
    in chunks.
    """

    __slots__ = ("_ends_it",)

    knows_chunks = False

    async def send(self, message: Message) -> None:
        cycle = self._cycle
        begins = message["type"] == "http.response.start"
        if begins:
            has_length = b"content-length" in dict(message["headers"])
            self._ends_it = not has_length and cycle.scope["method"] != "HEAD"
        if not self._ends_it:
            return await super().send(message)
        if cycle.flow.write_paused and not cycle.disconnected:
            await cycle.flow.drain()
        if cycle.disconnected:
            return
        if begins:
            self._begin(message, message.get(FIRST, b""), message.get("more_body", True))
            return
        cycle.transport.write(message.get("body", b""))
        if not message.get("more_body", False):
            self.end()


def _chunk(data: bytes) -> bytes:
    """Return data as one chunk of the chunked coding.

    Returns b"" for no data, because an empty chunk would end the body.
    """
    return b"%x\r\n%b\r\n" % (len(data), data) if data else b""


def _parted(message: Message) -> Iterable[Message]:
    """Return the two standard ASGI messages for a message with FIRST."""
    head = dict(message)
    body, more = head.pop(FIRST), head.pop("more_body")
    return head, {"type": "http.response.body", "body": body, "more_body": more}


async def begin(
    scope: Scope,
    send: Send,
    status: int,
    headers: list[tuple[bytes, bytes]],
    body: bytes,
    *,
    more: bool = False,
) -> None:
    """Send an answer's head and the first part of its body, in one piece if the server can.

    `more`: further parts follow; else this is the whole body.
    """
    message = {"type": "http.response.start", "status": status, "headers": headers}
    message |= {FIRST: body, "more_body": more}
    if FIRST in scope:
        return await send(message)
    for part in _parted(message):
        await send(part)


def connect(scope: Scope, send: Send) -> Send:
    """Put the request's Connection into its scope, if there can be one; return the `send` to use.

    `send`: the server's own.
    """
    protocol = scope.pop(PROTOCOL, None)
    if protocol is not None and RequestResponseCycle is not None:
        cycle: Any = getattr(send, "__self__", None)
        if isinstance(cycle, RequestResponseCycle):
            kind = OldConnection if scope["http_version"] == "1.0" else Connection
            connection = scope[CONNECTION] = kind(protocol, cycle, send)
            return connection.send
    return send
