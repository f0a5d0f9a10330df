"""CORS middleware: starlette's, extended by Private Network Access preflights."""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response

ASKS = "access-control-request-private-network"


class NamedOrigins(CORSMiddleware):
    """CORS middleware that allows Private Network Access to explicitly named origins.

    Browsers ask for it before a page of the internet may call a server in a private network. It is
    never allowed for the origin *.
    """

    def preflight_response(self, request_headers: Headers) -> Response:
        """Answer a preflight. Starlette's own option would allow all origins or none."""
        origin = request_headers["origin"]
        if ASKS not in request_headers or origin == "*" or origin not in self.allow_origins:
            return super().preflight_response(request_headers)
        others = [(name, value) for name, value in request_headers.raw if name != ASKS.encode()]
        response = super().preflight_response(Headers(raw=others))
        if response.status_code == 200:
            response.headers["Access-Control-Allow-Private-Network"] = "true"
            # Older versions of starlette do not set it.
            if ASKS not in response.headers.get("Vary", "").lower():
                response.headers.add_vary_header(ASKS.title())
        return response
