"""Traces: what is noted of a request for the model while it runs, so that it can be told as a trace
when it has ended. Nothing is noted unless somebody takes traces (`service.observability.otel`).
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

MOST_TOLD = 32  # engine requests of one HTTP request whose parts are told


class Trace:
    """One HTTP request's engine requests. Times are nanoseconds since 1970."""

    __slots__ = ("_sent_at", "finish_reasons", "first", "model", "parts", "requests")

    def __init__(self) -> None:
        self.model: str | None = None
        self.requests = 0  # that the engine was given
        self.first: Request | None = None  # of them
        self.finish_reasons: set[str] = set()
        self.parts: list[tuple[int, Finished]] = []  # when it was sent, and how it ended
        self._sent_at: dict[int, int] = {}  # by request id

    def sent(self, request: Request) -> None:
        """A request is on its way to the engine."""
        self.requests += 1
        if self.first is None:
            self.first = request
        if self.requests <= MOST_TOLD:
            self._sent_at[request.id] = time.time_ns()

    def ended(self, finished: Finished) -> None:
        """The engine has ended a request."""
        self.finish_reasons.add(finished.reason)
        sent_at = self._sent_at.pop(finished.request, None)
        if sent_at is not None:
            self.parts.append((sent_at, finished))


# Told of a request that has ended: its scope, its trace, when it came and when it ended.
Take = Callable[[Scope, Trace, int, int], None]


class TraceRequests:
    """Gives what is posted to `paths` a trace, and it to `take` in the end, however that comes."""

    def __init__(self, app: ASGIApp, paths: Collection[str], take: Take) -> None:
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
            except Exception:  # a request is not to fail for it
                logger.exception("a trace could not be taken")
