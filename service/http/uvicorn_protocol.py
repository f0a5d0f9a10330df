"""HttpProtocol: uvicorn's HTTP protocol with the service's own limits, refusals and watches.

It adds to uvicorn's:

- Request heads are bounded in bytes and in time, because they come before any key can be asked for.
- What cannot be read as HTTP is answered as any other mistake: by an error in JSON with a request
  id, counted and logged, after the responses to what was asked before it.
- Upgrades are ignored, as RFC 9110 (7.8) allows: a client that would rather speak HTTP/2 or
  WebSocket is answered by HTTP/1.1.
- Clients that read nothing of what they are sent are cut, whatever is being written.
- The request's Connection is told when its client leaves, without a task per request.

Where httptools is not installed (other systems than Linux), uvicorn reads with h11, which bounds
the size of heads and ignores upgrades by itself; its own text answers garbage.

What of uvicorn's inside is used, here and in the two modules that are named. uvicorn is pinned to
one minor version; tests/service/http/test_uvicorn_contract.py holds each symbol against it.

| symbol | used for |
| --- | --- |
| `AutoHTTPProtocol` | the base class: httptools' protocol, or h11's |
| `AutoHTTPProtocol.connection_made` | wraps the transport, and counts connections |
| `AutoHTTPProtocol.connection_lost` | tells of a client that has left |
| `AutoHTTPProtocol.data_received` | under h11, and extended by what httptools stops at |
| `AutoHTTPProtocol.on_message_begin` | a head begins; makes the scope of a head that is refused |
| `AutoHTTPProtocol.on_headers_complete` | the head's size is known; makes and starts the cycle |
| `AutoHTTPProtocol.on_body` | left out after a refusal |
| `AutoHTTPProtocol.on_message_complete` | left out after a refusal |
| `AutoHTTPProtocol.on_response_complete` | ends the cycle of a refusal |
| `AutoHTTPProtocol._should_upgrade` | overridden: never |
| `AutoHTTPProtocol._start_asgi_task` | runs a refusal as a request is run |
| `AutoHTTPProtocol._unset_keepalive_if_required` | what has come ends the keep-alive timeout |
| `AutoHTTPProtocol.access_logger` | passed on to the cycle of a refusal |
| `AutoHTTPProtocol.config` | `config.app` has the application for refusals |
| `AutoHTTPProtocol.connections` | the other connections of the server, of which idle ones close |
| `AutoHTTPProtocol.cycle` | the latest request, which a refusal may have to wait for |
| `AutoHTTPProtocol.flow` | passed on to the cycle of a refusal |
| `AutoHTTPProtocol.headers` | the head's size, and the head without its upgrade |
| `AutoHTTPProtocol.logger` | passed on to the cycle of a refusal |
| `AutoHTTPProtocol.loop` | the event loop and its time |
| `AutoHTTPProtocol.parser` | httptools' parser: fed here, since it raises on upgrades |
| `AutoHTTPProtocol.pipeline` | a refusal behind requests that are still being answered |
| `AutoHTTPProtocol.scope` | of the request that is being read |
| `AutoHTTPProtocol.server_state` | `default_headers` for the cycle of a refusal |
| `AutoHTTPProtocol.timeout_keep_alive_task` | set while the connection is idle, and since when |
| `AutoHTTPProtocol.transport` | replaced by a MeteredTransport; closed, aborted |
| `AutoHTTPProtocol.url` | the head's size, and the head without its upgrade |
| `RequestResponseCycle.__init__` | the cycle of a refusal |
| `RequestResponseCycle.send` | recognises a request of ours (http/connection.py) |
| `RequestResponseCycle.access_log` | where set, its `send` writes the head (http/connection.py) |
| `RequestResponseCycle.chunked_encoding` | set with the head (http/connection.py) |
| `RequestResponseCycle.default_headers` | written with the head (http/connection.py) |
| `RequestResponseCycle.disconnected` | the client has left (http/connection.py) |
| `RequestResponseCycle.expected_content_length` | set with the head (http/connection.py) |
| `RequestResponseCycle.flow` | `write_paused`, `drain`, `resume_reading` (http/connection.py) |
| `RequestResponseCycle.keep_alive` | ends the connection of a refusal; `connection: close` |
| `RequestResponseCycle.message_event` | wakes `receive` |
| `RequestResponseCycle.more_body` | the body has come whole; a refusal ends it |
| `RequestResponseCycle.on_response` | called at the end of a response (http/connection.py) |
| `RequestResponseCycle.response_complete` | set at the end of a response (http/connection.py) |
| `RequestResponseCycle.response_started` | set with the head (http/connection.py) |
| `RequestResponseCycle.scope` | the request's (http/connection.py) |
| `RequestResponseCycle.transport` | written to past `send` (http/connection.py) |
| `RequestResponseCycle.waiting_for_100_continue` | cleared by the head (http/connection.py) |
| `STATUS_LINE` | the first line of a response (http/connection.py) |
| `Server.capture_signals` | left out in one of several API processes (server/api_server.py) |
| `Server.handle_exit` | the first signal drains (server/api_server.py) |
| `Server.serve` | watches over connections while it runs (server/api_server.py) |
| `Server.server_state` | `connections`, to watch over (server/api_server.py) |
| `Server.should_exit` | ends the server (server/api_server.py) |
"""

