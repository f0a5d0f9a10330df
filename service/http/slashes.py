"""Paths with slashes too many, as `/v1/models/` and `//v1/models`: who asks for one is sent to the
path that was meant, whichever route that is. Keys, limits, metrics and the log go by it, too.
"""

from __future__ import annotations

import re
from urllib.parse import quote

from starlette.responses import RedirectResponse
from starlette.routing import BaseRoute, Match, NoMatchFound, Router
from starlette.types import Receive, Scope, Send

from service.http.scope import header

MANY = re.compile("/{2,}")
SAFE = "/:@!$&'()*+,;=~"  # in a path as it stands


def plain(path: str) -> str:
    """The path with one slash where there are several, and none at its end."""
    if len(path) > 1 and (path[-1] == "/" or "//" in path):
        return MANY.sub("/", path).rstrip("/") or "/"
    return path


class SlashRoute(BaseRoute):
    """Matches what another route of `router` would match if it had fewer slashes, before routes
    that are added later; answers 307, so that the method stays."""

    def __init__(self, router: Router) -> None:
        self._router = router

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        if scope["type"] != "http" or (path := plain(scope["path"])) == scope["path"]:
            return Match.NONE, {}
        meant = {**scope, "path": path}
        routes = (route for route in self._router.routes if route is not self)
        found = any(route.matches(meant)[0] is not Match.NONE for route in routes)
        return (Match.FULL if found else Match.NONE), {}

    def url_path_for(self, name: str, /, **path_params: object) -> None:  # type: ignore[override]
        raise NoMatchFound(name, path_params)

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        host, query = header(scope, b"host"), scope["query_string"].decode("latin-1")
        target = quote(plain(scope["path"]), safe=SAFE) + (f"?{query}" if query else "")
        if host:  # which HTTP/1.0 may leave out
            target = f"{scope['scheme']}://{host}{target}"
        await RedirectResponse(target)(scope, receive, send)
