"""FastRouter: FastAPI's application, with a shorter way to the routes that do work for the model.

FastAPI describes these routes and answers every wrong method or path. But from its door to one of
them a request passes a dozen layers that do nothing for it (telemetry, two body limits, stacks of
contexts, routers within routers), which together cost as much as all that is done here for it. So
a POST to such a path goes through the middleware that was added, and then straight to its route.
"""

from __future__ import annotations

from typing import Any, cast

from fastapi import APIRouter, FastAPI
from fastapi.routing import APIRoute
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware

from engine.errors import EngineError
from service.http.connection import FIRST, connect
from service.http.errors import ApiError, forget, from_engine, respond
from service.http.scope import CONNECTION, INFERENCE, RUNTIME
from service.http.slashes import SlashRoute, plain
from service.http.uvicorn_protocol import send_refusal
from service.routes.base import JsonRoute
from service.settings import TRUSTED_PROXIES

BROUGHT = (CONNECTION, INFERENCE, RUNTIME)


class FastRouter(FastAPI):
    """An application; `lead_to` names the routes with a shorter way."""

    def __init__(self, trusted: str = TRUSTED_PROXIES, **options: Any) -> None:
        """`trusted`: the addresses of proxies that are believed; * is everybody."""
        super().__init__(redirect_slashes=False, **options)
        self.router.routes.append(SlashRoute(self.router))
        self._trusted = trusted
        self._routes: dict[str, JsonRoute] = {}  # by path
        self._short: ASGIApp | None = None
        self._paths: set[str] = set()  # of all routes that have no parameters
        self.refusals: ASGIApp = send_refusal  # as HttpProtocol asks for it
        self._templates: list[APIRoute] = []  # the others

    def include_router(self, router: APIRouter, **options: Any) -> None:
        """As FastAPI's; `template_of` knows its routes."""
        super().include_router(router, **options)
        for route in router.routes:
            if not isinstance(route, APIRoute):
                continue
            if "{" in route.path:
                self._templates.append(route)
            else:
                self._paths.add(route.path)

    def template_of(self, path: str) -> str | None:
        """The template of the route that a path leads to, whatever the method; None where there is
        none. For requests that were answered before they were routed."""
        path = plain(path)
        if path in self._paths:
            return path
        for route in self._templates:
            if route.path_regex.match(path):
                return route.path
        return None

    def lead_to(self, route: JsonRoute) -> None:
        """Its path has no parameters, and nothing but POST is for it."""
        assert route.methods == {"POST"} and "{" not in route.path
        self._routes[route.path] = route

    def build_middleware_stack(self) -> ASGIApp:
        """As it is built for all other paths; the shorter way is built beside it."""
        app: ASGIApp = self._to_route
        for middleware, arguments, options in reversed(self.user_middleware):
            app = middleware(app, *arguments, **options)
        self._short = app
        # Only redirects tell a client its own scheme.
        longer: Any = super().build_middleware_stack()
        return cast("ASGIApp", ProxyHeadersMiddleware(longer, self._trusted))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        send = connect(scope, send)
        try:
            await self._way(scope)(scope, receive, send)
        finally:
            # The server keeps a connection's latest scope, and the connection knows it: a circle,
            # which would leave all that the request has brought to the garbage collector.
            for name in BROUGHT:
                scope.pop(name, None)

    def _way(self, scope: Scope) -> ASGIApp:
        if (
            self._short is None
            or scope["type"] != "http"
            or scope["path"] not in self._routes
            or scope["method"] != "POST"
        ):
            return super().__call__
        scope["app"] = self
        if CONNECTION in scope:
            scope[FIRST] = True
        return self._short

    async def _to_route(self, scope: Scope, receive: Receive, send: Send) -> None:
        route = scope["route"] = self._routes[scope["path"]]
        try:
            return await route.answer(scope, receive, send)
        except EngineError as error:
            response = respond(scope, from_engine(error))
            forget(error)
        except ApiError as error:
            response = respond(scope, error)
            forget(error)
        await response(scope, receive, send)
