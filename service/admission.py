"""Admission: what is decided before a request costs anything.

Refusals (loading, draining, queue full) come before the body is read; then the body must be JSON
to the letter. From its arrival on a request is a flight, which a drain waits for.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pydantic_core
from fastapi import Request, Response
from fastapi.routing import APIRoute
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from service.errors import ApiError
from service.flight import Flight
from service.lifecycle import get_lifecycle
from service.runtime import Runtime, get_runtime
from service.scope import ARRIVED, FLIGHT, KEY_NAME, LEAST_PRIORITY, RUNTIME, TRACE
from service.streaming import ClientGone


class StrictRequest(Request):
    """A request whose JSON must be JSON: valid UTF-8, and no NaN or Infinity."""

    async def read_body(self, seconds: float) -> None:
        """Reads the body, which is kept. Raises ClientGone, and ApiError 408 where it has not come
        in that time."""
        try:
            async with asyncio.timeout(seconds):
                await self.body()
        except ClientDisconnect as error:
            raise ClientGone from error
        except TimeoutError as error:
            raise ApiError(
                408,
                f"the body did not come within {seconds:g} s (receive_timeout)",
                code="body_too_slow",
                headers={"Connection": "close"},
            ) from error

    async def json(self) -> Any:
        body = await self.body()
        try:
            return pydantic_core.from_json(body, allow_inf_nan=False)
        except ValueError as error:
            raise ApiError(
                400, f"the body is not valid JSON: {error}", code="invalid_json"
            ) from error


class ReadyRoute(APIRoute):
    """A route of a ready server, whose requests must be JSON to the letter."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler = super().get_route_handler()

        async def admitted(request: Request) -> Response:
            get_lifecycle(request).check_ready()
            runtime = get_runtime(request)
            self.check_room(request)
            strict = StrictRequest(request.scope, request.receive)
            await strict.read_body(runtime.settings.receive_timeout)
            return await handler(strict)

        return admitted

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        # What is asked now is answered by this model, whatever takes its place meanwhile.
        scope[RUNTIME] = scope["app"].state.lifecycle.current
        await super().handle(scope, receive, send)

    def check_room(self, request: Request) -> None:
        """Raises the error that says why no more can be taken."""


class InferenceRoute(ReadyRoute):
    """A route whose requests are work for the model: flights, until the answer's last byte."""

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        runtime: Runtime | None = scope["app"].state.lifecycle.current
        if runtime is None:  # which is going to be refused
            return await super().handle(scope, receive, send)
        owner, least_priority = scope[KEY_NAME] or "", scope[LEAST_PRIORITY]
        with runtime.flight(scope[ARRIVED], owner, least_priority) as flight:
            scope[FLIGHT] = flight
            flight.trace = scope.get(TRACE)
            if flight.trace is not None:
                flight.trace.model = runtime.model_name
            await super().handle(scope, receive, send)

    def check_room(self, request: Request) -> None:
        get_flight(request).check_room()


def get_flight(request: Request) -> Flight:
    """The request's flight, as a FastAPI dependency."""
    flight: Flight = request.scope[FLIGHT]
    return flight
