"""Admission: what is decided before a request costs anything.

Refusals (loading, draining, queue full) come before the body is read; then the body must be JSON
to the letter. From its arrival on a request is a flight, which a drain waits for.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

import pydantic_core
from fastapi import Request, Response
from fastapi.routing import APIRoute
from starlette.types import Receive, Scope, Send

from service.errors import ApiError
from service.flight import Flight
from service.middleware import ARRIVED
from service.runtime import Runtime, get_runtime


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


FLIGHT = "minserve.flight"


class InferenceRoute(APIRoute):
    """A route whose requests are work for the model: flights, until the answer's last byte."""

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        runtime: Runtime = scope["app"].state.runtime
        with runtime.flight(scope[ARRIVED]) as flight:
            scope[FLIGHT] = flight
            await super().handle(scope, receive, send)

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler = super().get_route_handler()

        async def admitted(request: Request) -> Response:
            runtime = get_runtime(request)
            runtime.check_ready()
            runtime.places.check(1)
            return await handler(StrictRequest(request.scope, request.receive))

        return admitted


def get_flight(request: Request) -> Flight:
    """The request's flight, as a FastAPI dependency."""
    flight: Flight = request.scope[FLIGHT]
    return flight
