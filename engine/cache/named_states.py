"""NamedStates: the kept states that have a name, by owner and id; how long they stay, how many may.

A name refers to a state that never changes, so to fork one is to name it once more. With a shelf
every named state is written to a file too, and what lies there at the start is there again. Who
put a state there is told when that is done, and until then the name has the former one, which a
write that fails leaves as it was: on disk always, and in memory for who asked for a state that is
to last (`must`). Else the new one is kept in memory alone.

Who replaces a state has its name locked, for other engines that use the folder too (`state_names`),
from the beginning of the turn until the file is there: so a turn that follows the answer goes on
from it, whichever engine that comes to, and one that does not wait finds the state busy. Nothing
expires on disk while there are others, since each engine knows of its own uses alone.
"""

from __future__ import annotations

import bisect
import logging
from collections.abc import Callable, Hashable

from msgspec.structs import replace

from engine.cache.name_locks import Key
from engine.cache.resume_point import NamedState, ResumePoint
from engine.cache.state_names import StateNames, reason_of
from engine.cache.storage import snapshot
from engine.cache.storage.file_store import StateFileStore, Unsynced
from engine.cache.storage.named_state_file import check_id, entries
from engine.cache.storage.snapshot import StateLayout
from engine.cache.storage.worker_threads import Result
from engine.cache.store_waiters import Storing, Then, Told, Waiter
from engine.cache.tiered_store import CachedState, TieredStateStore
from engine.errors import EngineError, StateNotFound, StateNotStored, StateQuota, StepFailed
from engine.protocol.state_calls import StateInfo

log = logging.getLogger(__name__)

MOST_PENDING = 1024  # reads and writes that wait for the disk
ASK_SECONDS = 1.0  # between looks for other engines, which may mean to ask another machine
USES_TOLD = 8  # times within a state's ttl at which a file's time follows its uses


