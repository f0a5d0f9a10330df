"""Pages of other origins, as starlette's middleware answers their browsers, and one thing more."""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response

ASKS = "access-control-request-private-network"


class NamedOrigins(CORSMiddleware):
    """Allows pages of the internet to ask a server of a private network, as browsers want to know
    beforehand, where their origin is named; never to all, for which * stands."""

    def preflight_response(self, request_headers: Headers) -> Response:
        """As starlette's, whose own option for it is for all origins or none."""
        origin = request_headers["origin"]
        if ASKS not in request_headers or origin == "*" or origin not in self.allow_origins:
            return super().preflight_response(request_headers)
        others = [(name, value) for name, value in request_headers.raw if name != ASKS.encode()]
        response = super().preflight_response(Headers(raw=others))
        if response.status_code == 200:
            response.headers["Access-Control-Allow-Private-Network"] = "true"
            if ASKS not in response.headers.get("Vary", "").lower():  # of older starlettes
                response.headers.add_vary_header(ASKS.title())
        return response
