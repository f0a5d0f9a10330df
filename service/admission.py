"""Admission: what is decided before a request costs anything.

Refusals (loading, draining, queue full) come before the body is read; then the body must be JSON
to the letter. The engine's own bound on its queue stays the authority; the check here refuses what
the latest step has shown to be hopeless.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

import pydantic_core
from fastapi import Request, Response
from fastapi.routing import APIRoute

from engine.errors import QueueFull
from service.errors import ApiError
from service.runtime import Runtime, get_runtime

# States turn over in fractions of a second: trying again soon is right.
RETRY_AFTER = 1.0


def check_admission(runtime: Runtime, requests: int = 1) -> None:
    """Raises EngineLoading, Draining, EngineDead, or QueueFull where `requests` more would not
    find room."""
    runtime.check_ready()
    stats = runtime.client.stats
    free = runtime.info.slots - stats.slots_used
    room = runtime.settings.max_waiting - stats.waiting + max(free, 0)
    if room < 1 or (requests > room and stats.waiting > 0):
        raise QueueFull(
            f"the queue is full: {stats.waiting} requests wait "
            f"and at most {runtime.settings.max_waiting} may",
            retry_after=RETRY_AFTER,
        )


class StrictRequest(Request):
    """A request whose JSON must be JSON: valid UTF-8, and no NaN or Infinity."""

    async def json(self) -> Any:
        body = await self.body()
        try:
            return pydantic_core.from_json(body, allow_inf_nan=False)
        except ValueError as error:
            raise ApiError(
                400, f"the body is not valid JSON: {error}", code="invalid_json"
            ) from error


class InferenceRoute(APIRoute):
    """A route whose requests are work for the model."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler = super().get_route_handler()

        async def admitted(request: Request) -> Response:
            check_admission(get_runtime(request))
            return await handler(StrictRequest(request.scope, request.receive))

        return admitted
