"""Arrivals: what came one after the other, in that order, and may leave and come back in any."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from typing import Generic, TypeVar

T = TypeVar("T")
FEW = 64  # numbers of some that have left may stay


class Arrivals(Generic[T]):
    """Items by numbers that rise with their arrival. What comes, and what leaves, costs the same
    however many are here; only what comes back costs O(log n)."""

    def __init__(self) -> None:
        self._items: OrderedDict[int, T] = OrderedDict()  # those that have not been away
        self._latest = -1  # of all that ever were among them
        self._back: dict[int, T] = {}  # the others
        self._numbers: list[int] = []  # theirs, as a heap; and of some that have left

    def __len__(self) -> int:
        return len(self._items) + len(self._back)

    def add(self, number: int, item: T) -> None:
        """Takes an item in, which is not in."""
        if number > self._latest:
            self._items[number] = item
            self._latest = number
        else:
            self._back[number] = item
            heapq.heappush(self._numbers, number)

    def discard(self, number: int) -> None:
        """Takes an item out, if it is in."""
        if self._items.pop(number, None) is None and self._back.pop(number, None) is not None:
            if len(self._numbers) > 2 * len(self._back) + FEW:
                self._numbers = sorted(self._back)  # which is a heap
            while self._numbers and self._numbers[0] not in self._back:
                heapq.heappop(self._numbers)

    def first(self) -> T | None:
        """The item of the least number; None when there is none."""
        if self._back:
            number = self._numbers[0]
            if not self._items or number < next(iter(self._items)):
                return self._back[number]
        return next(iter(self._items.values()), None)
