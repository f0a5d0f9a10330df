"""NameIndex: named states by owner and id, sorted, and by expiry time."""

from __future__ import annotations

import bisect
from collections.abc import Iterable

from engine.cache.name_locks import Key
from engine.cache.resume_point import NamedState
from engine.lazy_heap import LazyHeap


class NameIndex:
    """The existing names; knows nothing of rows and files."""

    def __init__(self) -> None:
        self._named: dict[Key, NamedState] = {}
        self._ids: dict[str, list[str]] = {}  # sorted ids, by owner
        self._expiry: LazyHeap[Key] = LazyHeap()

    def __len__(self) -> int:
        return len(self._named)

    def __contains__(self, key: Key) -> bool:
        return key in self._named

    def get(self, key: Key) -> NamedState | None:
        """Return the state of this name, or None."""
        return self._named.get(key)

    def all(self) -> Iterable[NamedState]:
        """Iterate over all named states in any order; do not add or remove any meanwhile."""
        return self._named.values()

    def count(self, owner: str) -> int:
        """Return how many named states the owner has."""
        return len(self._ids.get(owner, ()))

    def after(self, owner: str, id: str, limit: int) -> tuple[list[NamedState], bool]:
        """Return up to `limit` of the owner's states with ids after `id`, and if there are more."""
        ids = self._ids.get(owner, [])
        first = bisect.bisect_right(ids, id)
        chosen = [self._named[owner, one] for one in ids[first : first + limit]]
        return chosen, first + limit < len(ids)

    def add(self, named: NamedState) -> None:
        """Add a name that does not exist yet."""
        self._named[named.key] = named
        bisect.insort(self._ids.setdefault(named.owner, []), named.id)
        self.set_expiry(named, named.expires)

    def remove(self, key: Key) -> NamedState | None:
        """Remove a name and return its state; None if it does not exist."""
        named = self._named.pop(key, None)
        if named is None:
            return None
        self._expiry.discard(key)
        ids = self._ids[named.owner]
        del ids[bisect.bisect_left(ids, named.id)]
        if not ids:
            del self._ids[named.owner]
        return named

    def set_expiry(self, named: NamedState, expires: float) -> None:
        """Set when a named state expires, in seconds since the epoch."""
        named.expires = expires
        self._expiry.put(named.key, (expires, named.id, named.owner))

    def has_expired(self, now: float) -> bool:
        """Return whether any named state has expired."""
        first = self._expiry.first()
        return first is not None and self._named[first].expires <= now

    def take_expired(self, now: float) -> list[NamedState]:
        """Return the expired states. Each must be removed or given another `set_expiry`."""
        expired: list[NamedState] = []
        while (key := self._expiry.first()) is not None and self._named[key].expires <= now:
            self._expiry.discard(key)
            expired.append(self._named[key])
        return expired
