"""SlotAllocator: which rows of the state pool are free."""

from __future__ import annotations

import heapq


class SlotAllocator:
    """Hands out the rows `first` to `first + count - 1`, the lowest free one first.

    Low rows first keeps the rows in use close together, so that a batch touches few pages.
    """

    def __init__(self, count: int, first: int = 0) -> None:
        self.count = count
        self._first = first
        self._heap = list(range(first, first + count))
        self._free = set(self._heap)

    @property
    def free(self) -> int:
        """How many rows are free."""
        return len(self._free)

    @property
    def used(self) -> int:
        """How many rows are allocated."""
        return self.count - len(self._free)

    def allocate(self) -> int:
        """Returns the lowest free row, which is the caller's until `release`.

        Raises IndexError when none is free.
        """
        row = heapq.heappop(self._heap)
        self._free.remove(row)
        return row

    def release(self, row: int) -> None:
        """Frees a row. Raises ValueError if it is free already or was never one of these."""
        if row in self._free or not self._first <= row < self._first + self.count:
            raise ValueError(f"row {row} is not allocated")
        heapq.heappush(self._heap, row)
        self._free.add(row)
