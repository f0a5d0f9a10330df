"""FastRouter: a FastAPI application with a fast path to the routes that run the model.

FastAPI describes these routes and answers wrong methods and paths. On its way to one of them a
request passes a dozen layers that do nothing for it (telemetry, two body limits, context stacks,
nested routers). Together they cost as much as the rest of the request's handling. So a POST to such
a path goes through the added middleware and then straight to its route.
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
    """A FastAPI application; routes that are given to `lead_to` have the fast path."""

    def __init__(self, trusted: str = TRUSTED_PROXIES, **options: Any) -> None:
        """`trusted`: addresses of the proxies whose headers are trusted; * trusts everybody.

        `options`: arguments of FastAPI.
        """
        super().__init__(redirect_slashes=False, **options)
        self.router.routes.append(SlashRoute(self.router))
        self._trusted = trusted
        self._routes: dict[str, JsonRoute] = {}  # by path
        self._short: ASGIApp | None = None
        self._paths: set[str] = set()  # paths of the routes without parameters
        self.refusals: ASGIApp = send_refusal  # HttpProtocol sends requests it cannot read here
        self._templates: list[APIRoute] = []  # routes with parameters

    def include_router(self, router: APIRouter, **options: Any) -> None:
        """Include a router, as FastAPI does, and make its routes known to `template_of`."""
        super().include_router(router, **options)
        for route in router.routes:
            if not isinstance(route, APIRoute):
                continue
            if "{" in route.path:
                self._templates.append(route)
            else:
                self._paths.add(route.path)

    def template_of(self, path: str) -> str | None:
        """Return the template of the route that a path leads to with any method, or None.

        For requests that are answered before they are routed.
        """
        path = plain(path)
        if path in self._paths:
            return path
        for route in self._templates:
            if route.path_regex.match(path):
                return route.path
        return None

    def lead_to(self, route: JsonRoute) -> None:
        """Give a route the fast path. It must have a path without parameters, and POST only."""
        assert route.methods == {"POST"} and "{" not in route.path
        self._routes[route.path] = route

    def build_middleware_stack(self) -> ASGIApp:
        """Build the middleware for the fast path, and FastAPI's stack for all other paths."""
        app: ASGIApp = self._to_route
        for middleware, arguments, options in reversed(self.user_middleware):
            app = middleware(app, *arguments, **options)
        self._short = app
        # Proxy headers matter on the slow path only: redirects tell a client its scheme.
        longer: Any = super().build_middleware_stack()
        return cast("ASGIApp", ProxyHeadersMiddleware(longer, self._trusted))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        send = connect(scope, send)
        try:
            await self._way(scope)(scope, receive, send)
        finally:
            # The server keeps the latest scope of a connection, and the scope holds the connection:
            # a reference cycle, which would keep the request's objects until a garbage collection.
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
