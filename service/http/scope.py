"""Keys of the service's own objects in the ASGI scope, and helpers for scope and receive."""

from __future__ import annotations

import asyncio

from starlette.types import Receive, Scope

REQUEST_ID = "minserve.request_id"
ARRIVED = "minserve.arrived"  # arrival time by time.perf_counter, in seconds
KEY_NAME = "minserve.key_name"  # name of the client's API key; None if none is required
LEAST_PRIORITY = "minserve.least_priority"  # the most urgent priority that the key allows
RUNTIME = "minserve.runtime"  # the service.inference.runtime.Runtime of the request
INFERENCE = "minserve.inference"  # the InferenceRequest of a request that uses the engine
ERROR_CODE = "minserve.error_code"  # code of the error that the client got
# The service.http.uvicorn_protocol.HttpProtocol, until FastRouter takes it out
PROTOCOL = "minserve.protocol"
CONNECTION = (
    "minserve.connection"  # service.http.connection.Connection, where the server is our own
)
REFUSAL = (
    "minserve.refusal"  # service.http.errors.ApiError, where what came could not be read as HTTP
)
# One of service.observability.outcomes.OUTCOMES: set early if the status does not tell it, and for
# every request at its end
OUTCOME = "minserve.outcome"
STATUS = "minserve.status"  # the answer's status, at the request's end
TRACE = "minserve.trace"  # the service.observability.traces.Trace, with tracing on
_BY_NAME = "minserve.headers"  # the headers by name, once one has been looked up

DISCARDED = 64 * 2**20  # most bytes of a body that `discard` reads
DISCARD_SECONDS = 10.0  # most seconds that `discard` takes


def header(scope: Scope, name: bytes) -> str | None:
    """Return the value of a request's first header of this lower-case name, or None."""
    by_name: dict[bytes, bytes] | None = scope.get(_BY_NAME)
    if by_name is None:
        by_name = scope[_BY_NAME] = dict(reversed(scope["headers"]))
    value = by_name.get(name)
    return None if value is None else value.decode("latin-1")


async def discard(receive: Receive) -> None:
    """Read the rest of a request's body and drop it, up to DISCARDED bytes or DISCARD_SECONDS.

    Many clients read no response before they have sent their body. A connection that is closed with
    unread data is reset, and the client then loses the response. So a response that closes its
    connection ends only after this; a client that sends more loses the connection.
    """
    left = DISCARDED
    try:
        async with asyncio.timeout(DISCARD_SECONDS):
            while left > 0:
                read = await receive()
                left -= len(read.get("body", b""))
                if not read.get("more_body", False):
                    break
    except TimeoutError:
        pass
