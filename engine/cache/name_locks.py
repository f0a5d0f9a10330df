"""NameLocks: locks so that only one request, of all engines on a folder, replaces a named state.

The lock belongs to the name's file. It is held beyond the request, until the file is written.
"""

from __future__ import annotations

from collections.abc import Callable

from engine.cache.storage.state_store import StateStore
from engine.errors import StateBusy

Key = tuple[str, str]  # (owner, id)


class NameLocks:
    """The locked names. Without a store there are no other engines to exclude."""

    def __init__(
        self,
        store: StateStore | None,
        is_changing: Callable[[Key], bool],
    ) -> None:
        """Create without locks; `is_changing` says whether this engine has a file in progress."""
        self._store = store
        self._is_changing = is_changing
        self._reserved: set[Key] = set()

    def __contains__(self, key: Key) -> bool:
        """Return whether a request of this engine is going to replace this name's state."""
        return key in self._reserved

    def acquire(self, key: Key, param: str) -> None:
        """Lock the name until `release_if_idle`. Raises StateBusy if it is locked."""
        busy = key in self._reserved
        if not busy and self._store is not None:
            busy = not self._store.lock_file(self._store.file_of(*key))
        if busy:
            raise StateBusy(f"state {key[1]!r} is being replaced by another request", param=param)

    def reserve(self, key: Key) -> None:
        """Assign an acquired lock to a request, until `unreserve`."""
        self._reserved.add(key)

    def unreserve(self, key: Key) -> None:
        """End the request's use of the lock; call `release_if_idle` next."""
        self._reserved.discard(key)

    def release_if_idle(self, key: Key) -> None:
        """Release the lock, unless a request has reserved it or its file is still changing."""
        if self._store is None or self._is_changing(key) or key in self._reserved:
            return
        self._store.unlock_file(self._store.file_of(*key))
