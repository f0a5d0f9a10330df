"""Deadlines: items sorted by due time, nearly all of which are removed before it.

Items are kept in buckets of one second rather than in a heap, so that adding and removing one costs
a dictionary look-up.
"""

from __future__ import annotations

from typing import Generic, TypeVar

T = TypeVar("T")


class Deadlines(Generic[T]):
    """A set of hashable items with due times, in seconds of any one monotonic clock."""

    def __init__(self) -> None:
        self._by_second: dict[int, dict[T, float]] = {}  # no bucket is empty
        self._first = 0  # no bucket is earlier than this

    def put(self, item: T, due: float) -> None:
        """Add an item that is not in the set."""
        second = int(due)
        others = self._by_second.get(second)
        if others is None:
            self._first = min(self._first, second) if self._by_second else second
            others = self._by_second[second] = {}
        others[item] = due

    def discard(self, item: T, due: float) -> None:
        """Remove an item if it is in the set; `due` must be the value it was added with."""
        others = self._by_second.get(int(due))
        if others is not None and others.pop(item, None) is not None and not others:
            del self._by_second[int(due)]

    def overdue(self, now: float) -> list[T]:
        """Return the items that are due, the most overdue first, without removing them."""
        if not self._by_second:
            return []
        last, found = int(now), []
        while self._first < last and self._first not in self._by_second:
            self._first += 1
        for second in range(self._first, last + 1):
            items = self._by_second.get(second, {}).items()
            found += [(due, item) for item, due in items if due <= now]
        found.sort(key=lambda one: one[0])
        return [item for _, item in found]
