"""What is left of a body when its request has been answered.

A client reads no answer before it has sent its body, and a connection that is closed with unread
data is reset, which takes the answer away with it. So the rest is read and thrown away before an
answer that closes its connection ends, up to a bound; whoever sends more loses the connection.
"""

from __future__ import annotations

import asyncio

from starlette.types import Receive

DISCARDED = 64 * 2**20  # bytes at most
DISCARD_SECONDS = 10.0  # at most


async def discard(receive: Receive) -> None:
    """Reads the rest of a body, or as much as the bounds allow."""
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