from __future__ import annotations

import asyncio
import resource
import socket
import struct
import sys
from collections.abc import Callable, Collection, Iterable
from functools import cache
from itertools import chain
from typing import Any

from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from service.http.connection import RequestResponseCycle
from service.http.errors import ApiError, respond
from service.http.scope import PROTOCOL, REFUSAL

try:
    from httptools import HttpParserCallbackError, HttpParserError, HttpParserUpgrade
except ImportError:
    HttpParserCallbackError = HttpParserError = None  # type: ignore[assignment, misc]
    HttpParserUpgrade = None  # type: ignore[assignment, misc]

IS_HTTPTOOLS = hasattr(AutoHTTPProtocol, "on_headers_complete")
MOST_HEAD_BYTES = 64 * 2**10  # of the path and all names and values; while it comes, of its reads
LOOKS = 4  # at every connection, within the time that it may stall


class MeteredTransport:
    """A transport, and how much of what was written to it the client's side has taken."""

    __slots__ = ("_moved", "_taken", "_transport", "_write", "_written", "is_closing")

    def __init__(self, transport: asyncio.Transport, now: float) -> None:
        """`now` by the loop's time, in seconds."""
        self._transport = transport
        self._write = transport.write
        self.is_closing = transport.is_closing  # asked for each request
        self._written = 0  # bytes
        self._taken = 0  # bytes of what was written, at the latest look
        self._moved = now  # when that last changed, or there was nothing to take

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        """Writes, as the transport does, and counts."""
        self._written += len(data)
        self._write(data)

    def cut_if_stalled(self, now: float, timeout: float) -> bool:
        """Aborts a connection of which nothing has been taken for `timeout` seconds.

        A transport that is closed waits until its buffer is empty, which such a client puts off for
        ever; an abort ends the request as a client's leaving does. Returns whether it was cut.
        """
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


