"""States: the kept states that have a name, by owner and id; how long they stay, how many may.

A name refers to a state that never changes, so to fork one is to name it once more. With a shelf
every named state is written to a file too, and what lies there at the start is there again. Who
put a state there is told when that is done, and until then the name has the former one, which a
write that fails leaves as it was: on disk always, and in memory for who asked for a state that is
to last (`must`). Else the new one is kept in memory alone.

A reload makes two engines use one folder, until the older one has finished what it has. Then a file
is the truth, and what is remembered holds only as long as the file is the one that it was read from
or written to, which each look at a name asks first. Who replaces a state has its name locked, from
the beginning of the turn until the file is there: so a turn that follows the answer goes on from
it, whichever engine that comes to, and one that does not wait finds the state busy. Nothing
expires on disk meanwhile, since each engine knows of its own uses alone. What is left when one is
alone again is taken stock of.
"""

from __future__ import annotations

import bisect
import logging
from collections.abc import Callable, Hashable

from msgspec.structs import replace

from engine import snapshot
from engine.aside import Result
from engine.claims import Claims, Key
from engine.errors import (
    ConfigError,
    EngineError,
    StateNotFound,
    StateNotStored,
    StateQuota,
    StepFailed,
)
from engine.messages import ID_BYTES, StateInfo
from engine.ranking import Ranking
from engine.shelf import Shelf, Unsynced, tag_of
from engine.snapshot import Shape
from engine.standing import Named, Standing
from engine.state_files import check_id, entries, name_of, parse
from engine.storing import Storing, Then, Waiter, Waiters
from engine.tiers import Kept, Tiers
from engine.traffic import MORE_BYTES

log = logging.getLogger(__name__)

MOST_PENDING = 1024  # reads and writes that wait for the disk
ASK_SECONDS = 1.0  # between looks for other engines, which may mean to ask another machine
USES_TOLD = 8  # times within a state's ttl at which a file's time follows its uses


class States:
    """`fetch` gets the bytes of a state in a row, some rounds later; `clock` is the time of day."""

    def __init__(
        self,
        tiers: Tiers,
        shape: Shape,
        *,
        ttl: float,
        most: int,
        shelf: Shelf | None,
        disk_bytes: int,
        fetch: Callable[[Kept, Callable[[bytes | None], None]], None],
        clock: Callable[[], float],
        new_id: Callable[[str], str],  # of the owner's
    ) -> None:
        self._tiers = tiers
        self._shape = shape
        self._ttl = ttl
        self._most = most
        self._shelf = shelf
        self._disk_bytes = disk_bytes
        self._fetch = fetch
        self._clock = clock
        self._new_id = new_id
        self._named: dict[Key, Named] = {}
        self._ids: dict[str, list[str]] = {}  # by owner, in order
        self._expiry: Ranking[Key] = Ranking()
        self.claims = Claims(shelf, shape, self._changes)
        self.waiters = Waiters()
        self.store_errors = 0  # files that could not be written or removed
        self._new: set[Key] = set()  # those that requests have claimed, and that were not there
        self._making: dict[str, int] = {}  # how many these are, by owner
        self._alone = True  # no other engine uses the folder, when this was last asked
        self._asked = clock()
        self.files = 0
        if shelf is not None:
            self._alone = shelf.lock.alone
            self._take_stock(shelf)

    def __len__(self) -> int:
        return len(self._named)

    def find(self, owner: str, id: str, param: str = "id") -> Named:
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

    def _note_use(self, named: Named, now: float) -> None:
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

    def source(self, owner: str, id: str, optional: bool) -> Standing | None:
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

    def _end(self, owner: str, id: str) -> None:
        self.claims.let_go((owner, id))
        if (owner, id) in self._new:
            self._new.remove((owner, id))
            self._making[owner] -= 1
            if not self._making[owner]:
                del self._making[owner]

    def put(
        self,
        owner: str,
        id: str,
        standing: Standing,
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
        named = Named(owner, id, standing, now, ttl, now + ttl)
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

    def move(self, named: Named, target: str, ttl: float | None, then: Then) -> None:
        """The same state under another id (or a new one), in the place of this one; `then` as of
        `put` with `must`. Raises as `begin` and `delete`."""
        owner, id = named.owner, named.id
        self.claims.take((owner, id), "id")
        try:
            target = self.begin(owner, target, "target", leaving=1)
        except EngineError:
            self.claims.settle((owner, id))
            raise
        if target != id:
            self.claims.hold((owner, id))  # nothing takes its place meanwhile

        def moved(told: StateInfo | EngineError | None) -> None:
            if target != id:
                self.claims.let_go((owner, id))
                if isinstance(told, StateInfo):
                    self._forget(owner, id, for_good=True)
                self.claims.settle((owner, id))
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

    def drop(self, kept: set[Kept]) -> None:
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

    def info(self, named: Named) -> StateInfo:
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

    # What other engines have to do with it.

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

    def _take_stock(self, shelf: Shelf) -> None:
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

    def _take_over(self, shelf: Shelf, file: str) -> None:
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
            kept = Kept(read, owner, files={file}, written={file}, digest=digest)
            standing = Standing.of(self._tiers.hold(kept), found.snapshot)
            times = found.created, found.ttl, expires
            self._tiers.note_name(kept)
            self._add(Named(owner, id, standing, *times, file, tag_of(status), written))
            self.files += 1

    def _add(self, named: Named) -> None:
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

    def _let_go(self, kept: Kept) -> None:
        """One name less has it."""
        self._tiers.note_name(kept, -1)
        self._tiers.release(kept)

    def _delete(self, shelf: Shelf, key: Key, waiter: Waiter | None = None) -> None:
        def deleted(result: Result) -> None:
            self.claims.settle(key)
            error = None
            if not isinstance(result, bytes):
                self.store_errors += 1
                error = StateNotStored(
                    f"the state's file cannot be removed: {_reason(result)}; a restart will find it"
                )
            if waiter is not None:
                self.waiters.tell(waiter, error)

        shelf.delete(self._file(*key), deleted)

    def _write(self, storing: Storing, shelf: Shelf) -> None:
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
                self._fail(storing, shelf, _reason(result))

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
            why = f"{_reason(result)}; it is kept, but a loss of power may cost it"
            self._tell_failure(storing, why)
        else:
            self.waiters.tell(storing, replace(self.info(named), stored=True))

    def _fail(self, storing: Storing, shelf: Shelf, reason: str) -> None:
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

    def _file(self, owner: str, id: str) -> str:
        return name_of(owner, id, self._shape)


def _reason(error: OSError | EngineError) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
