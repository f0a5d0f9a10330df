"""Queued: which requests of one API process have no slot yet, as far as the engine has told."""

from __future__ import annotations

from engine.messages import Request


class Queued:
    """Counts requests and their prompt tokens, by owner."""

    def __init__(self) -> None:
        self._requests: dict[int, tuple[str, int]] = {}  # by id: the owner, prompt tokens
        self._owners: dict[str, tuple[int, int]] = {}
        self.tokens = 0

    @property
    def owners(self) -> int:
        """How many owners have requests that wait."""
        return len(self._owners)

    def of(self, owner: str) -> tuple[int, int]:
        """How many requests of an owner wait, and their prompt tokens."""
        return self._owners.get(owner, (0, 0))

    def add(self, request: Request) -> None:
        """A request is on its way to the engine."""
        self._requests[request.id] = request.owner, request.prompt_tokens
        self._account(request.owner, 1, request.prompt_tokens)

    def discard(self, request_id: int) -> None:
        """A request has a slot, or has ended; it may be known already."""
        found = self._requests.pop(request_id, None)
        if found is not None:
            owner, tokens = found
            self._account(owner, -1, -tokens)

    def clear(self) -> None:
        """Nothing waits any more."""
        self._requests.clear()
        self._owners.clear()
        self.tokens = 0

    def _account(self, owner: str, count: int, tokens: int) -> None:
        old_count, old_tokens = self._owners.get(owner, (0, 0))
        self.tokens += tokens
        if old_count + count:
            self._owners[owner] = old_count + count, old_tokens + tokens
        else:
            del self._owners[owner]
