"""What the server's own connection can do for a request beyond ASGI.

ASGI's `receive` and `send` are coroutines: to hear of a client that leaves takes a task for each
request, and whoever writes a chunk is a task, which the event loop has to wake for it. uvicorn's
protocol, which is ours in part (`service.http.uvicorn_protocol`, which also lists what is used of
uvicorn's inside), knows of both without. Under another server, or where h11 stands in for
httptools, requests have no Connection and ASGI has to do.
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
except ImportError:  # httptools is not there, as on other systems than Linux
    RequestResponseCycle = None  # type: ignore[assignment, misc]

# In an http.response.start: the first part of the body, which leaves in one piece with the head.
# As in an http.response.body, "more_body" says whether that was all. Such a message is for requests
# in whose scope it stands too: what wraps their answers does not wait for a body of its own.
FIRST = "minserve.first"

LAST_CHUNK = b"0\r\n\r\n"
_as_line = b"%b: %b\r\n".__mod__  # of a header, its name and value


def _as_lines(headers: list[tuple[bytes, bytes]]) -> bytes:
    """Raises ValueError where one is more than a line."""
    lines = b"".join(map(_as_line, headers))
    if not lines.count(b"\r") == lines.count(b"\n") == len(headers):
        raise ValueError(f"a header has a line break: {headers}")
    return lines


class _DefaultLines:
    """Of the headers that uvicorn has for all answers of a second, in one list."""

    def __init__(self) -> None:
        self._headers: list[tuple[bytes, bytes]] = []
        self._lines = b""

    def of(self, headers: list[tuple[bytes, bytes]]) -> bytes:
        """As `_as_lines`; the list does not change."""
        if headers is not self._headers:
            self._headers, self._lines = headers, _as_lines(headers)
        return self._lines


_default_lines = _DefaultLines()


class Writer:
    """Writes the rest of a chunked response whose head has been sent, past `send`."""

    __slots__ = ("_connection", "_cycle", "_flow", "_write")

    def __init__(self, connection: Connection, cycle: Any) -> None:
        self._connection = connection
        self._cycle = cycle
        self._flow = cycle.flow
        self._write = cycle.transport.write

    def is_open(self) -> bool:
        """Whether a part can be written now.

        False where it would have to wait for the client, or is pointless: `send` then knows what to
        do. Within one iteration of the event loop nothing but a write changes that.
        """
        cycle = self._cycle
        return not (self._flow.write_paused or cycle.disconnected or cycle.response_complete)

    def write(self, data: bytes) -> None:
        """Writes the next part of the body; b"" writes nothing."""
        if data:  # as _chunk, which every delivery to a stream would call
            self._write(b"%x\r\n%b\r\n" % (len(data), data))

    def end(self, data: bytes) -> None:
        """Writes the last part of the body and ends the response."""
        self._write(_chunk(data) + LAST_CHUNK)
        self._connection.end()


class Connection:
    """What one request can do with the connection that it came by. Made by `connect`."""

    __slots__ = ("_cycle", "_protocol", "_send")

    knows_chunks = True  # the client does: a body without a length can be sent in them

    def __init__(self, protocol: HttpProtocol, cycle: Any, send: Send) -> None:
        self._protocol = protocol
        self._cycle = cycle
        self._send = send

    async def send(self, message: Message) -> None:
        """ASGI's `send` of the server, which takes a message with FIRST too.

        What wraps it looks at the start of a response only, so that the rest can go straight here.
        Waits for a client that reads slowly; does nothing once the client has left. Raises
        ValueError for a header with a line break and a body that is not as long as announced.
        """
        if FIRST not in message:
            return await self._send(message)
        cycle = self._cycle
        if cycle.flow.write_paused and not cycle.disconnected:
            await cycle.flow.drain()
        if cycle.disconnected:
            return
        # uvicorn has to know of some, and refuses a second answer.
        if cycle.access_log or cycle.response_started or cycle.scope["method"] == "HEAD":
            for part in _parted(message):
                await self._send(part)
        else:
            self._begin(message, message[FIRST], message["more_body"])

    def _begin(self, message: Message, body: bytes, more: bool) -> None:
        """Writes head and first part of an answer that has a body. uvicorn's two pieces cost
        several times as much; what it looks for in headers that nobody here sends (a coding of the
        transfer, other words than close in `connection`) is left out."""
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
        """Ends the response, of which everything has been written."""
        cycle = self._cycle
        cycle.response_complete = True
        cycle.message_event.set()
        if not cycle.keep_alive:
            cycle.transport.close()
        cycle.on_response()

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The event loop of the connection. To ask Python 3.11 for it takes a system call."""
        loop: asyncio.AbstractEventLoop = self._protocol.loop
        return loop

    @property
    def has_body(self) -> bool:
        """Whether the request's body has come whole, so that reading it will not wait."""
        return not self._cycle.more_body

    def watch(self, on_lost: Callable[[], None]) -> Callable[[], None]:
        """Has `on_lost` called when the client leaves; soon, where it has left already.

        Returns the function that ends the watch. The body must have been read.
        """

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

    def watch_unread(self, on_lost: Callable[[], None]) -> Callable[[], None]:
        """Watches as `watch` does, where more of the body may be to come.

        `receive` tells of the client's end then too.
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
        """Cuts the connection when the client has sent its last, even if that has not been read.

        For the time in which the rest of the body is left to the kernel. Returns the function that
        ends the watch.
        """
        transport = self._cycle.transport
        return _Ends(self.loop, transport.get_extra_info("socket"), transport.abort).close

    def _unwatch(self, on_lost: Callable[[], None]) -> None:
        # The next request of the connection may have begun its own watch.
        if self._protocol.on_lost is on_lost:
            self._protocol.on_lost = None

    def writer(self) -> Writer | None:
        """The Writer of a response whose head has been sent; None where only `send` can write."""
        cycle = self._cycle
        if not cycle.chunked_encoding:
            return None
        return Writer(self, cycle)


class _Ends:
    """Asks the kernel for the end of what a socket's other side sends, which an event loop does not
    see while it reads nothing. Where the kernel cannot be asked, nothing is told."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, handle: Any, on_end: Callable[[], None]
    ) -> None:
        self._loop = loop
        self._on_end = on_end
        self._poll: Any = None
        if not hasattr(select, "EPOLLRDHUP"):  # another system than Linux
            return
        with suppress(OSError, ValueError):  # the socket is closed, or there are no more files
            poll = select.epoll()
            try:
                poll.register(handle.fileno(), select.EPOLLRDHUP)
                loop.add_reader(poll.fileno(), self._ended)
            except BaseException:
                poll.close()
                raise
            self._poll = poll

    def _ended(self) -> None:
        self.close()  # else it would be told again and again
        self._on_end()

    def close(self) -> None:
        """Asks no longer."""
        if self._poll is not None:
            self._loop.remove_reader(self._poll.fileno())
            self._poll.close()
            self._poll = None


