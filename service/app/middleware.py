"""ASGI middleware around every request: request id, HTTP metrics and the access log."""

from __future__ import annotations

import random
import re
import time
from collections.abc import Callable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service.http.disconnect import ClientGone
from service.http.errors import forget, unexpected
from service.http.scope import (
    ARRIVED,
    ERROR_CODE,
    INFERENCE,
    KEY_NAME,
    OUTCOME,
    REFUSAL,
    REQUEST_ID,
    STATUS,
    header,
)
from service.inference.inference_request import InferenceRequest
from service.observability.access_log import AccessLog, Exchange, timestamp
from service.observability.metrics import ENDPOINTS, Metrics
from service.observability.outcomes import CLIENT_CLOSED, outcome_of

GOOD_ID = re.compile(r"[\w.:-]{1,128}", re.ASCII).fullmatch
METHODS = {"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"}
INFERENCE_PATHS = {f"/v1/{endpoint}" for endpoint in ENDPOINTS}
FAILED = 500
REDIRECTED = 307  # to the path without superfluous slashes; it does not count as inference


class RequestAccounting:
    """ASGI middleware that gives each request an id, counts it, times it and logs it.

    The id is the client's x-request-id header or a new one, and is sent back in the answer. Metrics
    and log name the template of the request's route, never its path. Requests whose client has
    disconnected end here with the status 499.
    """

    def __init__(
        self,
        app: ASGIApp,
        metrics: Metrics,
        log: AccessLog,
        template_of: Callable[[str], str | None],
    ) -> None:
        """`template_of`: returns the template of the route that a path leads to, or None."""
        self.app = app
        self.metrics = metrics
        self.log = log
        self._template_of = template_of

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        status = 0  # until the answer begins
        scope[ARRIVED] = start = time.perf_counter()
        given = header(scope, b"x-request-id")
        # Ids only tell requests apart, so they need no cryptographic randomness.
        request_id = given if given and GOOD_ID(given) else f"{random.getrandbits(128):032x}"
        scope[REQUEST_ID] = request_id

        async def send_and_note(message: Message) -> None:
            nonlocal status
            begins = message["type"] == "http.response.start"
            if begins:
                headers = [pair for pair in message["headers"] if pair[0] != b"x-request-id"]
                headers.append((b"x-request-id", request_id.encode()))
                message = {**message, "headers": headers}
            await send(message)
            if begins:
                status = message["status"]

        try:
            await self.app(scope, receive, send_and_note)
        except ClientGone as error:
            status, scope[OUTCOME] = CLIENT_CLOSED, outcome_of(CLIENT_CLOSED, None)
            forget(error)
        except Exception as error:
            answer = unexpected(scope, error)
            if not status:
                await answer(scope, receive, send_and_note)
            raise
        finally:
            self._add(scope, status or FAILED, time.perf_counter() - start)

    def _add(self, scope: Scope, status: int, seconds: float) -> None:
        method = scope["method"] if scope["method"] in METHODS else "other"
        path = getattr(scope.get("route"), "path", None)
        if path is None:  # answered before it was routed: no key, body too large, no such path
            path = self._template_of(scope["path"]) or "other"
        outcome, error = None, scope.get(ERROR_CODE)
        if path in INFERENCE_PATHS and method == "POST" and status != REDIRECTED:
            outcome = scope.get(OUTCOME) or outcome_of(status, error)
        scope[STATUS], scope[OUTCOME] = status, outcome
        self.metrics.http_request(method, path, status, outcome, seconds, error)
        if not self.log.on:
            return
        inference: InferenceRequest | None = scope.get(INFERENCE)
        self.log.add(
            Exchange(
                time=timestamp(),
                request_id=scope[REQUEST_ID],
                method=method,
                route=path,
                status=status,
                outcome=outcome,
                seconds=round(seconds, 6),
                tokens_in=inference.tokens_in if inference else None,
                tokens_out=inference.tokens_out if inference else None,
                key=scope.get(KEY_NAME),
                peer=scope["client"][0] if REFUSAL in scope and scope["client"] else None,
            )
        )
