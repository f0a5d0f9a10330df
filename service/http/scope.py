"""Keys of the ASGI scope that carry the service's own objects; helpers for scope and receive."""

from __future__ import annotations

import asyncio

from starlette.types import Receive, Scope

REQUEST_ID = "minserve.request_id"
ARRIVED = "minserve.arrived"  # by time.perf_counter
KEY_NAME = "minserve.key_name"  # of the key that the client showed, where one is asked for
LEAST_PRIORITY = "minserve.least_priority"  # the most urgent one that the key may ask for
RUNTIME = "minserve.runtime"  # service.inference.runtime.Runtime that the request began with
INFERENCE = "minserve.inference"  # the InferenceRequest of a request for the model
ERROR_CODE = "minserve.error_code"  # of the error that the client got
# service.http.uvicorn_protocol.HttpProtocol, until the request is taken on
PROTOCOL = "minserve.protocol"
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

DISCARDED = 64 * 2**20  # bytes of a body that `discard` reads at most
DISCARD_SECONDS = 10.0  # at most


def header(scope: Scope, name: bytes) -> str | None:
    """A request's header, the first one of this lower-case name."""
    by_name: dict[bytes, bytes] | None = scope.get(_BY_NAME)
    if by_name is None:
        by_name = scope[_BY_NAME] = dict(reversed(scope["headers"]))
    value = by_name.get(name)
    return None if value is None else value.decode("latin-1")


async def discard(receive: Receive) -> None:
    """Reads the rest of a request's body and throws it away, within DISCARDED and DISCARD_SECONDS.

    A client reads no response before it has sent its body, and a connection that is closed with
    unread data is reset, which takes the response away with it. So a response that closes its
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
