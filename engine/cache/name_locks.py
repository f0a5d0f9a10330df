"""NameLocks: who may replace the state of a name: one at a time, of all engines that use a folder.

The lock is the name's file's. It outlasts the request that took it by the time in which the file is
written.
"""

from __future__ import annotations

from collections.abc import Callable

from engine.cache.storage.file_store import StateFileStore
from engine.cache.storage.named_state_file import name_of
from engine.cache.storage.snapshot import StateLayout
from engine.errors import StateBusy

Key = tuple[str, str]  # owner and id


class NameLocks:
    """Without a file store there are no other engines, and nothing to wait for."""

    def __init__(
        self,
        file_store: StateFileStore | None,
        layout: StateLayout,
        is_changing: Callable[[Key], bool],
    ) -> None:
        """`is_changing` says whether a name's file is about to be written or deleted here."""
        self._file_store = file_store
        self._layout = layout
        self._is_changing = is_changing
        self._reserved: set[Key] = set()

    def __contains__(self, key: Key) -> bool:
        """A request of this engine will replace its state."""
        return key in self._reserved

    def acquire(self, key: Key, param: str) -> None:
        """Nobody else changes the name from now on, until `release_if_idle`. Raises StateBusy."""
        busy = key in self._reserved
        if not busy and self._file_store is not None:
            busy = not self._file_store.lock.acquire(name_of(*key, self._layout))
        if busy:
            raise StateBusy(f"state {key[1]!r} is being replaced by another request", param=param)

    def reserve(self, key: Key) -> None:
        """What was acquired is a request's, until `unreserve`."""
        self._reserved.add(key)

    def unreserve(self, key: Key) -> None:
        """The request is over; `release_if_idle` has to follow."""
        self._reserved.discard(key)

    def release_if_idle(self, key: Key) -> None:
        """Releases the lock, unless a request has reserved it or its file is still changing."""
        if self._file_store is None or self._is_changing(key) or key in self._reserved:
            return
        self._file_store.lock.release(name_of(*key, self._layout))
