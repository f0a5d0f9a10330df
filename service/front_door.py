"""FrontDoor: FastAPI's application, with a shorter way to the routes that do work for the model.

FastAPI describes these routes and answers every wrong method or path. But from its door to one of
them a request passes a dozen layers that do nothing for it (telemetry, two body limits, stacks of
contexts, routers within routers), which together cost as much as all that is done here for it. So
a POST to such a path goes through the middleware that was added, and then straight to its route.
"""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.middleware.errors import ServerErrorMiddleware
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from service.admission import ReadyRoute
from service.scope import SEND


class FrontDoor(FastAPI):
    """An application; `lead_to` names the routes with a shorter way."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._routes: dict[str, ReadyRoute] = {}  # by path
        self._short: ASGIApp | None = None

    def lead_to(self, route: ReadyRoute) -> None:
        """Its path has no parameters, and nothing but POST is for it."""
        assert route.methods == {"POST"} and "{" not in route.path
        self._routes[route.path] = route

    def build_middleware_stack(self) -> ASGIApp:
        """As it is built for all other paths; the shorter way is built beside it."""
        app: ASGIApp = self._to_route
        for middleware, arguments, options in reversed(self.user_middleware):
            app = middleware(app, *arguments, **options)
        self._short = ServerErrorMiddleware(app, handler=self.exception_handlers[Exception])
        return super().build_middleware_stack()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope[SEND] = send
        short = self._short
        if (
            short is not None
            and scope["type"] == "http"
            and scope["path"] in self._routes
            and scope["method"] == "POST"
        ):
            scope["app"] = self
            await short(scope, receive, send)
        else:
            await super().__call__(scope, receive, send)

    async def _to_route(self, scope: Scope, receive: Receive, send: Send) -> None:
        route = scope["route"] = self._routes[scope["path"]]
        try:
            await route.answer(scope, receive, send)
        except Exception as error:
            handler = self._handler_of(error)
            if handler is None:
                raise
            response = await handler(Request(scope, receive), error)
            await response(scope, receive, send)

    def _handler_of(self, error: Exception) -> Any:
        """What answers such an error, but for those that nobody expects."""
        handlers = self.exception_handlers
        if isinstance(error, HTTPException) and error.status_code in handlers:
            return handlers[error.status_code]
        kinds = type(error).__mro__
        kinds = kinds[: kinds.index(Exception)]
        return next((handlers[kind] for kind in kinds if kind in handlers), None)
