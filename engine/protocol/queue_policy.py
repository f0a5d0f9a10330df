"""Queued: requests that have no slot yet, by owner. The engine counts all of them (`QueueCounts`),
an API process its own, as far as the engine has told (`Queued`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class QueueCounts:
    """Counts requests and their prompt tokens."""

    def __init__(self) -> None:
        self._owners: dict[str, list[int]] = {}  # requests, tokens
        self.requests = 0
        self.tokens = 0

    @property
    def owners(self) -> int:
        """How many owners have requests that wait."""
        return len(self._owners)

    def of(self, owner: str) -> tuple[int, int]:
        """How many requests of an owner wait, and their prompt tokens."""
        requests, tokens = self._owners.get(owner, (0, 0))
        return requests, tokens

    def add(self, owner: str, tokens: int) -> None:
        """One more waits."""
        self.requests += 1
        self.tokens += tokens
        own = self._owners.get(owner)
        if own is None:
            self._owners[owner] = [1, tokens]
        else:
            own[0] += 1
            own[1] += tokens

    def remove(self, owner: str, tokens: int) -> None:
        """One of them waits no more."""
        self.requests -= 1
        self.tokens -= tokens
        own = self._owners[owner]
        own[0] -= 1
        own[1] -= tokens
        if not own[0]:
            del self._owners[owner]


class Waiters(Protocol):
    """What is to be known of requests that wait."""

    @property
    def owners(self) -> int:
        """How many owners have requests that wait."""

    def of(self, owner: str) -> tuple[int, int]:
        """How many requests of an owner wait, and their prompt tokens."""


class WaitersOfAll:
    """Those of several engines together."""

    def __init__(self, parts: Sequence[Waiters]) -> None:
        self._parts = parts

    @property
    def owners(self) -> int:
        """Of the engine where there are the most: most have requests everywhere."""
        return max(part.owners for part in self._parts)

    def of(self, owner: str) -> tuple[int, int]:
        """How many requests of an owner wait, and their prompt tokens."""
        requests, tokens = zip(*(part.of(owner) for part in self._parts), strict=True)
        return sum(requests), sum(tokens)


class Queued:
    """Counts requests that are known by a number, and may be told of twice."""

    def __init__(self) -> None:
        self._requests: dict[int, tuple[str, int]] = {}  # the owner, prompt tokens
        self._counts = QueueCounts()

    def __len__(self) -> int:
        return len(self._requests)

    @property
    def tokens(self) -> int:
        """Prompt tokens of all of them."""
        return self._counts.tokens

    @property
    def owners(self) -> int:
        """How many owners have requests that wait."""
        return self._counts.owners

    def of(self, owner: str) -> tuple[int, int]:
        """How many requests of an owner wait, and their prompt tokens."""
        return self._counts.of(owner)

    def add(self, number: int, owner: str, tokens: int) -> None:
        """A request that is not known yet waits."""
        self._requests[number] = owner, tokens
        self._counts.add(owner, tokens)

    def discard(self, number: int) -> None:
        """A request has a slot, or has ended; that may be known already."""
        found = self._requests.pop(number, None)
        if found is not None:
            self._counts.remove(*found)

    def clear(self) -> None:
        """Nothing waits any more."""
        self._requests.clear()
        self._counts = QueueCounts()