class OldConnection(Connection):
    """An HTTP/1.0 request's. Its client knows no chunks, in which uvicorn would send to it: a body
    without a length ends with the connection (RFC 9112, 6.1 and 6.3)."""

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
    """As a body without a length has it, where an empty chunk is the last one."""
    return b"%x\r\n%b\r\n" % (len(data), data) if data else b""


def _parted(message: Message) -> Iterable[Message]:
    """The two messages of ASGI that one with FIRST stands for."""
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
    """Sends an answer's head with the first part of its body, in one piece where the server can;
    without `more` that is all of it."""
    message = {"type": "http.response.start", "status": status, "headers": headers}
    message |= {FIRST: body, "more_body": more}
    if FIRST in scope:
        return await send(message)
    for part in _parted(message):
        await send(part)


def connect(scope: Scope, send: Send) -> Send:
    """Gives the request its Connection, where it has one; returns what is to be sent by. `send` is
    the server's own."""
    protocol = scope.pop(PROTOCOL, None)
    if protocol is not None and RequestResponseCycle is not None:
        cycle: Any = getattr(send, "__self__", None)
        if isinstance(cycle, RequestResponseCycle):
            kind = OldConnection if scope["http_version"] == "1.0" else Connection
            connection = scope[CONNECTION] = kind(protocol, cycle, send)
            return connection.send
    return send
