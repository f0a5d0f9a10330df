"""Answers that outlive one moment: streams of server-sent events, and work that ends when its
client goes away.

The first event decides the status: until then an error becomes an HTTP error. After it, an error
that ends the stream is one `data: {"error": ...}` frame, and no `data: [DONE]` follows.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, Protocol

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from engine.client.request_stream import Update
from engine.errors import EngineError, EngineUnavailable, QueueFull, ReaderBehind, StepFailed
from service.http.connection import Connection, Writer, begin
from service.http.disconnect import T, unless_client_leaves
from service.http.errors import ApiError, forget, from_engine
from service.http.json_response import DONE, event
from service.http.scope import CONNECTION, ERROR_CODE, OUTCOME
from service.inference.inference_request import InferenceRequest
from service.observability.outcomes import outcome_of

logger = logging.getLogger(__name__)

# Proxies must pass events on as they come.
HEADERS = (
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
    (b"content-type", b"text/event-stream; charset=utf-8"),
)


class EventRenderer(Protocol):
    """What one request has to say in a stream."""

    def render(self, update: Update) -> bytes | Coroutine[Any, Any, bytes]:
        """The events of what has come; a coroutine for what is better rendered beside the event
        loop."""

    def render_tokens(self, tokens: Sequence[int]) -> bytes | None:
        """Those of tokens that came alone; None, and nothing is taken, where they are not plain."""


def render_each(
    count: int, render: Callable[[int], T], failed: Callable[[int, Exception], T]
) -> list[T]:
    """What `render` gives for each of a request's answers; where it raises, what `failed` makes of
    that, so that the others are given. Raises where there is one answer alone."""
    told: list[T] = []
    for which in range(count):
        try:
            told.append(render(which))
        except Exception as error:
            if count == 1:
                raise
            logger.exception("an answer could not be rendered")
            told.append(failed(which, error))
    return told


class EventSource:
    """The events of several engine requests, those that came together in one chunk.

    A request that fails, or whose answer cannot be rendered, gets an event of its own
    (`render_error`) where others are served; where none is left to serve, its error ends the
    stream. `last` is rendered before [DONE].
    """

    __slots__ = (
        "_broken",
        "_error",
        "_failed",
        "_held",
        "_inference",
        "_last",
        "_render_error",
        "_renderers",
        "_renders",
        "_served",
        "over",
    )  # fmt: skip

    def __init__(
        self,
        inference: InferenceRequest,
        renderers: Sequence[EventRenderer],
        render_error: Callable[[int, Exception], bytes],
        last: Callable[[], bytes],
    ) -> None:
        """`renderers`: one for each of its engine requests."""
        self._inference = inference
        self._renderers = renderers
        self._renders = [renderer.render_tokens for renderer in renderers]  # for the fast path
        self._render_error = render_error
        self._last = last
        self._failed = 0
        self._broken: set[int] = set()  # of which nothing more is told
        self._served = False  # some request has been
        self._held = b""  # what is not given yet: errors that came before anything else
        self._error: Exception | None = None  # that ends the stream, after what came before it
        self.over = False  # the last one has been given

    async def next(self) -> bytes:
        """The next one. Raises the error that ends the stream."""
        if self._error is not None:
            raise self._error
        inference, renderers = self._inference, self._renderers
        while batch := await inference.next_arrivals():
            chunk, begun = b"", self._served
            for which, came in batch:
                if which in self._broken:
                    continue
                error: Exception
                if isinstance(came, EngineError):
                    error = came
                else:
                    try:
                        rendered = renderers[which].render(came)
                        chunk += rendered if isinstance(rendered, bytes) else await rendered
                        self._served = True
                        continue
                    except Exception as raised:
                        logger.exception("an answer could not be rendered")
                        self._broken.add(which)
                        self._renders[which] = _leave  # what still comes is no part of the answer
                        inference.drop(which)
                        error = raised
                self._failed += 1
                if self._failed == len(renderers) or ends_all(error):
                    if self._served and (begun or not isinstance(error, QueueFull)):
                        self._error = error
                        return self._held + chunk
                    raise error
                chunk += self._render_error(which, error)
            self._held += chunk
            if inference.is_over:
                break
            if self._served and self._held:
                held, self._held = self._held, b""
                return held
        end = self._held + self._last() + DONE
        self.over = True
        return end

    async def written(self, writing: Awaitable[None]) -> None:
        """Awaits a write, which may wait for the client to read what was written before."""
        self._inference.awaits_reader = True
        try:
            await writing
        finally:
            self._inference.awaits_reader = False

    def write_through(self, writer: Writer) -> None:
        """From now on plain tokens are written as they come, without being asked for here."""
        self._inference.write_through(self._renders, writer)


def _leave(tokens: Sequence[int]) -> bytes | None:
    """As `EventRenderer.render_tokens`, of one that tells nothing more."""
    return None


class EventStream(Response):
    """Sends chunks of server-sent events as they come; while a write waits for its reader, `chunks`
    is not asked for more."""

    media_type = "text/event-stream"

    def __init__(self, chunks: EventSource) -> None:
        self.status_code = 200
        self.background = None
        self.body = b""
        self.raw_headers = list(HEADERS)
        self._chunks = chunks

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Coroutine[Any, Any, None]:
        return unless_client_leaves(scope, receive, self._send_all(scope, send))

    async def _send_all(self, scope: Scope, send: Send) -> None:
        chunks, started = self._chunks, False
        connection: Connection | None = scope.get(CONNECTION)
        write = send if connection is None else connection.send
        writer: Writer | None = None
        try:
            while not chunks.over:
                chunk = await chunks.next()
                if not started:
                    await begin(scope, send, 200, self.raw_headers, chunk, more=not chunks.over)
                    started = True
                    if connection is not None and (writer := connection.writer()) is not None:
                        chunks.write_through(writer)
                elif writer is not None and writer.is_open():
                    (writer.end if chunks.over else writer.write)(chunk)
                else:
                    await chunks.written(write(_body(chunk, more=not chunks.over)))
        except Exception as error:
            if not started:
                raise
            if not isinstance(error, EngineError):
                logger.exception("unexpected error in a stream")
            told = _api_error(error)
            code = scope[ERROR_CODE] = told.body["error"]["code"]
            scope[OUTCOME] = outcome_of(told.status_code, code)
            await write(_body(event(told.body), more=True))
            await write(_body(b"", more=False))
            forget(error)


def _body(data: bytes, *, more: bool) -> Message:
    return {"type": "http.response.body", "body": data, "more_body": more}


def error_body(error: Exception) -> dict[str, Any]:
    """The error object of an exception; those that are not ours are not spelled out."""
    return _api_error(error).body


def _api_error(error: Exception) -> ApiError:
    if isinstance(error, EngineError):
        return from_engine(error)
    if isinstance(error, ApiError):
        return error
    return ApiError(500, "internal error", type="server_error")


def ends_all(error: Exception) -> bool:
    """The error concerns the engine or the whole stream, or says that the engine does not take all
    of what was asked (which it may find out for a part of it only, where several API processes fill
    one queue)."""
    if isinstance(error, QueueFull | ReaderBehind):
        return True
    return isinstance(error, EngineUnavailable) and not isinstance(error, StepFailed)
