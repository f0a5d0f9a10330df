"""Places: how many more requests the engine can hold.

The engine holds as many as it has slots and room in its queue. What one HTTP request asks of it is
taken whole or refused whole: its places are spoken for before its prompts are tokenised, so that
nobody else takes them meanwhile. With several API processes the others are seen as of the latest
message; the engine's own bound stays the last word.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from engine.client import EngineClient
from engine.errors import QueueFull
from service.errors import ApiError

LEAST_RETRY, MOST_RETRY = 1.0, 60.0  # seconds


class Places:
    """`capacity` gives the most requests that the engine holds, running and waiting."""

    def __init__(self, client: EngineClient, capacity: Callable[[], int]) -> None:
        self._client = client
        self._capacity = capacity
        self._reserved = 0  # spoken for, not sent yet

    def check(self, requests: int) -> None:
        """Raises QueueFull where so many more find no room just now, and ApiError 400 for more
        than ever could."""
        capacity = self._capacity()
        if requests > capacity:
            raise ApiError(
                400,
                f"{requests} prompts at once (samples count too), but this server holds "
                f"at most {capacity}; send fewer at a time",
                code="too_many_prompts",
            )
        taken = self._client.in_flight + self._reserved
        missing = taken + requests - capacity
        if missing > 0:
            # One place is free for each request that leaves the queue, at the pace seen lately.
            seconds = min(max(missing * self._client.stats.pace, LEAST_RETRY), MOST_RETRY)
            raise QueueFull(
                f"the queue is full: {taken} of at most {capacity} requests are running or "
                f"waiting, and there is no room for {requests} more; "
                f"try again in {math.ceil(seconds)} s",
                retry_after=seconds,
            )

    def reserve(self, requests: int) -> None:
        """Takes places out of what others may have. Raises as `check`."""
        self.check(requests)
        self._reserved += requests

    def release(self, requests: int) -> None:
        """Gives reserved places back: the requests have been sent, or never will be."""
        self._reserved -= requests
