"""LazyHeap: a priority queue whose items may change their rank or leave at any time.

Outdated heap entries are skipped. The heap is rebuilt when they outnumber the valid ones.
"""

from __future__ import annotations

import heapq
from typing import Any, Generic, TypeVar

T = TypeVar("T")

SPARE = 64  # outdated entries that are always tolerated


class LazyHeap(Generic[T]):
    """Hashable items by rank, the least first.

    Ranks are comparable, and no two items have the same one. Every operation takes O(log n)
    amortized.
    """

    def __init__(self) -> None:
        self._ranks: dict[T, Any] = {}
        self._heap: list[tuple[Any, T]] = []

    def put(self, item: T, rank: Any) -> None:
        """Add an item, or change its rank."""
        if self._ranks.get(item) == rank:
            return
        self._ranks[item] = rank
        heapq.heappush(self._heap, (rank, item))
        if len(self._heap) > 2 * len(self._ranks) + SPARE:
            self._heap = [(rank, item) for item, rank in self._ranks.items()]
            heapq.heapify(self._heap)

    def discard(self, item: T) -> None:
        """Remove an item if it is there."""
        self._ranks.pop(item, None)

    def first(self) -> T | None:
        """Return the item of least rank; None if there is none."""
        while self._heap:
            rank, item = self._heap[0]
            if self._ranks.get(item) == rank:
                return item
            heapq.heappop(self._heap)
        return None