class NamedStates(StateNames):
    """`fetch` gets the bytes of a state in a row, some rounds later; `clock` is the time of day."""

    def __init__(
        self,
        tiers: TieredStateStore,
        shape: StateLayout,
        *,
        ttl: float,
        most: int,
        shelf: StateFileStore | None,
        disk_bytes: int,
        fetch: Callable[[CachedState, Callable[[bytes | None], None]], None],
        clock: Callable[[], float],
        new_id: Callable[[str], str],  # of the owner's
    ) -> None:
        super().__init__(tiers, shape, shelf, disk_bytes, clock)
        self._ttl = ttl
        self._most = most
        self._fetch = fetch
        self._new_id = new_id
        self._asked = clock()

    def find(self, owner: str, id: str, param: str = "id") -> NamedState:
        """Raises StateNotFound; the state's time begins anew."""
        self._look(owner, id)
        named = self._named.get((owner, id))
        if named is None:
            raise StateNotFound(f"there is no state {id!r}", param=param)
        now = self._clock()
        named.expires = now + named.ttl
        self._expiry.put((owner, id), (named.expires, id, owner))
        self._note_use(named, now)
        self._tiers.touch(named.standing.kept)
        return named

    def _note_use(self, named: NamedState, now: float) -> None:
        """The file's time tells an engine that takes it over how long the state stays."""
        part = named.ttl / USES_TOLD
        if self._shelf is None or not named.tag or named.writing or now < named.used + part:
            return
        before, named.used = named.tag, now

        def touched(result: Result) -> None:
            if named.tag == before and isinstance(result, bytes):
                named.tag = result

        self._shelf.touch(named.file, before, now, touched)

    def has(self, owner: str, id: str) -> bool:
        self._look(owner, id)
        return (owner, id) in self._named

    def source(self, owner: str, id: str, optional: bool) -> ResumePoint | None:
        """Of a request that goes on from it; None where it is `optional`, or no id, and is not
        there. Raises StateNotFound."""
        if not id or (optional and not self.has(owner, id)):
            return None
        return self.find(owner, id, "state").standing

    def check_part(self, owner: str, id: str) -> None:
        """Raises StateQuota where the owner has no part in memory left for a state of this id."""
        if (owner, id) not in self._named and not self._tiers.has_part(owner):
            raise StateQuota(
                "the states of one key may not take all memory; delete some, or wait for others"
            )

    def begin(self, owner: str, id: str, param: str, leaving: int = 0) -> str:
        """A request, or a call, will put a state under this id, or a new one: the id, which is its
        own until `end`. So many others of the owner's are about to go. Raises InvalidRequest,
        StateBusy or StateQuota."""
        if id:
            check_id(param, id)
        else:
            id = self._new_id(owner)
        key = owner, id
        self.claims.take(key, param)
        self._look(owner, id)
        if key not in self._named:
            count = len(self._ids.get(owner, ())) + self._making.get(owner, 0)
            if count >= self._most + leaving:
                self.claims.settle(key)
                raise StateQuota(f"{count} states are kept already; allowed: up to {self._most}")
            self._making[owner] = self._making.get(owner, 0) + 1
            self._new.add(key)
        self.claims.hold(key)
        return id

    def end(self, owner: str, id: str) -> None:
        """What `begin` began is over, and nothing was put there."""
        self._end(owner, id)
        self.claims.settle((owner, id))

    def put(
        self,
        owner: str,
        id: str,
        standing: ResumePoint,
        ttl: float | None,
        then: Then,
        *,
        must: bool = False,
        wait: bool = True,
        key: Hashable = None,
        due: float | None = None,
    ) -> None:
        """Names a state, which is held by one more from then on, in the place of what had the
        name; `begin` was called for that before. `then` is called with what is to be told of it,
        once its file is there or could not be written, where there is a shelf; with `must` with
        StateNotStored in that case, and the name is as it was; with StepFailed where the state is
        lost. Without `wait` it is called at once, unless other engines use the folder. `key` and
        `due` as of a Waiter."""
        now, ttl = self._clock(), self._ttl if ttl is None else ttl
        named = NamedState(owner, id, standing, now, ttl, now + ttl)
        self._tiers.hold(standing.kept)
        self._tiers.note_name(standing.kept)
        storing = Storing(then, key, due, named=named, must=must)
        if self._shelf is None or not self._disk_bytes:
            self._place(storing)
            if self._shelf is not None:  # of former days
                self._delete(self._shelf, (owner, id))
            then(self.info(named))
            return
        if not wait and self._shelf.lock.alone:
            self._place(storing)
            then(self.info(named))
        else:
            self.waiters.add(storing)
        self._write(storing, self._shelf)

    def give_up(self, waiters: list[Waiter], why: str) -> None:
        """These wait no longer for their files; the disk does what it has to all the same."""
        for waiter in waiters:
            if not isinstance(waiter, Storing):
                self.waiters.tell(
                    waiter, StateNotStored(f"the state's file may be there yet: {why}")
                )
                continue
            if waiter.must:
                self.waiters.tell(
                    waiter,
                    StateNotStored(f"the state is not stored yet: {why}; it is kept if it will be"),
                )
                continue
            if not waiter.placed:
                self._place(waiter)
            self.waiters.tell(waiter, self.info(waiter.named))

    def move(self, named: NamedState, target: str, ttl: float | None, then: Then) -> None:
        """The same state under another id (or a new one), in the place of this one; `then` as of
        `put` with `must`, once this one's file is gone too. Raises as `begin` and `delete`."""
        owner, id = named.owner, named.id
        self.claims.take((owner, id), "id")
        try:
            target = self.begin(owner, target, "target", leaving=1)
        except EngineError:
            self.claims.settle((owner, id))
            raise
        if target != id:
            self.claims.hold((owner, id))  # nothing takes its place meanwhile

        def moved(told: Told) -> None:
            if target == id:
                then(told)
                return
            self.claims.let_go((owner, id))
            if isinstance(told, StateInfo):
                # Where the former file cannot be removed, the state has moved all the same.
                waiter = Waiter(lambda _: then(told))
                self.waiters.add(waiter)
                self._forget(owner, id, for_good=True, waiter=waiter)
            self.claims.settle((owner, id))
            if not isinstance(told, StateInfo):
                then(told)

        self.put(owner, target, named.standing, ttl, moved, must=True)

    def delete(self, owner: str, id: str, then: Then) -> None:
        """`then` is called when its file is gone, if it has one, or with StateNotStored where that
        cannot be removed. Raises StateNotFound, or StateBusy while a request will take its
        place."""
        if not self.has(owner, id):
            raise StateNotFound(f"there is no state {id!r}", param="id")
        self.claims.take((owner, id), "id")
        waiter = Waiter(then)
        self.waiters.add(waiter)
        self._forget(owner, id, for_good=True, waiter=waiter)
        self.claims.settle((owner, id))

    def drop(self, kept: set[CachedState]) -> None:
        """These are lost, and all that their names stood for."""
        for named in [one for one in self._named.values() if one.standing.kept in kept]:
            self._forget(named.owner, named.id, for_good=True)

    def listed(self, owner: str, after: str, limit: int) -> tuple[list[StateInfo], bool]:
        """Up to `limit` states after an id, in order, and whether there are more."""
        if self._shelf is not None and not self._is_alone():
            self._take_stock(self._shelf)
        ids = self._ids.get(owner, [])
        first = bisect.bisect_right(ids, after)
        chosen = [self._named[owner, id] for id in ids[first : first + limit]]
        return [self.info(named) for named in chosen], first + limit < len(ids)

    def expire(self) -> None:
        """Forgets those whose time is over and which nobody is about to replace."""
        now, first = self._clock(), self._expiry.first()
        due = first is not None and self._named[first].expires <= now
        if due or not self._alone or abs(now - self._asked) > ASK_SECONDS:
            self._asked = now
            self._is_alone()
        late: list[Key] = []
        while (key := self._expiry.first()) is not None and self._named[key].expires <= now:
            self._expiry.discard(key)
            late.append(key)
        for key in late:
            if key in self.claims:
                named = self._named[key]
                named.expires = now + named.ttl
                self._expiry.put(key, (named.expires, named.id, named.owner))
            else:
                self._forget(*key, for_good=self._alone)

    def _write(self, storing: Storing, shelf: StateFileStore) -> None:
        named = storing.named
        kept, standing, key = named.standing.kept, named.standing, (named.owner, named.id)
        file, former = self._file(*key), self._named.get(key)
        replaces = former is not None and bool(former.file or former.behind)
        if (self.files + 1 - replaces) * self._shape.most_bytes > self._disk_bytes:
            log.warning("disk_state_bytes are used up: state %r is not stored", named.id)
            self._fail(storing, shelf, "disk_state_bytes are used up")
            return
        named.file, named.writing = file, True
        self.files += 1
        extra = entries(named.owner, named.id, named.ttl, named.created)
        digests: list[bytes] = []

        def written(result: Result) -> None:
            if isinstance(result, bytes | Unsynced):
                self._stored(storing, digests[0], result)
            else:
                self._fail(storing, shelf, reason_of(result))

        def fetched(state: bytes | None) -> None:
            if self._is_gone(storing):
                self._fail(storing, shelf, "it has been replaced or deleted")
                return
            if state is None:
                self._fail(storing, shelf, "the round that was to export it failed")
                return
            if shelf.pending >= MOST_PENDING:
                log.warning("the disk is too slow: state %r is not stored", named.id)
                self._fail(storing, shelf, "too much waits for the disk")
                return
            given = standing.snapshot(state, extra)

            def content() -> bytes:
                digests.append(given.digest)
                return snapshot.write(given, self._shape)

            shelf.write(file, content, written, lasting=True)

        self._fetch(kept, fetched)

    def _is_gone(self, storing: Storing) -> bool:
        """Its name had it, and has another state or none."""
        named = storing.named
        return storing.placed and self._named.get((named.owner, named.id)) is not named

    def _stored(self, storing: Storing, digest: bytes, result: bytes | Unsynced) -> None:
        """Its file is there, or was, where something has taken its place since."""
        named = storing.named
        kept, file = named.standing.kept, named.file
        if not self._is_gone(storing):
            named.tag = result.tag if isinstance(result, Unsynced) else result
            named.writing, named.used, kept.digest = False, named.created, digest
            if not storing.placed:
                self._place(storing)
            kept.files |= {file}
            self._tiers.note_written(kept, file)
        self.claims.settle((named.owner, named.id))
        if isinstance(result, Unsynced):
            self.store_errors += 1
            why = f"{reason_of(result)}; it is kept, but a loss of power may cost it"
            self._tell_failure(storing, why)
        else:
            self.waiters.tell(storing, replace(self.info(named), stored=True))

    def _fail(self, storing: Storing, shelf: StateFileStore, reason: str) -> None:
        """It could not be stored."""
        named = storing.named
        kept, key = named.standing.kept, (named.owner, named.id)
        lost = not (kept.has_row or kept.written)
        gone = self._is_gone(storing)
        if not gone:
            self.store_errors += not lost
            self.files -= bool(named.file)
            named.file, named.writing = "", False
        if lost or (storing.must and not storing.placed):
            if not storing.placed:
                self._end(*key)
                self._let_go(kept)
        elif not gone:
            if not storing.placed:
                self._place(storing)
            named.behind = shelf.tag(self._file(*key))
            self.files += bool(named.behind)
        self.claims.settle(key)
        if lost:
            self.waiters.tell(storing, StepFailed("the state that was to be kept is lost"))
            return
        stays = "what was kept under its id before stays" if key in self._named else ""
        self._tell_failure(storing, f"{reason}; {stays or 'nothing is kept'}")

    def _tell_failure(self, storing: Storing, why: str) -> None:
        if storing.must:
            self.waiters.tell(storing, StateNotStored(f"the state could not be stored: {why}"))
        else:
            self.waiters.tell(storing, replace(self.info(storing.named), stored=False))
