"""LazyHeap: items in the order of their ranks, which may change and leave in any order.

A heap whose outdated entries are passed over; it is built anew when they are more than the others.
"""

from __future__ import annotations

import heapq
from typing import Any, Generic, TypeVar

T = TypeVar("T")

SPARE = 64  # outdated entries that never matter


class LazyHeap(Generic[T]):
    """Hashable items by rank, the least first. Ranks are comparable, and no two items have the same
    one. Every operation costs O(log n) in the mean."""

    def __init__(self) -> None:
        self._ranks: dict[T, Any] = {}
        self._heap: list[tuple[Any, T]] = []

    def put(self, item: T, rank: Any) -> None:
        """Takes an item in, or gives it another rank."""
        if self._ranks.get(item) == rank:
            return
        self._ranks[item] = rank
        heapq.heappush(self._heap, (rank, item))
        if len(self._heap) > 2 * len(self._ranks) + SPARE:
            self._heap = [(rank, item) for item, rank in self._ranks.items()]
            heapq.heapify(self._heap)

    def discard(self, item: T) -> None:
        """Takes an item out, if it is in."""
        self._ranks.pop(item, None)

    def first(self) -> T | None:
        """The item of the least rank; None when there is none."""
        while self._heap:
            rank, item = self._heap[0]
            if self._ranks.get(item) == rank:
                return item
            heapq.heappop(self._heap)
        return None
