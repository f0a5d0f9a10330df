"""StateNames: the kept states that have a name, by owner and id, and what the shelf has of them.

A reload makes two engines use one folder, until the older one has finished what it has. Then a file
is the truth, and what is remembered holds only as long as the file is the one that it was read from
or written to, which each look at a name asks first; a former state's file that stays where a state
could not be written is known by its tag. What is left when one is alone again is taken stock of.
"""

from __future__ import annotations

import bisect
import logging
from collections.abc import Callable

from engine.cache.name_locks import Key, NameLocks
from engine.cache.resume_point import NamedState, ResumePoint
from engine.cache.storage.file_store import StateFileStore, tag_of
from engine.cache.storage.named_state_file import name_of, parse
from engine.cache.storage.snapshot import StateLayout
from engine.cache.storage.worker_threads import Result
from engine.cache.store_waiters import StoreWaiters, Storing, Waiter
from engine.cache.tiered_store import CachedState, TieredStateStore
from engine.cache.transfer import MORE_BYTES
from engine.errors import ConfigError, EngineError, StateNotStored
from engine.lazy_heap import LazyHeap
from engine.protocol.state_calls import StateInfo
from engine.protocol.token_ids import ID_BYTES

log = logging.getLogger(__name__)


class StateNames:
    """The other half of NamedStates, which says what becomes of them. `clock`: the time of day."""

    def __init__(
        self,
        tiers: TieredStateStore,
        shape: StateLayout,
        shelf: StateFileStore | None,
        disk_bytes: int,
        clock: Callable[[], float],
    ) -> None:
        self._tiers = tiers
        self._shape = shape
        self._shelf = shelf
        self._disk_bytes = disk_bytes
        self._clock = clock
        self._named: dict[Key, NamedState] = {}
        self._ids: dict[str, list[str]] = {}  # by owner, in order
        self._expiry: LazyHeap[Key] = LazyHeap()
        self.claims = NameLocks(shelf, shape, self._changes)
        self.waiters = StoreWaiters()
        self.store_errors = 0  # files that could not be written or removed
        self._new: set[Key] = set()  # those that requests have claimed, and that were not there
        self._making: dict[str, int] = {}  # how many these are, by owner
        self._alone = True  # no other engine uses the folder, when this was last asked
        self.files = 0
        if shelf is not None:
            self._alone = shelf.lock.alone
            self._take_stock(shelf)

    def __len__(self) -> int:
        return len(self._named)

    def _end(self, owner: str, id: str) -> None:
        self.claims.let_go((owner, id))
        if (owner, id) in self._new:
            self._new.remove((owner, id))
            self._making[owner] -= 1
            if not self._making[owner]:
                del self._making[owner]

    def info(self, named: NamedState) -> StateInfo:
        kept = named.standing.kept
        return StateInfo(
            id=named.id,
            owner=named.owner,
            tokens=named.standing.tokens,
            bytes=self._shape.bytes,
            tier="device" if kept.on_device else "host" if kept.on_host else "disk",
            fingerprint=self._shape.fingerprint,
            created=named.created,
            expires=named.expires,
            recent=list(named.standing.recent),
            busy=(named.owner, named.id) in self.claims,
            stored=bool(named.tag) if self._shelf is not None and self._disk_bytes else None,
        )

    def _is_alone(self) -> bool:
        if self._shelf is None:
            return True
        before, self._alone = self._alone, self._shelf.lock.alone
        if self._alone and not before:
            try:
                self._take_stock(self._shelf)
            except ConfigError as error:
                log.error("%s", error.message)
                self._alone = False  # for what is remembered; the next look tries again
        return self._alone

    def _look(self, owner: str, id: str) -> None:
        """Before what is remembered of a name is used: another engine may have changed it."""
        if self._shelf is None or self._is_alone() or self._changes((owner, id)):
            return
        file, named = self._file(owner, id), self._named.get((owner, id))
        tag = self._shelf.tag(file)
        if tag == (b"" if named is None else named.seen):
            return
        if tag:
            self._take_over(self._shelf, file)
        else:
            self._forget(owner, id)

    def _changes(self, key: Key) -> bool:
        """Its file is about to be written or deleted here."""
        if self._shelf is None:
            return False
        named = self._named.get(key)
        return (named is not None and named.writing) or self._shelf.changing(self._file(*key))

    def _take_stock(self, shelf: StateFileStore) -> None:
        """Of the shelf, where other engines may have written; other models' states are left
        alone."""
        known = {named.file: named for named in self._named.values() if named.file}
        behind = {self._file(*key): one.behind for key, one in self._named.items() if one.behind}
        for file, status in shelf.names(self._shape.fingerprint):
            named, tag = known.pop(file, None), tag_of(status)
            if tag != (behind.get(file) if named is None else named.tag):
                self._take_over(shelf, file)
        for named in known.values():
            if not self._changes((named.owner, named.id)):
                self._forget(named.owner, named.id)

    def _take_over(self, shelf: StateFileStore, file: str) -> None:
        """What a file says takes the place of what is remembered, as far as it is what an engine
        wrote."""
        try:
            content, status = shelf.look(file, self._shape.most_bytes + MORE_BYTES)
            found = parse(file, content, self._shape)
        except OSError as error:
            log.warning("%s: cannot be read, and is left alone: %s", file, error)
            return
        except EngineError as error:
            log.warning("%s: not taken over: %s", file, error.message)
            return
        owner, id, now = found.owner, found.id, self._clock()
        if self._changes((owner, id)):
            return
        written = min(status.st_mtime, now)
        named, expires = self._named.get((owner, id)), written + found.ttl
        if expires <= now:
            self._forget(owner, id)
            if self._alone:
                shelf.delete(file)
        elif named is not None and named.says(found.created, found.snapshot):
            named.tag, named.used = tag_of(status), written
            named.expires = max(named.expires, expires)
            self._expiry.put((owner, id), (named.expires, id, owner))
        else:
            self._forget(owner, id)
            read = found.snapshot.tokens - len(found.snapshot.tail) // ID_BYTES
            digest = found.snapshot.digest
            kept = CachedState(read, owner, files={file}, written={file}, digest=digest)
            standing = ResumePoint.of(self._tiers.hold(kept), found.snapshot)
            times = found.created, found.ttl, expires
            self._tiers.note_name(kept)
            self._add(NamedState(owner, id, standing, *times, file, tag_of(status), written))
            self.files += 1

    def _add(self, named: NamedState) -> None:
        """Its state is held and noted for it."""
        key = named.owner, named.id
        self._named[key] = named
        bisect.insort(self._ids.setdefault(named.owner, []), named.id)
        self._expiry.put(key, (named.expires, named.id, named.owner))

    def _place(self, storing: Storing) -> None:
        """The name has it from now on."""
        named, storing.placed = storing.named, True
        self._end(named.owner, named.id)
        self._forget(named.owner, named.id)
        self._add(named)

    def _forget(
        self, owner: str, id: str, for_good: bool = False, waiter: Waiter | None = None
    ) -> None:
        """`for_good`: with its file; `waiter` is told when there is none any more."""
        named = self._named.pop((owner, id), None)
        if named is None:
            if waiter is not None:
                self.waiters.tell(waiter, None)
            return
        kept = named.standing.kept
        self._expiry.discard((owner, id))
        ids = self._ids[owner]
        del ids[bisect.bisect_left(ids, id)]
        if not ids:
            del self._ids[owner]
        has_file = bool(named.file or named.behind) and self._shelf is not None
        if has_file:
            self.files -= 1
            self._tiers.note_lost(kept, named.file)
        if has_file and for_good and self._shelf is not None:
            self._delete(self._shelf, (owner, id), waiter)
        elif waiter is not None:
            self.waiters.tell(waiter, None)
        self._let_go(kept)

    def _let_go(self, kept: CachedState) -> None:
        """One name less has it."""
        self._tiers.note_name(kept, -1)
        self._tiers.release(kept)

    def _delete(self, shelf: StateFileStore, key: Key, waiter: Waiter | None = None) -> None:
        file = self._file(*key)

        def deleted(result: Result) -> None:
            error = None
            if not isinstance(result, bytes):
                self.store_errors += 1
                error = StateNotStored(
                    f"the state's file cannot be removed: {reason_of(result)}; what it has is kept"
                )
                if waiter is not None and key not in self.claims:
                    self._take_over(shelf, file)  # so that it can be tried again
            self.claims.settle(key)
            if waiter is not None:
                self.waiters.tell(waiter, error)

        shelf.delete(file, deleted)

    def _file(self, owner: str, id: str) -> str:
        return name_of(owner, id, self._shape)


def reason_of(error: OSError | EngineError) -> str:
    """Why the disk did not do it, in words."""
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
