"""Answers that outlive one moment: streams of server-sent events, and work that ends when its
client goes away.

The first event decides the status: until then an error becomes an HTTP error. After it, an error
that ends the stream is one `data: {"error": ...}` frame, and no `data: [DONE]` follows.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from engine.client import Update
from engine.errors import EngineError, EngineUnavailable, QueueFull, StepFailed
from service.direct import Connection, Writer, begin
from service.errors import ApiError, from_engine
from service.flight import Flight
from service.scope import CONNECTION, ERROR_CODE, OUTCOME
from service.wire import DONE, event

logger = logging.getLogger(__name__)

# Proxies must pass events on as they come.
HEADERS = (
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
    (b"content-type", b"text/event-stream; charset=utf-8"),
)

T = TypeVar("T")


class ClientGone(Exception):
    """The client closed the connection; nobody reads an answer."""


async def unless_client_leaves(scope: Scope, receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled when the client disconnects: then raises
    ClientGone. The request's body must have been read."""
    connection: Connection | None = scope.get(CONNECTION)
    task = asyncio.current_task(None if connection is None else connection.loop)
    assert task is not None
    left = over = False

    def note() -> None:
        nonlocal left
        if not over:
            left = True
            task.cancel()

    unwatch = _watch(connection, receive, note)
    try:
        return await work
    except asyncio.CancelledError:
        if left and not task.uncancel():  # else somebody else wants it to end as well
            raise ClientGone from None
        raise
    finally:
        over = True
        unwatch()


def _watch(
    connection: Connection | None, receive: Receive, on_lost: Callable[[], None]
) -> Callable[[], object]:
    """Has `on_lost` called when the client leaves. Returns what ends that."""
    if connection is not None:
        return connection.watch(on_lost)

    def note(watcher: asyncio.Task[None]) -> None:
        if not watcher.cancelled():
            on_lost()

    watcher = asyncio.create_task(_disconnect(receive))
    watcher.add_done_callback(note)
    return watcher.cancel


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class Chunks:
    """Chunks of events, of which some may be written without being asked for here."""

    def __init__(
        self, chunks: AsyncGenerator[bytes], write_through: Callable[[Writer], None]
    ) -> None:
        """`write_through` is called once, when the first chunk has been written."""
        self._chunks = chunks
        self.write_through = write_through

    def __aiter__(self) -> AsyncGenerator[bytes]:
        return self._chunks

    async def aclose(self) -> None:
        """Ends them early."""
        await self._chunks.aclose()


class EventStream(Response):
    """Sends chunks of server-sent events as they come; while a write waits for its reader, `chunks`
    is not asked for more."""

    media_type = "text/event-stream"

    def __init__(self, chunks: Chunks) -> None:
        self.status_code = 200
        self.background = None
        self.body = b""
        self.raw_headers = list(HEADERS)
        self._chunks = chunks

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await unless_client_leaves(scope, receive, self._send_all(scope, send))
        except ClientGone:
            scope[OUTCOME] = "cancelled"
            raise

    async def _send_all(self, scope: Scope, send: Send) -> None:
        started = over = False
        connection: Connection | None = scope.get(CONNECTION)
        write = send if connection is None else connection.send
        writer: Writer | None = None
        # A generator that is not run to its end keeps its engine requests until it is closed.
        async with aclosing(self._chunks) as chunks:
            try:
                async for chunk in chunks:
                    over = chunk.endswith(DONE)
                    if not started:
                        await begin(scope, send, 200, self.raw_headers, chunk, more=not over)
                        started = True
                        if connection is not None and (writer := connection.writer()) is not None:
                            chunks.write_through(writer)
                    elif writer is not None and writer.is_open():
                        (writer.end if over else writer.write)(chunk)
                    else:
                        body = {"type": "http.response.body", "body": chunk, "more_body": not over}
                        await write(body)
            except Exception as error:
                if not started:
                    raise
                scope[OUTCOME] = "error"
                if not isinstance(error, EngineError):
                    logger.exception("unexpected error in a stream")
                told = error_body(error)
                scope[ERROR_CODE] = told["error"]["code"]
                await write({"type": "http.response.body", "body": event(told), "more_body": True})
        if not over:
            await write({"type": "http.response.body", "body": b"", "more_body": False})


def error_body(error: Exception) -> dict[str, Any]:
    """The error object of an exception; those that are not ours are not spelled out."""
    if isinstance(error, EngineError):
        error = from_engine(error)
    if not isinstance(error, ApiError):
        error = ApiError(500, "internal error", type="server_error")
    return error.body


def ends_all(error: EngineError) -> bool:
    """The error concerns the engine, or says that it does not take all of what was asked (which it
    may find out for a part of it only, where several API processes fill one queue)."""
    if isinstance(error, QueueFull):
        return True
    return isinstance(error, EngineUnavailable) and not isinstance(error, StepFailed)


async def event_chunks(
    flight: Flight,
    count: int,
    render: Callable[[int, Update], bytes | Coroutine[Any, Any, bytes]],
    render_error: Callable[[int, EngineError], bytes],
    last: Callable[[], bytes],
) -> AsyncGenerator[bytes]:
    """The events of a flight of `count` requests, those that came together in one chunk.

    A request that fails gets an event of its own (`render_error`) where others are served; where
    none is left to serve, its error ends the stream. `last` is rendered before [DONE]. `render`
    gives a coroutine for what is better rendered beside the event loop.
    """
    failed = 0
    served = False  # some request has been
    held = b""  # error events that came before anything else
    async for batch in flight.arrivals():
        chunk, begun = b"", served
        for which, came in batch:
            if not isinstance(came, EngineError):
                rendered = render(which, came)
                chunk += rendered if isinstance(rendered, bytes) else await rendered
                served = True
                continue
            failed += 1
            if failed == count or ends_all(came):
                if served and (begun or not isinstance(came, QueueFull)):
                    yield held + chunk
                raise came
            chunk += render_error(which, came)
        held += chunk
        if served and held and not flight.is_over:
            yield held
            held = b""
    yield held + last() + DONE