class HttpProtocol(AutoHTTPProtocol):  # type: ignore[misc, valid-type]
    """uvicorn's protocol of one connection, with what the module's page lists.

    Its application has `refusals` beside itself: an application that answers what cannot be read
    as HTTP (`send_refusal`, wrapped as the others are).
    """

    cycle: Any  # uvicorn's, of the latest request

    def __init__(self, *args: Any, **options: Any) -> None:
        """Arguments as of uvicorn's protocol."""
        super().__init__(*args, **options)
        self.on_lost: Callable[[], None] | None = None  # of the request that is being answered
        self.lost = False  # the connection is
        self.refused = False  # nothing more is read
        self._head_bytes = 0
        self._awaited_since: float | None = None  # a head, by the loop's time

    def connection_made(self, transport: asyncio.Transport) -> None:
        """The connection has begun. Beyond `most_connections` some idle ones are closed."""
        now = asyncio.get_running_loop().time()
        if IS_HTTPTOOLS:
            self._awaited_since = now
        super().connection_made(MeteredTransport(transport, now))
        if len(self.connections) > most_connections():
            close_idle(self.connections)

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection has ended; the request that is being answered is told."""
        super().connection_lost(exc)
        self.lost = True
        if self.on_lost is not None:
            self.on_lost()

    def data_received(self, data: bytes) -> None:
        """Bytes have come."""
        if self.refused:
            return
        if self._awaited_since is not None:
            # What comes now may be a body for the most part.
            if self._head_bytes > MOST_HEAD_BYTES:
                self.refuse(_head_too_large())
                return
            self._head_bytes += len(data)
        if not IS_HTTPTOOLS:
            super().data_received(data)
            return
        self._unset_keepalive_if_required()
        while data:
            try:
                self.parser.feed_data(data)
                return
            except HttpParserUpgrade as stop:
                if self.parser.get_method() == b"CONNECT":  # asks for a tunnel without that header
                    self.refuse(_not_http("CONNECT is not supported"))
                    return
                # httptools takes what follows the head for the other protocol, the body too. So the
                # head is read once more, without the header that asks, and then what follows.
                (read,) = stop.args
                data = self._plain_head() + data[read:]
            except HttpParserCallbackError:  # uvicorn takes the target apart when a head has come
                self.refuse(_not_http("the target is no path"))
                return
            except HttpParserError as error:
                self.refuse(_not_http(str(error)))
                return

    def on_message_begin(self) -> None:
        """The first byte of a request has come."""
        self._head_bytes = 0
        self._awaited_since = self.loop.time()
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """The head has come, perhaps in a single read, which may be larger than what is allowed."""
        self._awaited_since = None
        size = len(self.url) + sum(map(len, chain.from_iterable(self.headers)))
        if size > MOST_HEAD_BYTES:
            self.refuse(_head_too_large())
        if self.refused or self.parser.should_upgrade():  # the latter comes again
            return
        self.scope[PROTOCOL] = self
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """A part of a body has come."""
        if not self.refused:  # there is no request that it could belong to
            super().on_body(body)

    def on_message_complete(self) -> None:
        """A request has come whole."""
        if not (self.refused or self.parser.should_upgrade()):
            super().on_message_complete()

    def _should_upgrade(self) -> bool:
        """Asked by uvicorn, of either parser."""
        return False

    def refuse(self, error: ApiError) -> None:
        """Answers what is being read by `error` and closes the connection; reads nothing more.

        The responses to what was asked before come first. Once refused, further calls do nothing.
        """
        if self.refused:
            return
        self.refused = True
        cycle = self.cycle
        if self.scope is None:  # not even a first line has begun
            self.on_message_begin()
        if cycle is None or cycle.scope is not self.scope:
            self._answer(error)
        elif cycle.response_complete:  # whatever its body was
            self.transport.close()
        else:
            cycle.scope[REFUSAL] = error
            cycle.more_body = cycle.keep_alive = False
            cycle.message_event.set()

    def cut_if_late(self, now: float, timeout: float) -> bool:
        """Closes a connection whose head has not come whole within `timeout` seconds.

        `now` by the loop's time. The time counts from the head's first byte, or from the beginning
        of the connection where nothing has come at all. Returns whether it was closed.
        """
        if self.refused or self._awaited_since is None or now - self._awaited_since < timeout:
            return False
        self._awaited_since = None
        self.transport.close()
        return True

    def _answer(self, error: ApiError) -> None:
        """To a head: as uvicorn does with one that it can read."""
        self.scope.update({REFUSAL: error, "method": "", "path": ""})
        before = self.cycle
        self.cycle = RequestResponseCycle(
            scope=self.scope,
            transport=self.transport,
            flow=self.flow,
            logger=self.logger,
            access_logger=self.access_logger,
            access_log=False,
            default_headers=self.server_state.default_headers,
            message_event=asyncio.Event(),
            expect_100_continue=False,
            keep_alive=False,
            on_response=self.on_response_complete,
        )
        refusals = self.config.app.refusals
        if before is None or before.response_complete:
            self._start_asgi_task(self.cycle, refusals)
        else:
            self.pipeline.appendleft((self.cycle, refusals))

    def _plain_head(self) -> bytes:
        """The latest request's, without its upgrade."""
        version = self.parser.get_http_version().encode()
        lines = [b"%b %b HTTP/%b" % (self.parser.get_method(), self.url, version)]
        lines += [b"%b: %b" % pair for pair in self.headers if pair[0] != b"upgrade"]
        return b"\r\n".join([*lines, b"", b""])


def _head_too_large() -> ApiError:
    return ApiError(
        431,
        f"the request's head is too large; allowed: up to {MOST_HEAD_BYTES} bytes",
        code="head_too_large",
    )


def _not_http(reason: str) -> ApiError:
    return ApiError(400, f"this cannot be read as HTTP/1.1: {reason}", code="invalid_http")


async def send_refusal(scope: Scope, receive: Receive, send: Send) -> None:
    """The application that answers a request by what its head was refused for."""
    await respond(scope, scope[REFUSAL])(scope, receive, send)


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

    Seconds: `stall` without a read by the client, `receive` for a request's head. `on_cut` is told
    why a connection was cut: one of metrics.CUTS. (Bodies that come late: `service.routes.base`.)
    """

    def look() -> None:  # not in the loop below, which would hold the last one while it sleeps
        now = asyncio.get_running_loop().time()
        for protocol in list(connections):
            if isinstance(protocol, HttpProtocol):
                if protocol.cut_if_late(now, receive):
                    on_cut("late_head")
                if protocol.transport.cut_if_stalled(now, stall):
                    on_cut("stalled")

    while True:
        await asyncio.sleep(min(stall, receive) / LOOKS)
        look()
