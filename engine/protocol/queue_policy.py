"""The admission policy: how much of the bounded request queue one owner may occupy.

Both sides of the process boundary apply it. The engine counts all requests that have no slot yet
(`QueueCounts`). An API process counts its own, as far as the engine has reported (`Queued`). The
engine decides. A place may be one request, one prompt token or one row of cached state.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from engine.errors import QueueFull, ShareFull

QUEUE_PART = 3  # an owner may hold this many times what its request would leave free


def has_room(*, taken: int, own: int, more: int, most: int, owner: str) -> bool:
    """Return whether an owner's next request fits in a queue.

    One owner holds at most QUEUE_PART times what stays free: three quarters alone, three sevenths
    beside another one. So there is always room for an owner that has nothing in the queue, and no
    place is reserved for an owner that never comes. The last place is for those with nothing in the
    queue. Requests without an owner ("") share all of it.

    Args:
        taken: places taken by all owners.
        own: those of them that `owner` has.
        more: places that the request needs.
        most: places of the whole queue.
        owner: whose request it is; "" for nobody's.
    """
    left = most - taken - more
    return left >= 0 and (not owner or own + more <= max(QUEUE_PART * left, 1))


def most_of_one(most: int, owner: str) -> int:
    """Return how many of `most` places `has_room` grants to `owner` in an empty queue."""
    if not owner or most == 0:
        return most
    return max(QUEUE_PART * most // (1 + QUEUE_PART), 1)


def refusal(*, taken: int, own: int, more: int, most: int, owner: str) -> type[QueueFull] | None:
    """Return the error type if an owner's next request does not fit; arguments as in `has_room`.

    Returns None where it fits, QueueFull where the queue as a whole has too few places left, and
    ShareFull where it has enough, but the rest is kept for other owners.
    """
    if has_room(taken=taken, own=own, more=more, most=most, owner=owner):
        return None
    return QueueFull if taken + more > most else ShareFull


class QueueCounts:
    """Counts waiting requests and their prompt tokens, in total and by owner."""

    def __init__(self) -> None:
        self._owners: dict[str, list[int]] = {}  # [requests, tokens] by owner
        self.requests = 0
        self.tokens = 0

    @property
    def owners(self) -> int:
        """How many owners have waiting requests."""
        return len(self._owners)

    def of(self, owner: str) -> tuple[int, int]:
        """Return (waiting requests, their prompt tokens) of an owner."""
        requests, tokens = self._owners.get(owner, (0, 0))
        return requests, tokens

    def add(self, owner: str, tokens: int) -> None:
        """Count one more waiting request."""
        self.requests += 1
        self.tokens += tokens
        own = self._owners.get(owner)
        if own is None:
            self._owners[owner] = [1, tokens]
        else:
            own[0] += 1
            own[1] += tokens

    def remove(self, owner: str, tokens: int) -> None:
        """Count one waiting request less."""
        self.requests -= 1
        self.tokens -= tokens
        own = self._owners[owner]
        own[0] -= 1
        own[1] -= tokens
        if not own[0]:
            del self._owners[owner]


class Waiters(Protocol):
    """A read-only view of the waiting requests, by owner."""

    @property
    def owners(self) -> int:
        """How many owners have waiting requests."""

    def of(self, owner: str) -> tuple[int, int]:
        """Return (waiting requests, their prompt tokens) of an owner."""


class WaitersOfAll:
    """The waiting requests of several engines together."""

    def __init__(self, parts: Sequence[Waiters]) -> None:
        self._parts = parts

    @property
    def owners(self) -> int:
        """The largest number of owners at any engine, since most owners wait at all of them."""
        return max(part.owners for part in self._parts)

    def of(self, owner: str) -> tuple[int, int]:
        """Return (waiting requests, their prompt tokens) of an owner, over all engines."""
        requests, tokens = zip(*(part.of(owner) for part in self._parts), strict=True)
        return sum(requests), sum(tokens)


class Queued:
    """Counts waiting requests by their number; reporting the same change twice is harmless."""

    def __init__(self) -> None:
        self._requests: dict[int, tuple[str, int]] = {}  # (owner, prompt tokens) by request number
        self._counts = QueueCounts()

    def __len__(self) -> int:
        return len(self._requests)

    @property
    def tokens(self) -> int:
        """Prompt tokens of all waiting requests."""
        return self._counts.tokens

    @property
    def owners(self) -> int:
        """How many owners have waiting requests."""
        return self._counts.owners

    def of(self, owner: str) -> tuple[int, int]:
        """Return (waiting requests, their prompt tokens) of an owner."""
        return self._counts.of(owner)

    def add(self, number: int, owner: str, tokens: int) -> None:
        """Count a new request that waits."""
        self._requests[number] = owner, tokens
        self._counts.add(owner, tokens)

    def discard(self, number: int) -> None:
        """Stop counting a request that got a slot or has ended; unknown numbers are ignored."""
        found = self._requests.pop(number, None)
        if found is not None:
            self._counts.remove(*found)

    def clear(self) -> None:
        """Forget all requests."""
        self._requests.clear()
        self._counts = QueueCounts()
