"""Streams of server-sent events.

An error before the first event becomes an HTTP error. After it, an error that ends the stream is
one `data: {"error": ...}` frame, and no `data: [DONE]` follows.
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

# Proxies must neither cache nor buffer events.
HEADERS = (
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
    (b"content-type", b"text/event-stream; charset=utf-8"),
)


class EventRenderer(Protocol):
    """Renders the events of one engine request."""

    def render(self, update: Update) -> bytes | Coroutine[Any, Any, bytes]:
        """Render the events of an update; return a coroutine if it is rendered on a thread."""

    def render_tokens(self, tokens: Sequence[int]) -> bytes | None:
        """Render the events of plain tokens; return None and do nothing if they are not plain."""


def render_each(
    count: int, render: Callable[[int], T], failed: Callable[[int, Exception], T]
) -> list[T]:
    """Render `count` answers of a request, with an error in the place of those that fail.

    Args:
        count: Answers of the request.
        render: Renders an answer, by its position.
        failed: Renders an answer for which `render` raised.

    Raises what `render` raises if there is only one answer.
    """
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
    """The events of an HTTP request's engine requests; those that arrived together in one chunk.

    If an engine request fails, or its answer cannot be rendered, it gets an event of its own
    (`render_error`), and the others go on. If no other is left, its error ends the stream.
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
        """Prepare the events.

        Args:
            inference: The HTTP request.
            renderers: One for each engine request.
            render_error: Renders the event of an engine request that failed, by its position.
            last: Renders the events before [DONE].
        """
        self._inference = inference
        self._renderers = renderers
        self._renders = [renderer.render_tokens for renderer in renderers]  # for the fast path
        self._render_error = render_error
        self._last = last
        self._failed = 0
        self._broken: set[int] = set()  # engine requests that could not be rendered
        self._served = False  # whether some engine request has had an event
        self._held = b""  # error events that came before any other; not returned yet
        self._error: Exception | None = None  # ends the stream at the next call of `next`
        self.over = False  # whether the last chunk has been returned

    async def next(self) -> bytes:
        """Return the next chunk of events. Raises the error that ends the stream."""
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
                        self._renders[which] = _leave  # its further tokens are dropped
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
        """Await a write that may have to wait for the client to read."""
        self._inference.awaits_reader = True
        try:
            await writing
        finally:
            self._inference.awaits_reader = False

    def write_through(self, writer: Writer) -> None:
        """Write plain tokens as they arrive from now on, without calls of `next`."""
        self._inference.write_through(self._renders, writer)


def _leave(tokens: Sequence[int]) -> bytes | None:
    """Render nothing: replaces `EventRenderer.render_tokens` of a broken engine request."""
    return None


class EventStream(Response):
    """A response that sends an EventSource's chunks as they come.

    While a write waits for the client to read, no further chunk is asked for.
    """

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
    """Return the error object for an exception; unexpected ones are an "internal error"."""
    return _api_error(error).body


def _api_error(error: Exception) -> ApiError:
    if isinstance(error, EngineError):
        return from_engine(error)
    if isinstance(error, ApiError):
        return error
    return ApiError(500, "internal error", type="server_error")


def ends_all(error: Exception) -> bool:
    """Whether an error ends the whole answer and not only one of its engine requests.

    It does if it concerns the engine or the whole stream, or if the engine's queue is full: with
    several API processes the engine may refuse some of a request's prompts only.
    """
    if isinstance(error, QueueFull | ReaderBehind):
        return True
    return isinstance(error, EngineUnavailable) and not isinstance(error, StepFailed)
