"""FrontDoor: FastAPI's application, with a shorter way to the routes that do work for the model.

FastAPI describes these routes and answers every wrong method or path. But from its door to one of
them a request passes a dozen layers that do nothing for it (telemetry, two body limits, stacks of
contexts, routers within routers), which together cost as much as all that is done here for it. So
a POST to such a path goes through the middleware that was added, and then straight to its route.
"""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from starlette.middleware.errors import ServerErrorMiddleware
from starlette.middleware.exceptions import ExceptionMiddleware
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
        expected = {**self.exception_handlers}
        unexpected = expected.pop(Exception)
        app: ASGIApp = ExceptionMiddleware(self._to_route, expected)
        for middleware, arguments, options in reversed(self.user_middleware):
            app = middleware(app, *arguments, **options)
        self._short = ServerErrorMiddleware(app, handler=unexpected)
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
        await route.answer(scope, receive, send)
