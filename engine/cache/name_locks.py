"""NameLocks: who may put a state under a name: one at a time, in this engine and in all that use
the folder.

A claim is the lock of the name's file. It outlasts the request that made it by the time in which
the file is written.
"""

from __future__ import annotations

from collections.abc import Callable

from engine.cache.storage.file_store import StateFileStore
from engine.cache.storage.named_state_file import name_of
from engine.cache.storage.snapshot import StateLayout
from engine.errors import StateBusy

Key = tuple[str, str]  # owner and id


class NameLocks:
    """Without a shelf there are no other engines, and nothing to wait for. `changes` says whether a
    name's file is about to be written or deleted here."""

    def __init__(
        self, shelf: StateFileStore | None, shape: StateLayout, changes: Callable[[Key], bool]
    ) -> None:
        self._shelf = shelf
        self._shape = shape
        self._changes = changes
        self._held: set[Key] = set()

    def __contains__(self, key: Key) -> bool:
        """A request of this engine will take its place."""
        return key in self._held

    def take(self, key: Key, param: str) -> None:
        """Nobody else changes it from now on, until `settle`. Raises StateBusy."""
        busy = key in self._held
        if not busy and self._shelf is not None:
            busy = not self._shelf.lock.take(name_of(*key, self._shape))
        if busy:
            raise StateBusy(f"state {key[1]!r} is being replaced by another request", param=param)

    def hold(self, key: Key) -> None:
        """The claim is a request's, until `let_go`."""
        self._held.add(key)

    def let_go(self, key: Key) -> None:
        """Of what is held; `settle` has to follow."""
        self._held.discard(key)

    def settle(self, key: Key) -> None:
        """Gives it back, unless something is still to be done here."""
        if self._shelf is None or self._changes(key) or key in self._held:
            return
        self._shelf.lock.give_back(name_of(*key, self._shape))
