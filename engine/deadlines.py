"""Deadlines: items by the time at which they are due, nearly all of which leave before that.

They lie by whole seconds, not in a heap, so that to come and to leave costs a look-up.
"""

from __future__ import annotations

from typing import Generic, TypeVar

T = TypeVar("T")


class Deadlines(Generic[T]):
    """Hashable items; times are seconds of any one monotonic clock."""

    def __init__(self) -> None:
        self._by_second: dict[int, dict[T, float]] = {}  # none is empty
        self._first = 0  # there is none before, if there is any

    def put(self, item: T, due: float) -> None:
        """Takes in an item that is not in."""
        second = int(due)
        others = self._by_second.get(second)
        if others is None:
            self._first = min(self._first, second) if self._by_second else second
            others = self._by_second[second] = {}
        others[item] = due

    def discard(self, item: T, due: float) -> None:
        """Takes an item out, if it is in; `due` is what it came with."""
        others = self._by_second.get(int(due))
        if others is not None and others.pop(item, None) is not None and not others:
            del self._by_second[int(due)]

    def overdue(self, now: float) -> list[T]:
        """Those whose time is over, the most overdue first; they stay in."""
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
