"""Queued: requests that have no slot yet, by owner. The engine counts all of them, an API process
its own, as far as the engine has told."""

from __future__ import annotations


class Queued:
    """Counts requests, known by a number, and their prompt tokens."""

    def __init__(self) -> None:
        self._requests: dict[int, tuple[str, int]] = {}  # the owner, prompt tokens
        self._owners: dict[str, list[int]] = {}  # how many requests, their prompt tokens
        self.tokens = 0

    def __len__(self) -> int:
        return len(self._requests)

    @property
    def owners(self) -> int:
        """How many owners have requests that wait."""
        return len(self._owners)

    def of(self, owner: str) -> tuple[int, int]:
        """How many requests of an owner wait, and their prompt tokens."""
        requests, tokens = self._owners.get(owner, (0, 0))
        return requests, tokens

    def add(self, number: int, owner: str, tokens: int) -> None:
        """A request that is not known yet waits."""
        self._requests[number] = owner, tokens
        self._account(owner, 1, tokens)

    def discard(self, number: int) -> None:
        """A request has a slot, or has ended; that may be known already."""
        found = self._requests.pop(number, None)
        if found is not None:
            owner, tokens = found
            self._account(owner, -1, -tokens)

    def clear(self) -> None:
        """Nothing waits any more."""
        self._requests.clear()
        self._owners.clear()
        self.tokens = 0

    def _account(self, owner: str, count: int, tokens: int) -> None:
        self.tokens += tokens
        own = self._owners.get(owner)
        if own is None:
            own = self._owners[owner] = [0, 0]
        own[0] += count
        own[1] += tokens
        if not own[0]:
            del self._owners[owner]
