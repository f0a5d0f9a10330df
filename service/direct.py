"""Writing in the middle of a stream without waiting, where the server allows it.

ASGI's `send` is a coroutine, and whoever calls it a task, which the event loop has to wake for
every write. uvicorn's has nothing to wait for while the client reads, so that its chunk can be
written by whoever has the bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from starlette.types import Send

try:
    from uvicorn.protocols.http.httptools_impl import RequestResponseCycle
except ImportError:  # httptools is not there, and h11 stands in for it
    RequestResponseCycle = None  # type: ignore[assignment, misc]

# Writes a part of the body, or nothing. False, and nothing is written, where that has to wait for
# the client or has become pointless: `send` then knows what to do. Between two turns of the event
# loop that does not change.
Write = Callable[[bytes], bool]


def direct_write(send: Send) -> Write | None:
    """For a response whose head has been sent by `send`, the server's own. None where only `send`
    can write."""
    cycle: Any = getattr(send, "__self__", None)
    if RequestResponseCycle is None or not isinstance(cycle, RequestResponseCycle):
        return None
    if not cycle.chunked_encoding:
        return None
    flow, write = cycle.flow, cycle.transport.write

    def write_chunk(data: bytes) -> bool:
        if flow.write_paused or cycle.disconnected or cycle.response_complete:
            return False
        if data:
            write(b"%x\r\n%b\r\n" % (len(data), data))
        return True

    return write_chunk
