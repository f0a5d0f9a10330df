"""FairLru: eviction order where several owners share a limited space.

The owner with the most items loses its least recently used one. An owner that floods the space can
therefore displace others only until all who want it have equal shares; owners with less keep what
they have. A single owner may use all of it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sized
from typing import Generic, Protocol, TypeVar

from engine.lazy_heap import LazyHeap


class Weights:
    """A weight per owner; the order is updated only when it is needed, not at every change."""

    def __init__(self) -> None:
        self.of: dict[str, int] = {}  # owners with a weight other than 0
        self.total = 0
        self._order = _Order()

    def add(self, owner: str, more: int) -> None:
        """Change an owner's weight by `more`, which may be negative."""
        weight = self.of.get(owner, 0) + more
        self.total += more
        self._order.changed.add(owner)
        if weight:
            self.of[owner] = weight
        else:
            self.of.pop(owner, None)

    def heaviest(self) -> str | None:
        """Return the owner with the largest weight; None if there is none."""
        return self._order.first(self.of)


class _Order:
    """Owners by weight, the heaviest first."""

    def __init__(self) -> None:
        self.changed: set[str] = set()  # owners whose weights changed since they were ranked
        self._ranking: LazyHeap[str] = LazyHeap()

    def first(self, of: Mapping[str, int | Sized]) -> str | None:
        """Return the heaviest owner, by weight or by number of items; None if there is none."""
        if len(of) < 2:
            return next(iter(of), None)
        for owner in self.changed:
            weight = of.get(owner)
            if weight is None:
                self._ranking.discard(owner)
            else:
                weight = weight if isinstance(weight, int) else len(weight)
                self._ranking.put(owner, (-weight, owner))
        self.changed.clear()
        return self._ranking.first()


class Owned(Protocol):
    """Something that belongs to an owner."""

    owner: str

    def __hash__(self) -> int: ...


T = TypeVar("T", bound=Owned)


class FairLru(Generic[T]):
    """Items in the order in which they should be evicted."""

    def __init__(self) -> None:
        self._lists: dict[str, OrderedDict[T, None]] = {}  # by owner, the least recently used first
        self._order = _Order()

    def __iter__(self) -> Iterator[T]:
        """Iterate in eviction order. The current item may be removed if the loop then ends."""
        heaviest = self._order.first(self._lists)
        if heaviest is None:
            return iter(())
        if len(self._lists) == 1:
            return iter(self._lists[heaviest])
        return self._from(heaviest)

    def _from(self, heaviest: str) -> Iterator[T]:
        yield from self._lists[heaviest]
        for owner in sorted(self._lists, key=lambda owner: -len(self._lists[owner])):
            if owner != heaviest:
                yield from self._lists[owner]

    def of(self, owner: str) -> Iterator[T]:
        """Iterate over this owner's items, the least recently used first."""
        yield from self._lists.get(owner, ())

    def add(self, one: T) -> None:
        """Add an item, as the most recently used of its owner."""
        mine = self._lists.get(one.owner)
        if mine is None:
            mine = self._lists[one.owner] = OrderedDict()
        mine[one] = None
        self._order.changed.add(one.owner)

    def discard(self, one: T) -> None:
        """Remove an item if it is there."""
        mine = self._lists.get(one.owner)
        if mine is None or one not in mine:
            return
        del mine[one]
        self._order.changed.add(one.owner)
        if not mine:
            del self._lists[one.owner]

    def touch(self, one: T) -> None:
        """Mark an item as just used, if it is there."""
        mine = self._lists.get(one.owner)
        if mine is not None and one in mine:
            mine.move_to_end(one)
