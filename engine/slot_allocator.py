"""SlotAllocator: manages the free rows of the state pool."""

from __future__ import annotations

import heapq


class SlotAllocator:
    """Allocates the rows `first` to `first + count - 1`, the lowest free one first.

    This keeps the rows in use close together, so that a batch touches few memory pages.
    """

    def __init__(self, count: int, first: int = 0) -> None:
        self.count = count
        self._first = first
        self._heap = list(range(first, first + count))
        self._free = set(self._heap)

    @property
    def free(self) -> int:
        """Number of free rows."""
        return len(self._free)

    @property
    def used(self) -> int:
        """Number of allocated rows."""
        return self.count - len(self._free)

    def allocate(self) -> int:
        """Return the lowest free row, which belongs to the caller until `release`.

        Raises IndexError if none is free.
        """
        row = heapq.heappop(self._heap)
        self._free.remove(row)
        return row

    def release(self, row: int) -> None:
        """Free a row. Raises ValueError if it is free already or not one of these rows."""
        if row in self._free or not self._first <= row < self._first + self.count:
            raise ValueError(f"row {row} is not allocated")
        heapq.heappush(self._heap, row)
        self._free.add(row)
