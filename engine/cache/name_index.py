"""NameIndex: named states by owner and id, in order, and by when they expire."""

from __future__ import annotations

import bisect
from collections.abc import Iterable

from engine.cache.name_locks import Key
from engine.cache.resume_point import NamedState
from engine.lazy_heap import LazyHeap


class NameIndex:
    """Who has a name. It knows nothing of rows and files."""

    def __init__(self) -> None:
        self._named: dict[Key, NamedState] = {}
        self._ids: dict[str, list[str]] = {}  # by owner, in order
        self._expiry: LazyHeap[Key] = LazyHeap()

    def __len__(self) -> int:
        return len(self._named)

    def __contains__(self, key: Key) -> bool:
        return key in self._named

    def get(self, key: Key) -> NamedState | None:
        """The name's state, if it has one."""
        return self._named.get(key)

    def all(self) -> Iterable[NamedState]:
        """All of them, in any order; nothing may be added or removed meanwhile."""
        return self._named.values()

    def count(self, owner: str) -> int:
        """How many the owner has."""
        return len(self._ids.get(owner, ()))

    def after(self, owner: str, id: str, limit: int) -> tuple[list[NamedState], bool]:
        """Up to `limit` of the owner's after an id, in order, and whether there are more."""
        ids = self._ids.get(owner, [])
        first = bisect.bisect_right(ids, id)
        chosen = [self._named[owner, one] for one in ids[first : first + limit]]
        return chosen, first + limit < len(ids)

    def add(self, named: NamedState) -> None:
        """Adds a name that is not there."""
        self._named[named.key] = named
        bisect.insort(self._ids.setdefault(named.owner, []), named.id)
        self.set_expiry(named, named.expires)

    def remove(self, key: Key) -> NamedState | None:
        """Removes a name. Returns what it had; None where it is not there."""
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
        """It expires then, in seconds since the epoch."""
        named.expires = expires
        self._expiry.put(named.key, (expires, named.id, named.owner))

    def has_expired(self, now: float) -> bool:
        """Whether one's time is over."""
        first = self._expiry.first()
        return first is not None and self._named[first].expires <= now

    def take_expired(self, now: float) -> list[NamedState]:
        """Those whose time is over. Each has to be removed, or given another `set_expiry`."""
        expired: list[NamedState] = []
        while (key := self._expiry.first()) is not None and self._named[key].expires <= now:
            self._expiry.discard(key)
            expired.append(self._named[key])
        return expired
