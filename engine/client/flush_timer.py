"""FlushTimer: readers that are not woken for every token, but not kept waiting for long either."""

from __future__ import annotations

import asyncio
from typing import Protocol

MOST_HELD_SECONDS = 0.05  # that a token may be kept from its reader for the sake of others


class Holder(Protocol):
    """Something that keeps what has come from its reader."""

    def release(self) -> None:
        """Gives it what there is."""


class FlushTimer:
    """Releases what has been held for MOST_HELD_SECONDS; used on one event loop."""

    def __init__(self) -> None:
        self._until: dict[Holder, float] = {}  # by the loop's time, the earliest first
        self._timer: asyncio.TimerHandle | None = None

    def add(self, holder: Holder) -> None:
        """It holds something, since now if it did not before."""
        if holder in self._until:
            return
        loop = asyncio.get_running_loop()
        self._until[holder] = loop.time() + MOST_HELD_SECONDS
        if self._timer is None:
            self._timer = loop.call_later(MOST_HELD_SECONDS, self._release)

    def discard(self, holder: Holder) -> None:
        """It holds nothing."""
        self._until.pop(holder, None)

    def clear(self) -> None:
        """Nothing is held any more."""
        self._until.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _release(self) -> None:
        loop = asyncio.get_running_loop()
        self._timer, now = None, loop.time()
        for holder, until in list(self._until.items()):
            if until > now:
                self._timer = loop.call_at(until, self._release)
                return
            del self._until[holder]
            holder.release()
