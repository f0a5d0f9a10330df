"""FairLru: who gives way where several owners have something in the same room.

Whoever has the most there, and of what that owner has the least recently used. So one that floods
the room displaces others only until all who want it have equal parts; those who hold less than
that keep what they have. Alone, an owner may have all of it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sized
from typing import Generic, Protocol, TypeVar

from engine.lazy_heap import LazyHeap


class Weights:
    """How much each owner has; ranked when somebody asks, not whenever a weight changes."""

    def __init__(self) -> None:
        self.of: dict[str, int] = {}  # those who have something
        self.total = 0
        self._order = _Order()

    def add(self, owner: str, more: int) -> None:
        """It has so much more than before, or less."""
        weight = self.of.get(owner, 0) + more
        self.total += more
        self._order.changed.add(owner)
        if weight:
            self.of[owner] = weight
        else:
            self.of.pop(owner, None)

    def heaviest(self) -> str | None:
        """The owner who has the most."""
        return self._order.first(self.of)


class _Order:
    """Owners by weight, the heaviest first."""

    def __init__(self) -> None:
        self.changed: set[str] = set()  # owners whose weights have, since they were ranked
        self._ranking: LazyHeap[str] = LazyHeap()

    def first(self, of: Mapping[str, int | Sized]) -> str | None:
        """The heaviest of all, by weight or length."""
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
    """Something that is an owner's."""

    owner: str

    def __hash__(self) -> int: ...


T = TypeVar("T", bound=Owned)


class FairLru(Generic[T]):
    """Things in the order in which they should give way."""

    def __init__(self) -> None:
        self._lists: dict[str, OrderedDict[T, None]] = {}  # least recently used first
        self._order = _Order()

    def __iter__(self) -> Iterator[T]:
        """Whoever should give way first comes first. What the loop is at may be taken out, if that
        ends the loop."""
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
        """This owner's, least recently used first."""
        yield from self._lists.get(owner, ())

    def add(self, one: T) -> None:
        """Takes one in, as used just now."""
        mine = self._lists.get(one.owner)
        if mine is None:
            mine = self._lists[one.owner] = OrderedDict()
        mine[one] = None
        self._order.changed.add(one.owner)

    def discard(self, one: T) -> None:
        """Takes one out, if it is in."""
        mine = self._lists.get(one.owner)
        if mine is None or one not in mine:
            return
        del mine[one]
        self._order.changed.add(one.owner)
        if not mine:
            del self._lists[one.owner]

    def touch(self, one: T) -> None:
        """It was used, if it is in."""
        mine = self._lists.get(one.owner)
        if mine is not None and one in mine:
            mine.move_to_end(one)
