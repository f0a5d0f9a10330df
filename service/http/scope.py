"""What the service leaves in an ASGI scope, for those who handle the same request later."""

from __future__ import annotations

from starlette.types import Scope

REQUEST_ID = "minserve.request_id"
ARRIVED = "minserve.arrived"  # by time.perf_counter
KEY_NAME = "minserve.key_name"  # of the key that the client showed, where one is asked for
LEAST_PRIORITY = "minserve.least_priority"  # the most urgent one that the key may ask for
RUNTIME = "minserve.runtime"  # service.inference.runtime.Runtime that the request began with
FLIGHT = "minserve.flight"  # the InferenceRequest of a request for the model
ERROR_CODE = "minserve.error_code"  # of the error that the client got
PROTOCOL = (
    "minserve.protocol"  # service.http.connection.WatchedProtocol, until the request is taken on
)
CONNECTION = (
    "minserve.connection"  # service.http.connection.Connection, where the server is our own
)
REFUSAL = (
    "minserve.refusal"  # service.http.errors.ApiError, where what came could not be read as HTTP
)
OUTCOME = "minserve.outcome"  # where the status cannot tell it, and of all that has ended
STATUS = "minserve.status"  # of what has ended
TRACE = "minserve.trace"  # service.observability.traces.Trace, where traces are taken
_BY_NAME = "minserve.headers"  # the headers, once somebody has asked for one


def header(scope: Scope, name: bytes) -> str | None:
    """A request's header, the first one of this lower-case name."""
    by_name: dict[bytes, bytes] | None = scope.get(_BY_NAME)
    if by_name is None:
        by_name = scope[_BY_NAME] = dict(reversed(scope["headers"]))
    value = by_name.get(name)
    return None if value is None else value.decode("latin-1")
