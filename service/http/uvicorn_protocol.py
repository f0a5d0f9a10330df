"""HttpProtocol: uvicorn's HTTP protocol with the service's own limits, refusals and watches.

Differences from uvicorn's protocol:

- Request heads are limited in bytes and in time, because they arrive before any API key is checked.
- What cannot be read as HTTP is answered like any other mistake: with an error in JSON with a
  request id, counted and logged, after the responses to earlier requests of the connection.
- Upgrades are ignored, as RFC 9110 (7.8) allows: a client that asks for HTTP/2 or WebSocket gets an
  HTTP/1.1 answer.
- Clients that read nothing of what they are sent are disconnected.
- The request's Connection is told when its client disconnects, without a task per request.

Where httptools is not installed (systems other than Linux), uvicorn uses h11, which limits the size
of heads and ignores upgrades by itself; it answers with its own text what is not HTTP.

This table lists all internals of uvicorn that are used, here and in the two modules that it names.
uvicorn is pinned to one minor version; tests/service/http/test_uvicorn_contract.py checks each
symbol.

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
# Limit of the path and all header names and values together. While a head arrives, the bytes of its
# reads are counted instead.
MOST_HEAD_BYTES = 64 * 2**10
LOOKS = 4  # checks of every connection within the shorter of the two timeouts


class MeteredTransport:
    """A transport that measures how much of the written data has left the process."""

    __slots__ = ("_moved", "_taken", "_transport", "_write", "_written", "is_closing")

    def __init__(self, transport: asyncio.Transport, now: float) -> None:
        """`now`: the event loop's time, in seconds."""
        self._transport = transport
        self._write = transport.write
        self.is_closing = transport.is_closing  # an attribute, because it is called often
        self._written = 0  # bytes
        self._taken = 0  # bytes that had left the process at the latest check
        self._moved = now  # when that last changed, or when nothing was waiting

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        """Write data as the transport does, and count it."""
        self._written += len(data)
        self._write(data)

    def cut_if_stalled(self, now: float, timeout: float) -> bool:
        """Abort the connection if the client has taken nothing for `timeout` seconds.

        Closing the transport would wait until its buffer is empty, which may be never. An abort
        ends the request like a disconnect. Returns whether the connection was aborted.
        """
        waiting = self._transport.get_write_buffer_size()
        taken = self._written - waiting
        if not waiting or taken != self._taken:
            self._taken, self._moved = taken, now
        elif now - self._moved >= timeout:
            # With a reset, so that the kernel's buffer, which may be megabytes, is freed as well.
            handle = self._transport.get_extra_info("socket")
            handle.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self._transport.abort()
            return True
        return False


