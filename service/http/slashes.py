"""Redirects paths with superfluous slashes, such as `/v1/models/` and `//v1/models`.

The client is redirected to the path without them. API keys, limits, metrics and the access log use
that path, too (`plain`).
"""

from __future__ import annotations

import re
from urllib.parse import quote

from starlette.responses import RedirectResponse
from starlette.routing import BaseRoute, Match, NoMatchFound, Router
from starlette.types import Receive, Scope, Send

from service.http.scope import header

MANY = re.compile("/{2,}")
SAFE = "/:@!$&'()*+,;=~"  # characters that are not quoted in a path


def plain(path: str) -> str:
    """Return the path with runs of slashes replaced by one slash, and none at its end."""
    if len(path) > 1 and (path[-1] == "/" or "//" in path):
        return MANY.sub("/", path).rstrip("/") or "/"
    return path


class SlashRoute(BaseRoute):
    """A route that redirects (307, which keeps the method) to a path without superfluous slashes.

    It matches if another route of `router` matches the path without them.
    """

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
        if host:  # HTTP/1.0 requests may have none
            target = f"{scope['scheme']}://{host}{target}"
        await RedirectResponse(target)(scope, receive, send)
