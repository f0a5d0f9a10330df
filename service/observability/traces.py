"""Trace and TraceRequests: record an inference request while it runs, to export it at its end.

Used only with tracing on (`service.observability.otel`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection

from starlette.types import ASGIApp, Receive, Scope, Send

from engine.protocol.events import Finished
from engine.protocol.requests import Request
from service.http.scope import TRACE

logger = logging.getLogger(__name__)

MOST_TOLD = 32  # engine requests of one HTTP request that are recorded in detail


class Trace:
    """The record of one HTTP request's engine requests. Times are nanoseconds since 1970."""

    __slots__ = ("_sent_at", "finish_reasons", "first", "model", "parts", "requests")

    def __init__(self) -> None:
        self.model: str | None = None
        self.requests = 0  # engine requests
        self.first: Request | None = None  # the first engine request
        self.finish_reasons: set[str] = set()
        self.parts: list[tuple[int, Finished]] = []  # when each was sent, and how it ended
        self._sent_at: dict[int, int] = {}  # by engine request id

    def sent(self, request: Request) -> None:
        """Record an engine request that was submitted now."""
        self.requests += 1
        if self.first is None:
            self.first = request
        if self.requests <= MOST_TOLD:
            self._sent_at[request.id] = time.time_ns()

    def ended(self, finished: Finished) -> None:
        """Record the end of an engine request."""
        self.finish_reasons.add(finished.reason)
        sent_at = self._sent_at.pop(finished.request, None)
        if sent_at is not None:
            self.parts.append((sent_at, finished))


# Takes a request that has ended: its scope, its trace, its arrival and its end.
Take = Callable[[Scope, Trace, int, int], None]


class TraceRequests:
    """ASGI middleware that records POST requests and passes their traces on at their end."""

    def __init__(self, app: ASGIApp, paths: Collection[str], take: Take) -> None:
        """`paths`: paths to record. `take`: takes each finished request."""
        self.app = app
        self.paths = paths
        self.take = take

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        posted = scope["type"] == "http" and scope["method"] == "POST"
        if not posted or scope["path"] not in self.paths:
            return await self.app(scope, receive, send)
        trace = scope[TRACE] = Trace()
        came = time.time_ns()
        try:
            await self.app(scope, receive, send)
        finally:
            try:
                self.take(scope, trace, came, time.time_ns())
            except Exception:  # a failed export must not fail the request
                logger.exception("a trace could not be exported")