class HttpProtocol(AutoHTTPProtocol):  # type: ignore[misc, valid-type]
    """uvicorn's protocol of one connection, with the differences that the module's docstring lists.

    Its application must have an attribute `refusals`: an ASGI application that answers what cannot
    be read as HTTP (`send_refusal`, with middleware around it).
    """

    cycle: Any  # uvicorn's RequestResponseCycle of the latest request

    def __init__(self, *args: Any, **options: Any) -> None:
        """Take the arguments of uvicorn's protocol."""
        super().__init__(*args, **options)
        self.on_lost: Callable[[], None] | None = None  # watch of the request in progress
        self.lost = False  # the connection has ended
        self.refused = False  # nothing more is read
        self._head_bytes = 0
        self._awaited_since: float | None = None  # since when a head is awaited, by the loop's time

    def connection_made(self, transport: asyncio.Transport) -> None:
        """Handle a new connection; beyond `most_connections`, close some idle ones."""
        now = asyncio.get_running_loop().time()
        if IS_HTTPTOOLS:
            self._awaited_since = now
        super().connection_made(MeteredTransport(transport, now))
        if len(self.connections) > most_connections():
            close_idle(self.connections)

    def connection_lost(self, exc: Exception | None) -> None:
        """Handle the end of the connection: tell the request in progress."""
        super().connection_lost(exc)
        self.lost = True
        if self.on_lost is not None:
            self.on_lost()

    def data_received(self, data: bytes) -> None:
        """Handle received bytes."""
        if self.refused:
            return
        if self._awaited_since is not None:
            # Only earlier reads count here: most of this one may be a body.
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
                if self.parser.get_method() == b"CONNECT":  # an upgrade without an upgrade header
                    self.refuse(_not_http("CONNECT is not supported"))
                    return
                # httptools takes everything after the head, the body included, for the other
                # protocol. So parse the head again without the upgrade header, then the rest.
                (read,) = stop.args
                data = self._plain_head() + data[read:]
            except HttpParserCallbackError:  # uvicorn parses the target at the head's end
                self.refuse(_not_http("the request target is not a path"))
                return
            except HttpParserError as error:
                self.refuse(_not_http(str(error)))
                return

    def on_message_begin(self) -> None:
        """Handle the first byte of a request."""
        self._head_bytes = 0
        self._awaited_since = self.loop.time()
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """Handle a complete head; check its size, as it may have come in a single read."""
        self._awaited_since = None
        size = len(self.url) + sum(map(len, chain.from_iterable(self.headers)))
        if size > MOST_HEAD_BYTES:
            self.refuse(_head_too_large())
        if self.refused or self.parser.should_upgrade():  # an upgrade's head is parsed again
            return
        self.scope[PROTOCOL] = self
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Handle a part of a body."""
        if not self.refused:  # after a refusal there is no request that it could belong to
            super().on_body(body)

    def on_message_complete(self) -> None:
        """Handle the end of a request."""
        if not (self.refused or self.parser.should_upgrade()):
            super().on_message_complete()

    def _should_upgrade(self) -> bool:
        """Never upgrade; uvicorn asks with either parser."""
        return False

    def refuse(self, error: ApiError) -> None:
        """Answer the request that is being read with `error`, close the connection, read no more.

        The responses to earlier requests come first. Further calls do nothing.
        """
        if self.refused:
            return
        self.refused = True
        cycle = self.cycle
        if self.scope is None:  # no request has begun on this connection
            self.on_message_begin()
        if cycle is None or cycle.scope is not self.scope:
            self._answer(error)
        elif cycle.response_complete:  # its body was broken, but the answer has been sent
            self.transport.close()
        else:
            cycle.scope[REFUSAL] = error
            cycle.more_body = cycle.keep_alive = False
            cycle.message_event.set()

    def cut_if_late(self, now: float, timeout: float) -> bool:
        """Close the connection if a request's head does not arrive within `timeout` seconds.

        `now`: the event loop's time. The time counts from the head's first byte or, if nothing has
        arrived yet, from the start of the connection. Returns whether the connection was closed.
        """
        if self.refused or self._awaited_since is None or now - self._awaited_since < timeout:
            return False
        self._awaited_since = None
        self.transport.close()
        return True

    def _answer(self, error: ApiError) -> None:
        """Run the application `refusals` for a head that is refused, as uvicorn runs a request."""
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
        """Return the latest request's head without its upgrade header."""
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
    return ApiError(400, f"the request is not valid HTTP/1.1: {reason}", code="invalid_http")


async def send_refusal(scope: Scope, receive: Receive, send: Send) -> None:
    """An ASGI application that answers a request with the error its head was refused for."""
    await respond(scope, scope[REFUSAL])(scope, receive, send)


@cache
def most_connections() -> int:
    """Return the number of connections beyond which idle ones are closed early.

    Three quarters of the limit of open files, because the process opens other files as well.
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return sys.maxsize if soft == resource.RLIM_INFINITY else soft * 3 // 4


def close_idle(connections: Collection[Any]) -> None:
    """Close the eighth of the idle connections that has been idle longest, at least one."""
    idle = [one for one in connections if one.timeout_keep_alive_task is not None]
    idle.sort(key=lambda one: one.timeout_keep_alive_task.when())
    for protocol in idle[: max(len(idle) // 8, 1)]:
        protocol.transport.close()


async def cut_stalled(
    connections: Iterable[Any], stall: float, receive: float, on_cut: Callable[[str], None]
) -> None:
    """Cut stalled and late connections until cancelled.

    Args:
        connections: The protocols to watch; a live collection.
        stall: Seconds after which a client that reads nothing is cut.
        receive: Seconds for a request's head to arrive. (`service.routes.base` checks bodies.)
        on_cut: Called with the reason of each cut, one of metrics.CUTS.
    """

    def look() -> None:  # a function, so that no protocol is referenced during the sleep below
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
