"""Shares: who gives way where several owners have something in the same room.

Whoever has the most there, and of what that owner has the least recently used. So one that floods
the room displaces others only until all who want it have equal parts; those who hold less than
that keep what they have. Alone, an owner may have all of it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import Generic, Protocol, TypeVar

from engine.ranking import Ranking


class Weights:
    """How much each owner has. Nothing is ranked while there is one owner only."""

    def __init__(self) -> None:
        self.of: dict[str, int] = {}  # those who have something
        self.total = 0
        self._ranking: Ranking[str] = Ranking()

    def add(self, owner: str, more: int) -> None:
        """It has so much more than before, or less."""
        weight = self.of.get(owner, 0) + more
        self.total += more
        if weight:
            new = owner not in self.of
            self.of[owner] = weight
            if new and len(self.of) == 2:  # what was ranked before is out of date
                self._ranking = Ranking()
                for each, its in self.of.items():
                    self._ranking.put(each, (-its, each))
            elif len(self.of) > 1:
                self._ranking.put(owner, (-weight, owner))
        else:
            self.of.pop(owner, None)
            self._ranking.discard(owner)

    def heaviest(self) -> str | None:
        """The owner who has the most."""
        if len(self.of) > 1:
            return self._ranking.first()
        return next(iter(self.of), None)


class Owned(Protocol):
    """Something that is an owner's."""

    owner: str

    def __hash__(self) -> int: ...


T = TypeVar("T", bound=Owned)


class Shares(Generic[T]):
    """Things in the order in which they should give way."""

    def __init__(self) -> None:
        self._lists: dict[str, OrderedDict[T, None]] = {}  # least recently used first
        self._weights = Weights()

    def __contains__(self, one: T) -> bool:
        return one in self._lists.get(one.owner, ())

    def __iter__(self) -> Iterator[T]:
        """Whoever should give way first comes first. What the loop is at may be taken out, if that
        ends the loop."""
        heaviest = self._weights.heaviest()
        if heaviest is None:
            return
        yield from self._lists[heaviest]
        if len(self._lists) > 1:
            others = sorted(self._weights.of.items(), key=lambda item: -item[1])
            for owner, _ in others:
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
        if one not in mine:
            self._weights.add(one.owner, 1)
        mine[one] = None

    def discard(self, one: T) -> None:
        """Takes one out, if it is in."""
        mine = self._lists.get(one.owner)
        if mine is None or one not in mine:
            return
        del mine[one]
        self._weights.add(one.owner, -1)
        if not mine:
            del self._lists[one.owner]

    def touch(self, one: T) -> None:
        """It was used, if it is in."""
        mine = self._lists.get(one.owner)
        if mine is not None and one in mine:
            mine.move_to_end(one)
