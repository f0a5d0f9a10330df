"""NamedStates: states with a name (owner and id), their lifetime and their quota.

A name refers to a state that never changes, so forking a state just adds a name. With a file store
every named state is also written to a file, and the files found at the start become named states
again. Whoever stores a state is told when its file is written. Until then the name keeps its former
state. If the write fails, the former file stays, and with `must_last` so does the former state in
memory. Without `must_last` the new state is kept in memory only.

A state on its way to its file is a PendingStore:

| step | runs | next |
| --- | --- | --- |
| `store` | at once | `_export`; placed at once for a caller that does not wait |
| `_export` | at once | the next plan exports the state; no room on disk: `_fail` |
| `_on_exported` | when that plan has run | a worker thread writes; lost or replaced: `_fail` |
| `_on_written` | in `StateTransfer.collect` | `_finish`, or `_fail` |

Replacing a state locks its name from the beginning of the request until the file is written, for
other engines on the folder too. A turn that follows the answer thus continues from the new state,
whichever engine gets it; a turn that does not wait finds the state busy.

During a reload two engines use one folder, until the older one has finished its requests. In that
time the files are authoritative. Remembered names are valid only while their file is the one that
they were read from or written to, which every look-up checks by the file's tag. (If a state could
not be written, the former state's file stays and is known by its own tag.) Nothing expires on disk
meanwhile, since each engine knows only its own uses. An engine that is alone again compares the
folder with its names.

With a store that servers share (`shared.client`) it is so at all times. A name is then fetched
before a request uses it, `on_found` brings what is remembered up to date, and the store's lock is
held for as long as the name is locked here. What is remembered is a copy, which saves reading the
state again: it expires here and in the store by itself. A state that the store could not take is
kept in memory, with the tag of the version from which it went on. It counts until another server
stores a later one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterable, Mapping
from functools import partial

from msgspec.structs import replace

from engine.cache.cache_config import CacheConfig
from engine.cache.name_index import NameIndex
from engine.cache.name_locks import Key, NameLocks
from engine.cache.resume_point import NamedState, ResumePoint
from engine.cache.shared.client import Found, Want
from engine.cache.shared.store import ABSENT
from engine.cache.storage import snapshot
from engine.cache.storage.file_store import StateFileStore, Unsynced, tag_of
from engine.cache.storage.named_state_file import check_id, entries, parse
from engine.cache.storage.snapshot import Snapshot
from engine.cache.storage.state_store import StateStore
from engine.cache.storage.worker_threads import Result
from engine.cache.store_waiters import OnStored, PendingStore, StoreResult, StoreWaiters, Waiter
from engine.cache.tiered_store import CachedState, TieredStateStore
from engine.cache.transfer import MORE_BYTES, StateTransfer
from engine.errors import (
    ConfigError,
    EngineError,
    StateConflict,
    StateNotFound,
    StateNotStored,
    StateQuota,
    StepFailed,
    StoreUnavailable,
)
from engine.protocol.state_calls import StateInfo
from engine.protocol.token_ids import ID_BYTES

log = logging.getLogger(__name__)

MOST_PENDING = 1024  # most reads and writes that may wait for the disk
ASK_SECONDS = 1.0  # between two checks for other engines, each of which may ask another machine
SPARE_NAMES = 1024  # names without rows that are always remembered, with a shared store
USES_TOLD = 8  # how many times within its lifetime a used state's file time is updated


class NamedStates:
    """The named states of one engine; called by the engine's thread only.

    To store a state, call `reserve` and then either `store` or `cancel`.
    """

    def __init__(
        self,
        config: CacheConfig,
        tiers: TieredStateStore,
        transfer: StateTransfer,
        store: StateStore | None,
        clock: Callable[[], float],
    ) -> None:
        """Load the names from `store`, if it is a folder.

        `clock` returns the time of day in seconds. Raises ConfigError if the folder cannot be
        listed.
        """
        self._config = config
        self._layout = config.layout
        self._tiers = tiers
        self._transfer = transfer
        self._store = store
        # The same, if it is a folder, whose files other engines change only during a reload.
        self._file_store = store if isinstance(store, StateFileStore) else None
        self._clock = clock
        self._index = NameIndex()
        self.locks = NameLocks(store, self._is_changing)
        self.waiters = StoreWaiters()
        self.store_errors = 0  # files that could not be written or removed
        self.files = 0  # number of files of named states
        # Names that a fetch has found and that its request has not used yet. None of them may be
        # forgotten now: the request would begin a new text in the place of what the store has.
        self.found: set[Key] = set()
        self._new: set[Key] = set()  # reserved names that did not exist
        self._new_of: dict[str, int] = {}  # number of these, by owner
        self._alone = store is None or not store.shared  # nobody else did at the last check
        self._asked = clock()
        if self._file_store is not None:
            self._alone = self._file_store.alone
            self._reconcile(self._file_store)

    def __len__(self) -> int:
        return len(self._index)

    # Look-ups.

    def get(self, owner: str, id: str, param: str = "id") -> NamedState:
        """Return a named state and restart its lifetime.

        Raises StateNotFound, which names `param` as the wrong parameter.
        """
        self._refresh((owner, id))
        named = self._index.get((owner, id))
        if named is None:
            raise StateNotFound(f"there is no state {id!r}", param=param)
        now = self._clock()
        self._index.set_expiry(named, now + named.ttl)
        self._note_use(named, now)
        self._tiers.touch(named.point.state)
        return named

    def has(self, owner: str, id: str) -> bool:
        """Return whether the name exists, without restarting its lifetime."""
        self._refresh((owner, id))
        return (owner, id) in self._index

    def resume_point(self, owner: str, id: str, optional: bool) -> ResumePoint | None:
        """Return the state from which a request continues, or None for a new text.

        None if there is no `id`, or if the state is `optional` and does not exist. Raises
        StateNotFound; and StoreUnavailable rather than let a new text replace one that exists.
        """
        if not id:
            return None
        if optional and not self.has(owner, id):
            if (
                self._store is not None
                and self._store.shared
                and self._store.tag(self._file((owner, id)))
            ):
                raise StoreUnavailable(
                    f"state {id!r} was forgotten here after the state store had been asked for it"
                )
            return None
        return self.get(owner, id, "state").point

    def list_states(self, owner: str, after: str, limit: int) -> tuple[list[StateInfo], bool]:
        """Return up to `limit` states with ids after `after`, in order, and whether more follow."""
        if self._file_store is not None and not self._is_alone():
            self._reconcile(self._file_store)
        chosen, more = self._index.after(owner, after, limit)
        return [self.info(named) for named in chosen], more

    def info(self, named: NamedState) -> StateInfo:
        """Return the description of a named state for clients."""
        state = named.point.state
        return StateInfo(
            id=named.id,
            owner=named.owner,
            tokens=named.point.tokens,
            bytes=self._layout.bytes,
            tier="device" if state.on_device else "host" if state.on_host else "disk",
            fingerprint=self._layout.fingerprint,
            created=named.created,
            expires=named.expires,
            recent=list(named.point.recent),
            busy=named.key in self.locks,
            stored=bool(named.tag) if self._writes_files else None,
            turns=named.point.turns,
        )

    def check_quota(self, owner: str, id: str) -> None:
        """Raise StateQuota if `id` would be a new state and the owner's share of rows is full."""
        if (owner, id) not in self._index and not self._tiers.has_quota(owner):
            raise StateQuota(
                "the states of one key may not use all memory; delete some, or wait for others"
            )

    # Storing, deleting, moving.

    def reserve(self, owner: str, id: str, param: str, leaving: int = 0) -> str:
        """Reserve a name for a request or a call that is going to store a state.

        Args:
            owner: the state's owner.
            id: the name; "": a new one.
            param: the parameter that errors name.
            leaving: how many other names of the owner are about to be removed.

        Returns:
            The id. Nobody else can store under it until `store` is done, or `cancel` was called.

        Raises:
            InvalidRequest, StateBusy or StateQuota.
        """
        if id:
            check_id(param, id)
        else:
            id = self._config.placement.new_id(owner)
        key, most = (owner, id), self._config.most_states
        self.locks.acquire(key, param)
        self._refresh(key)
        if key not in self._index:
            count = self._index.count(owner) + self._new_of.get(owner, 0)
            # what a shared store has was counted there
            if count >= most + leaving and not self._is_shared:
                self.locks.release_if_idle(key)
                raise StateQuota(f"{count} states are kept already; allowed: up to {most}")
            self._new_of[owner] = self._new_of.get(owner, 0) + 1
            self._new.add(key)
        self.locks.reserve(key)
        return id

    def cancel(self, owner: str, id: str) -> None:
        """Give up a name from `reserve` without storing a state."""
        self._unreserve((owner, id))
        self.locks.release_if_idle((owner, id))

    def store(
        self,
        owner: str,
        id: str,
        point: ResumePoint,
        ttl: float | None,
        then: OnStored,
        *,
        must_last: bool = False,
        wait: bool = True,
        key: Hashable = None,
        due: float | None = None,
    ) -> None:
        """Store a state that is in a row under a reserved name, replacing what had the name.

        Args:
            owner, id: the reserved name.
            point: the state.
            ttl: lifetime in seconds; None: the configured one.
            then: called once: with the state's description when its file is written or could not be
                (without a file store at once); with StepFailed if the state was lost.
            must_last: if the file cannot be written, call `then` with StateNotStored instead and
                leave the name as it was.
            wait: False: call `then` at once, unless other engines use the folder; in a shared store
                the state is then never written.
            key, due: the Waiter's, for `stop_waiting`.
        """
        now, ttl = self._clock(), self._config.ttl if ttl is None else ttl
        named = NamedState(owner, id, point, now, ttl, now + ttl)
        self._tiers.add_name(point.state)
        pending = PendingStore(then, key, due, named=named, must_last=must_last)
        store = self._store
        if store is None or not self._writes_files:
            self._place(pending)
            if store is not None:  # a file of a former state, from when files were written
                self._delete_file(store, named.key)
            then(self.info(named))
            return
        if not wait and (store.shared or store.alone):
            named.brief = store.shared  # nobody else will use it
            self._place(pending)
            then(self.info(named))
            if named.brief:
                return
        else:
            self.waiters.add(pending)
        self._export(pending, store)

    def stop_waiting(self, waiters: list[Waiter], why: str) -> None:
        """Report to these waiters that the outcome is unknown; the disk operations continue."""
        for waiter in waiters:
            if not isinstance(waiter, PendingStore):
                self.waiters.tell(
                    waiter, StateNotStored(f"the state's file may still exist: {why}")
                )
                continue
            if waiter.must_last:
                self.waiters.tell(
                    waiter,
                    StateNotStored(f"the state is not stored yet: {why}; its write continues"),
                )
                continue
            if not waiter.placed:
                self._place(waiter)
            self.waiters.tell(waiter, self.info(waiter.named))

    def move(self, named: NamedState, target: str, ttl: float | None, then: OnStored) -> None:
        """Store the same state under another id ("": a new one), and remove this name.

        `then` is called as by `store` with `must_last`, once this name's file is removed too.
        Raises as `reserve` and `delete` do.
        """
        owner, id = named.key
        self.locks.acquire((owner, id), "id")
        try:
            target = self.reserve(owner, target, "target", leaving=1)
        except EngineError:
            self.locks.release_if_idle((owner, id))
            raise
        if target == id:
            on_stored = then
        else:
            self.locks.reserve((owner, id))  # so that nothing replaces it meanwhile
            on_stored = partial(self._on_moved, (owner, id), then)
        self.store(owner, target, named.point, ttl, on_stored, must_last=True)

    def _on_moved(self, former: Key, then: OnStored, result: StoreResult) -> None:
        self.locks.unreserve(former)
        if isinstance(result, StateInfo):
            # The move succeeds even if the former file cannot be removed.
            waiter = Waiter(lambda _: then(result))
            self.waiters.add(waiter)
            self._remove(former, with_file=True, waiter=waiter)
        self.locks.release_if_idle(former)
        if not isinstance(result, StateInfo):
            then(result)

    def delete(self, owner: str, id: str, then: OnStored) -> None:
        """Remove a name and its file.

        `then` is called with None when the file is removed, if there is one, or with StateNotStored
        if it cannot be. Raises StateNotFound, or StateBusy while a request is going to replace the
        state.
        """
        if not self.has(owner, id):
            raise StateNotFound(f"there is no state {id!r}", param="id")
        self.locks.acquire((owner, id), "id")
        waiter = Waiter(then)
        self.waiters.add(waiter)
        self._remove((owner, id), with_file=True, waiter=waiter)
        self.locks.release_if_idle((owner, id))

    def remove_lost(self, lost: set[CachedState]) -> None:
        """Remove the names of states that were lost."""
        for named in [one for one in self._index.all() if one.point.state in lost]:
            self._remove(named.key, with_file=not self._is_shared)

    def expire(self) -> None:
        """Remove expired states, except those that a request is about to replace."""
        now = self._clock()
        due = self._index.has_expired(now)
        if due or not self._alone or abs(now - self._asked) > ASK_SECONDS:
            self._asked = now
            self._is_alone()
        for named in self._index.take_expired(now):
            if named.key in self.locks or named.key in self.found:
                self._index.set_expiry(named, now + named.ttl)
            else:
                self._remove(named.key, with_file=self._alone)

    # The steps of a pending store, in the order in which they run.

    def _export(self, pending: PendingStore, store: StateStore) -> None:
        named = pending.named
        former = self._index.get(named.key)
        replaces = former is not None and bool(former.file or former.former_tag)
        needed = (self.files + 1 - replaces) * self._layout.most_bytes
        if needed > self._config.disk_bytes and not store.shared:
            log.warning("disk_state_bytes are used up: state %r is not written", named.id)
            self._fail(pending, store, "disk_state_bytes are used up")
            return
        named.file, named.writing = self._file(named.key), True
        self.files += 1
        then = partial(self._on_exported, pending, store)
        self._transfer.export(named.point.state, then)

    def _on_exported(self, pending: PendingStore, store: StateStore, content: bytes | None) -> None:
        named = pending.named
        if self._is_gone(pending):
            self._fail(pending, store, "it has been replaced or deleted")
            return
        if content is None:
            self._fail(pending, store, "the round that exported it failed")
            return
        if store.pending >= MOST_PENDING:
            log.warning("the state store is too slow: state %r is not written", named.id)
            self._fail(pending, store, "too many writes are waiting for the state store")
            return
        serialize = partial(self._serialize, pending, content)
        done = partial(self._on_written, pending, store)
        store.write(named.file, serialize, done, lasting=True)

    def _serialize(self, pending: PendingStore, content: bytes) -> bytes:
        """Make the file's content, on a worker thread."""
        named = pending.named
        assert self._store is not None
        owner = self._store.owner_in_file(named.owner, named.id)
        extra = entries(owner, named.id, named.ttl, named.created)
        found = named.point.snapshot(content, extra)
        pending.digest = found.digest
        return snapshot.write(found, self._layout)

    def _on_written(self, pending: PendingStore, store: StateStore, result: Result) -> None:
        if isinstance(result, bytes | Unsynced):
            self._finish(pending, result)
        elif isinstance(result, StateConflict):
            self._lose(pending, result)
        else:
            self._fail(pending, store, reason_of(result))

    def _finish(self, pending: PendingStore, result: bytes | Unsynced) -> None:
        """Complete a store whose file was written; it may have been replaced since."""
        named = pending.named
        if not self._is_gone(pending):
            named.tag = result.tag if isinstance(result, Unsynced) else result
            named.writing, named.used = False, named.created
            if not pending.placed:
                self._place(pending)
            self._tiers.mark_written(named.point.state, named.file, pending.digest)
        self.locks.release_if_idle(named.key)
        if isinstance(result, Unsynced):
            self.store_errors += 1
            why = f"{reason_of(result)}; it is kept, but may be lost in a power failure"
            self._tell_failure(pending, why)
        else:
            self.waiters.tell(pending, replace(self.info(named), stored=True))

    def _lose(self, pending: PendingStore, error: StateConflict) -> None:
        """Complete a store that another server has overtaken; what it has stored counts."""
        named = pending.named
        if not pending.placed:
            self._unreserve(named.key)
            self._tiers.remove_name(named.point.state)
            self.files -= bool(named.file)
        elif not self._is_gone(pending):
            self._remove(named.key)
        self.store_errors += 1
        self.locks.release_if_idle(named.key)
        self.waiters.tell(pending, error)

    def _fail(self, pending: PendingStore, store: StateStore, reason: str) -> None:
        """Complete a store whose file could not be written."""
        named = pending.named
        state, key = named.point.state, named.key
        lost = not (state.has_row or state.written)
        gone = self._is_gone(pending)
        if not gone:
            self.store_errors += not lost
            self.files -= bool(named.file)
            named.file, named.writing = "", False
        if lost or (pending.must_last and not pending.placed):
            if not pending.placed:
                self._unreserve(key)
                self._tiers.remove_name(state)
        elif not gone:
            if not pending.placed:
                self._place(pending)
            named.former_tag = store.tag(self._file(key))
            self.files += bool(named.former_tag)
        self.locks.release_if_idle(key)
        if lost:
            self.waiters.tell(pending, StepFailed("the state to be kept was lost"))
            return
        stays = "the former state of its id stays" if key in self._index else ""
        self._tell_failure(pending, f"{reason}; {stays or 'nothing is kept'}")

    def _tell_failure(self, pending: PendingStore, why: str) -> None:
        if pending.must_last:
            self.waiters.tell(pending, StateNotStored(f"the state could not be stored: {why}"))
        else:
            self.waiters.tell(pending, replace(self.info(pending.named), stored=False))

    def _is_gone(self, pending: PendingStore) -> bool:
        """Return whether the name had this state, but has another one or none now."""
        return pending.placed and self._index.get(pending.named.key) is not pending.named

    def _place(self, pending: PendingStore) -> None:
        """Let the name refer to this state from now on."""
        named, pending.placed = pending.named, True
        self._unreserve(named.key)
        self._remove(named.key)
        self._index.add(named)

    # Names and their files.

    @property
    def _writes_files(self) -> bool:
        return self._store is not None and (self._store.shared or self._config.disk_bytes > 0)

    @property
    def _is_shared(self) -> bool:
        return self._store is not None and self._store.shared

    def _unreserve(self, key: Key) -> None:
        owner, _ = key
        self.locks.unreserve(key)
        if key in self._new:
            self._new.remove(key)
            self._new_of[owner] -= 1
            if not self._new_of[owner]:
                del self._new_of[owner]

    def _remove(self, key: Key, with_file: bool = False, waiter: Waiter | None = None) -> None:
        """Remove a name if it exists; tell `waiter` when its file is removed."""
        named = self._index.remove(key)
        if named is None:
            if waiter is not None:
                self.waiters.tell(waiter, None)
            return
        state = named.point.state
        has_file = bool(named.file or named.former_tag) and self._store is not None
        if has_file:
            self.files -= 1
            self._tiers.remove_file(state, named.file)
        if has_file and with_file and self._store is not None:
            self._delete_file(self._store, key, waiter)
        elif waiter is not None:
            self.waiters.tell(waiter, None)
        self._tiers.remove_name(state)

    def _delete_file(self, store: StateStore, key: Key, waiter: Waiter | None = None) -> None:
        store.delete(self._file(key), partial(self._on_deleted, key, waiter))

    def _on_deleted(self, key: Key, waiter: Waiter | None, result: Result) -> None:
        error = None
        if not isinstance(result, bytes):
            self.store_errors += 1
            error = StateNotStored(
                f"the state's file cannot be removed: {reason_of(result)}; the state is kept"
            )
            if waiter is not None and key not in self.locks and self._file_store is not None:
                self._adopt(
                    self._file_store, self._file(key)
                )  # so that deleting can be tried again
        self.locks.release_if_idle(key)
        if waiter is not None:
            self.waiters.tell(waiter, error)

    def _note_use(self, named: NamedState, now: float) -> None:
        """Update the file's time, from which an engine that adopts it computes the expiry."""
        part = named.ttl / USES_TOLD
        folder = self._file_store
        if folder is None or not named.tag or named.writing or now < named.used + part:
            return
        named.used = now
        folder.touch(named.file, named.tag, now, partial(self._on_touched, named, named.tag))

    @staticmethod
    def _on_touched(named: NamedState, before: bytes, result: Result) -> None:
        if named.tag == before and isinstance(result, bytes):
            named.tag = result

    def _file(self, key: Key) -> str:
        assert self._store is not None
        return self._store.file_of(*key)

    def _is_changing(self, key: Key) -> bool:
        """Return whether this engine is about to write or delete the name's file."""
        if self._store is None:
            return False
        named = self._index.get(key)
        return (named is not None and named.writing) or self._store.changing(self._file(key))

    # Changes by other engines in the folder.

    def _is_alone(self) -> bool:
        if self._file_store is None:
            return not self._is_shared
        before, self._alone = self._alone, self._file_store.alone
        if self._alone and not before:
            try:
                self._reconcile(self._file_store)
            except ConfigError as error:
                log.error("%s", error.message)
                self._alone = False  # remembered names may be outdated; the next check tries again
        return self._alone

    def _refresh(self, key: Key) -> None:
        """Update a name before it is used, because another engine may have changed its file."""
        folder = self._file_store
        if folder is None or self._is_alone() or self._is_changing(key):
            return
        file, named = self._file(key), self._index.get(key)
        tag = folder.tag(file)
        if tag == (b"" if named is None else named.known_tag):
            return
        if tag:
            self._adopt(folder, file)
        else:
            self._remove(key)

    # Changes by other servers in a shared store.

    def wants(self, owner: str, locks: Mapping[str, bool]) -> list[Want]:
        """Return what to fetch of these ids, each with whether to lock it."""
        wants = []
        for id, lock in locks.items():
            named = self._index.get((owner, id))
            there = named is not None and named.point.state.has_row
            known = named.known_tag.decode() if named is not None and there else ABSENT
            wants.append(Want((owner, id), lock, known))
        return wants

    def forget_unstored(self, owner: str, id: str, turn: int) -> None:
        """Forget a state that the store could not take if it has had this turn.

        The turn is asked for again, so it is carried out again, from what the store has. To answer
        that it was done before would promise what only this server's memory holds.
        """
        key = (owner, id)
        named = self._index.get(key)
        if named is None or named.tag or named.brief or named.point.turns < turn:
            return
        if not (key in self.locks or key in self.found or self._is_changing(key)):
            self._remove(key)

    def release_locks(self, owner: str, ids: Iterable[str]) -> None:
        """Give back the locks of these ids that a fetch has taken and that nobody needs."""
        for id in ids:
            self.locks.release_if_idle((owner, id))

    def with_tier(self, info: StateInfo) -> StateInfo:
        """Return a description from the store with what this engine knows of the state."""
        named = self._index.get((info.owner, info.id))
        if named is None:
            return info
        tier = self.info(named).tier if named.point.state.has_row else info.tier
        return replace(info, tier=tier, busy=named.key in self.locks)

    def on_found(self, key: Key, found: Found) -> bool:
        """Bring a name up to date with what a shared store has.

        Returns False if that needs the content, which was not asked for.
        """
        self.found.add(key)
        if self._is_changing(key):  # by this engine, which knows better
            return True
        named, tag = self._index.get(key), found.generation.encode()
        if tag == (b"" if named is None else named.known_tag):
            if named is not None and found.snapshot is not None:
                self._bring(named.point.state, found.snapshot)
            return True
        self._remove(key)
        content, (owner, id) = found.snapshot, key
        if content is None:
            return found.generation == ABSENT
        file = self._file(key)
        read = content.tokens - len(content.tail) // ID_BYTES
        state = CachedState(read, owner, files={file}, written={file}, digest=content.digest)
        self._tiers.add_name(state)
        point, expires = ResumePoint.of(state, content), self._clock() + found.ttl
        self._index.add(NamedState(owner, id, point, found.created, found.ttl, expires, file, tag))
        self.files += 1
        self._bring(state, content)
        if len(self._index) > 2 * self._tiers.rows + SPARE_NAMES:
            self._forget_rowless()
        return True

    def _bring(self, state: CachedState, content: Snapshot) -> None:
        """Put a state from the store into a row, if there is one; else it is read again later."""
        if not state.has_row and state.digest == content.digest:
            self._transfer.import_state(state, content.state)

    def _forget_rowless(self) -> None:
        """Forget the names whose states are in the shared store alone."""
        for named in [one for one in self._index.all() if not one.point.state.has_row]:
            if named.key not in self.found and not self._is_changing(named.key):
                self._remove(named.key)

    # Files of other engines in the folder.

    def _reconcile(self, file_store: StateFileStore) -> None:
        """Compare the folder with the names, because other engines may have written.

        States of other models are left alone. Raises ConfigError.
        """
        known = {named.file: named for named in self._index.all() if named.file}
        former = {
            self._file(one.key): one.former_tag for one in self._index.all() if one.former_tag
        }
        for file, status in file_store.list_files(self._layout.fingerprint):
            named, tag = known.pop(file, None), tag_of(status)
            if tag != (former.get(file) if named is None else named.tag):
                self._adopt(file_store, file)
        for named in known.values():
            if not self._is_changing(named.key):
                self._remove(named.key)

    def _adopt(self, file_store: StateFileStore, file: str) -> None:
        """Replace what is remembered by what a file says, if it is a valid state file."""
        try:
            content, status = file_store.read_now(file, self._layout.most_bytes + MORE_BYTES)
            found = parse(file, content, self._layout)
        except OSError as error:
            log.warning("%s: cannot be read and is left alone: %s", file, error)
            return
        except EngineError as error:
            log.warning("%s: not adopted, and left alone: %s", file, error.message)
            return
        key, now = (found.owner, found.id), self._clock()
        if self._is_changing(key):
            return
        written = min(status.st_mtime, now)
        named, expires = self._index.get(key), written + found.ttl
        if expires <= now:
            self._remove(key)
            if self._alone:
                file_store.delete(file)
        elif named is not None and named.is_of(found.created, found.snapshot):
            named.tag, named.used = tag_of(status), written
            self._index.set_expiry(named, max(named.expires, expires))
        else:
            self._remove(key)
            read = found.snapshot.tokens - len(found.snapshot.tail) // ID_BYTES
            digest = found.snapshot.digest
            state = CachedState(read, found.owner, files={file}, written={file}, digest=digest)
            self._tiers.add_name(state)
            point, times = ResumePoint.of(state, found.snapshot), (found.created, found.ttl)
            tag = tag_of(status)
            self._index.add(NamedState(*key, point, *times, expires, file, tag, written))
            self.files += 1


def reason_of(error: OSError | EngineError) -> str:
    """Return the reason for a failed disk operation, in words."""
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
