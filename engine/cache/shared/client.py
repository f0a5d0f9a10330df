"""SharedStates: an engine's side of a SharedStore.

The store is asked by worker threads, and the engine's thread gets the answers from `collect`. So a
request for a named state waits in the queue while its state is *fetched*: the store is asked for
the lock of the state that the request will replace, and for the state that it continues, unless
this engine has that version. Then NamedStates is brought up to date, and everything else is as
without a store.

| what | asked for by | ends |
| --- | --- | --- |
| fetch | `fetch`, before a request or a call uses a name | `then`, once |
| a lock | a fetch | `write`, `delete` or `release` |
| write, delete, read | NamedStates and StateTransfer, as with a folder of files | `done`, once |

A lock of a server that has died ends with its lease. A fetch therefore watches a lock that another
server has. When it sees that the lock is renewed, the holder lives, and the fetch fails with
StateBusy.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from engine.cache.shared.store import (
    ABSENT,
    LEASE_SECONDS,
    RENEW_SECONDS,
    Listed,
    Lock,
    Opened,
    SharedStore,
    StateName,
    busy,
)
from engine.cache.shared.times import FetchResult, StoreTimes, result_of, result_of_error
from engine.cache.storage import snapshot
from engine.cache.storage.snapshot import Snapshot, StateLayout
from engine.cache.storage.state_store import Parse, StateStore
from engine.cache.storage.worker_threads import Done, Result, Work, WorkerThreads
from engine.errors import (
    EngineError,
    StateBusy,
    StateConflict,
    StateMalformed,
    StoreUnavailable,
)
from engine.protocol.state_calls import StateInfo
from engine.protocol.validation import check_ttl

log = logging.getLogger(__name__)

LISTS = "store-lists"  # the lane of long answers
LANES = 8  # threads that ask the store; one name is always asked for by the same one
PATIENCE_SECONDS = 10.0  # how long a write is tried again while the store does not answer
RETRY_SECONDS = 0.25  # between two tries
REST_SECONDS = 1.0  # after an error that took long, nothing else is asked for so long
SLOW_SECONDS = 1.0
LOCK_WATCH_SECONDS = 0.25  # between two looks at another server's lock
CLOSE_SECONDS = 10.0  # wait for pending operations at the end
TIDY_SECONDS = 600.0  # between two searches for states whose lifetime is over
LOCKS_TOLD_SECONDS = 30.0  # between two log lines about locks that cannot be renewed

Key = tuple[str, str]  # (owner, id)


@dataclass(frozen=True, slots=True)
class Found:
    """A version of a state in the store, checked."""

    generation: str  # ABSENT: there is no such state
    snapshot: Snapshot | None = None  # None: this engine knows that version
    created: float = 0.0  # seconds since the epoch
    ttl: float = 0.0  # seconds


@dataclass(slots=True)
class Want:
    """One name that a fetch asks for."""

    key: Key
    lock: bool  # it will be replaced or removed
    known: str = ABSENT  # the version that this engine has; ABSENT: none
    counts: bool = True  # with a lock: if it is new, it counts for the owner's quota
    held: Lock | None = None  # with `lock`: the one that is asked for
    found: Found | None = None


@dataclass(eq=False, slots=True)
class Fetch:
    """A request's look at the store; other requests are not delayed by it."""

    wants: Sequence[Want]
    then: Callable[[EngineError | None], None]
    most: int  # the most states of the owner
    abandoned: bool = False  # nobody waits any more
    began: float = field(default_factory=time.monotonic)
    rest: float | None = None  # rest of the lease of another server's lock, at the last look


@dataclass(slots=True)
class _Held:
    """A lock that this engine has, and the version that the store had when it was taken."""

    lock: Lock
    base: str


class SharedStates(StateStore):
    """The engine's named states in a store that other servers use too.

    All methods are called by the engine's thread, and so is every callback.
    """

    shared = True

    def __init__(
        self, store: SharedStore, layout: StateLayout, threads: WorkerThreads | None = None
    ) -> None:
        """Create without asking the store.

        Args:
            store: where the states are.
            layout: shapes of the model's states.
            threads: those of the engine's other files, if it has any.
        """
        self.threads = threads or WorkerThreads()
        self.times = StoreTimes()
        self._store = store
        self._layout = layout
        # Called with a key and what the store has of it, before a fetch's `then`. Returns False if
        # the version that the engine had when the fetch began is gone, so its content is needed.
        self.on_found: Callable[[Key, Found], bool] = lambda key, found: True
        self._held: dict[str, _Held] = {}  # by file name
        self._asking: dict[str, Lock] = {}  # locks that fetches of this engine ask for, by file
        self._changing: dict[str, int] = {}  # writes and removals in progress, by file name
        self._later: list[tuple[float, Callable[[], None]]] = []  # what to do, and when
        self._resting_until = 0.0
        self._renewed: tuple[Lock, ...] = ()  # replaced as a whole, since another thread reads it
        self._closed = threading.Event()
        self._renewer = threading.Thread(target=self._renew, name="store-locks", daemon=True)
        self._renewer.start()
        threading.Thread(target=self._tidy, name="store-tidy", daemon=True).start()

    def warn(self) -> None:
        """Log what could make the store lose states. Raises ConfigError if it cannot be used."""
        try:
            for warning in self._store.warnings():
                log.warning("the state store may lose states: %s", warning)
        except StoreUnavailable as error:
            log.warning("%s; requests with states fail until it does", error.message)

    # What needs a fetch first.

    def fetch(
        self, wants: Sequence[Want], most: int, then: Callable[[EngineError | None], None]
    ) -> Fetch:
        """Ask the store for these names, and take the locks of those that will be replaced.

        Args:
            wants: the names; each at most once.
            most: the most states that the owner may have.
            then: called once, from `collect`, unless the fetch is abandoned: with None when all
                locks are held and `on_found` was called for each name, or with the error, and then
                no lock is held.
        """
        fetch = Fetch(wants, then, most)
        for want in wants:
            file = self.file_of(*want.key)
            if want.lock and (file in self._held or file in self._asking):
                self._later.append((0.0, partial(self._tell, fetch, busy(want.key[1]))))
                return fetch
        for want in wants:
            if want.lock:
                want.held = Lock(StateName.of(*want.key), secrets.token_hex(16))
                self._asking[self.file_of(*want.key)] = want.held
        self._note_held()
        self._look(fetch)
        return fetch

    def abandon(self, fetch: Fetch) -> None:
        """Give the fetch's locks back, now or when it has them; `then` is not called any more.

        If `then` was called already, no lock of the fetch may be in use.
        """
        fetch.abandoned = True
        for want in fetch.wants:
            file = self.file_of(*want.key)
            held = self._held.get(file)
            if held is not None and held.lock is want.held:
                self.unlock_file(file)

    def _look(self, fetch: Fetch) -> None:
        lane = self._lane(self.file_of(*fetch.wants[0].key))
        self._submit(lane, partial(self._open_all, fetch), partial(self._on_opened, fetch))

    def _open_all(self, fetch: Fetch) -> bytes:
        """Ask for each name in order; run by a worker thread."""
        for want in fetch.wants:
            name = StateName.of(*want.key)
            most = fetch.most if want.counts else None
            opened = self._store.open(name, want.known, want.held, most)
            want.found = self._check(name, opened)
        return b""

    def _check(self, name: StateName, opened: Opened) -> Found:
        """Check what the store has returned. Raises StoreUnavailable: it is no such state."""
        if opened.content is None:
            return Found(opened.generation)
        try:
            return parse(opened, name, self._layout)
        except EngineError as error:
            raise StoreUnavailable(
                f"the state store has no valid state {name.id!r}: {error.message}"
            ) from None

    def _on_opened(self, fetch: Fetch, result: Result) -> None:
        error = _as_error(result)
        if isinstance(error, StateBusy) and self._may_end(fetch, error):
            self._later.append((time.monotonic() + LOCK_WATCH_SECONDS, partial(self._look, fetch)))
            return
        if error is None and not fetch.abandoned:
            unknown = [want for want in fetch.wants if not self._takes(want)]
            if unknown:
                for want in unknown:
                    want.known = ABSENT
                self._look(fetch)
                return
        self._end(fetch, error)

    def _takes(self, want: Want) -> bool:
        assert want.found is not None
        return self.on_found(want.key, want.found)

    def _may_end(self, fetch: Fetch, error: StateBusy) -> bool:
        """Return whether another server's lock may be abandoned, so that waiting may help."""
        before, rest = fetch.rest, error.retry_after or 0.0
        fetch.rest = rest
        if fetch.abandoned or time.monotonic() - fetch.began > 2 * LEASE_SECONDS:
            return False
        return before is None or rest < before  # otherwise it was renewed

    def _end(self, fetch: Fetch, error: EngineError | None) -> None:
        for want in fetch.wants:
            if want.held is None:
                continue
            file = self.file_of(*want.key)
            del self._asking[file]
            if error is not None or fetch.abandoned:
                self._unlock(want.held)
            else:
                assert want.found is not None
                self._held[file] = _Held(want.held, want.found.generation)
        self._note_held()
        self._tell(fetch, error)

    def _tell(self, fetch: Fetch, error: EngineError | None) -> None:
        if fetch.abandoned:
            return
        waited = time.monotonic() - fetch.began
        for want in fetch.wants:
            self.times.fetched(
                _result_of(want) if error is None else result_of_error(error), waited
            )
        fetch.then(error)

    def describe(self, key: Key, then: Callable[[StateInfo | EngineError | None], None]) -> None:
        """Ask for a state's description; `then` gets None if there is no such state."""
        found: list[StateInfo] = []

        def ask() -> bytes:
            described = self._store.describe(StateName.of(*key))
            if described is not None:
                found.append(self._info(key[0], described[1]))
            return b""

        def told(result: Result) -> None:
            then(_as_error(result) or (found[0] if found else None))

        self._submit(self._lane(self.file_of(*key)), ask, told)

    def list_states(
        self,
        owner: str,
        after: str,
        limit: int,
        then: Callable[[tuple[list[StateInfo], bool] | EngineError], None],
    ) -> None:
        """Ask for up to `limit` states of an owner with ids after `after`, and if more follow."""
        found: list[tuple[list[StateInfo], bool]] = []

        def ask() -> bytes:
            listed, more = self._store.list_states(StateName.of(owner, "").owner, after, limit)
            found.append(([self._info(owner, one) for one in listed], more))
            return b""

        self._submit(LISTS, ask, lambda result: then(_as_error(result) or found[0]))

    def _info(self, owner: str, listed: Listed) -> StateInfo:
        entry = listed.entry
        return StateInfo(
            id=listed.id,
            owner=owner,
            tokens=entry.tokens,
            bytes=self._layout.bytes,
            tier="store",
            fingerprint=self._layout.fingerprint,
            created=entry.created,
            expires=listed.expires,
            recent=list(entry.recent),
            stored=True,
            turns=entry.turns,
        )

    # A StateStore's operations.

    @property
    def pending(self) -> int:
        return self.threads.pending + len(self._later)

    @property
    def alone(self) -> bool:
        return False

    def file_of(self, owner: str, id: str) -> str:
        name = StateName.of(owner, id)
        return f"{name.owner}/{name.id}"

    def owner_in_file(self, owner: str, id: str) -> str:
        return StateName.of(owner, id).owner

    def write(
        self, name: str, content: Callable[[], bytes], done: Done, lasting: bool = False
    ) -> None:
        """Write a file as `StateStore.write`; while the store does not answer, try again."""
        held = self._held.get(name)
        if held is None:
            lost = StateConflict("the lock of the state is lost")
            self._later.append((0.0, partial(done, lost)))
            return
        self._changing[name] = self._changing.get(name, 0) + 1
        made: list[bytes] = []
        began = time.monotonic()
        until = began + PATIENCE_SECONDS

        def write() -> bytes:
            if not made:
                made.append(content())
            return self._store.write(held.lock, held.base, made[0]).encode()

        def on_written(result: Result) -> None:
            if isinstance(result, StoreUnavailable) and time.monotonic() < until:
                self._later.append((time.monotonic() + RETRY_SECONDS, again))
                return
            self._changed(name)
            if isinstance(result, bytes):
                self.times.wrote(time.monotonic() - began)
                self._held.pop(name, None)  # the store has the lock back
                self._note_held()
            done(result)

        def again() -> None:
            self.threads.submit(self._lane(name), write, on_written)

        again()

    def read(self, name: str, most: int, parse: Parse, done: Done) -> None:
        def read() -> bytes:
            try:
                opened = self._store.open(_name_of(name), ABSENT)
            except StoreUnavailable as error:
                raise OSError(error.message) from None  # it may be read later
            if opened.content is None or len(opened.content) > most:
                raise FileNotFoundError(f"the state store has no state {name!r}")
            return parse(opened.content)

        self.threads.submit(self._lane(name), read, done)

    def delete(self, name: str, done: Done = lambda result: None) -> None:
        held = self._held.get(name)
        if held is None:
            self._later.append((0.0, partial(done, StateConflict("the lock of the state is lost"))))
            return
        self._changing[name] = self._changing.get(name, 0) + 1

        def remove() -> bytes:
            self._store.remove(held.lock, held.base)
            return b""

        def on_removed(result: Result) -> None:
            self._changed(name)
            if isinstance(result, bytes):
                self._held.pop(name, None)
                self._note_held()
            done(result)

        self.threads.submit(self._lane(name), remove, on_removed)

    def changing(self, name: str) -> bool:
        return name in self._changing

    def tag(self, name: str) -> bytes:
        held = self._held.get(name)
        return b"" if held is None else held.base.encode()

    def lock_file(self, name: str) -> bool:
        return True  # it was taken by a fetch, except for states that are never written

    def unlock_file(self, name: str) -> None:
        held = self._held.pop(name, None)
        if held is not None:
            self._note_held()
            self._unlock(held.lock)

    def collect(self) -> None:
        if self._later:
            now = time.monotonic()
            due = [then for when, then in self._later if when <= now]
            self._later = [one for one in self._later if one[0] > now]
            for then in due:
                then()
        self.threads.collect()

    def wait(self, seconds: float) -> None:
        if self.threads.pending:
            self.threads.wait(seconds)
        elif self._later:
            time.sleep(seconds)
        self.collect()

    def flush(self) -> None:
        until = time.monotonic() + CLOSE_SECONDS
        while self.pending and time.monotonic() < until:
            self.wait(0.1)

    def close(self) -> None:
        self._unlock_idle()
        self.flush()
        if self._unlock_idle():  # locks of fetches that were under way
            self.flush()
        self._closed.set()
        self._renewer.join()
        self._store.close()

    # Inside.

    def _unlock_idle(self) -> bool:
        """Give back the locks of all names that are not changing; return whether there were any."""
        idle = [name for name in self._held if name not in self._changing]
        for name in idle:
            self.unlock_file(name)
        return bool(idle)

    @staticmethod
    def _lane(name: str) -> str:
        return f"store-{zlib.crc32(name.encode()) % LANES}"

    def _submit(self, lane: str, work: Work, done: Done) -> None:
        """Ask the store, unless it has just kept others waiting for nothing."""

        def ask() -> bytes:
            began = time.monotonic()
            if began < self._resting_until:
                raise StoreUnavailable("the state store does not answer")
            try:
                return work()
            except StoreUnavailable:
                now = time.monotonic()
                if now - began > SLOW_SECONDS:
                    self._resting_until = now + REST_SECONDS
                raise

        self.threads.submit(lane, ask, done)

    def _changed(self, name: str) -> None:
        self._changing[name] -= 1
        if not self._changing[name]:
            del self._changing[name]

    def _unlock(self, lock: Lock) -> None:
        def unlock() -> bytes:
            self._store.unlock(lock)
            return b""

        def told(result: Result) -> None:
            if not isinstance(result, bytes):
                log.warning("a lock in the state store could not be given back; it ends by itself")

        self._submit(self._lane(f"{lock.name.owner}/{lock.name.id}"), unlock, told)

    def _note_held(self) -> None:
        # Reading a large state may take longer than a lease, so locks that are asked for are
        # renewed too; for one that the store has not given, that does nothing.
        held = [one.lock for one in self._held.values()]
        self._renewed = (*held, *self._asking.values())

    def _tidy(self) -> None:
        while not self._closed.wait(TIDY_SECONDS):
            try:
                self._store.tidy()
            except StoreUnavailable as error:
                log.warning("states that are over cannot be removed: %s", error.message)
            except Exception:
                log.exception("states that are over cannot be removed")

    def _renew(self) -> None:
        told = 0.0
        while not self._closed.wait(RENEW_SECONDS):
            locks = self._renewed
            try:
                if locks:
                    self._store.renew(locks)
            except StoreUnavailable as error:
                if time.monotonic() - told > LOCKS_TOLD_SECONDS:
                    told = time.monotonic()
                    log.warning("locks in the state store cannot be renewed: %s", error.message)
            except Exception:
                log.exception("locks in the state store cannot be renewed")


def parse(opened: Opened, name: StateName, layout: StateLayout) -> Found:
    """Check a state from the store, as an imported one is. Raises EngineError."""
    assert opened.content is not None
    found = snapshot.read(opened.content, layout)
    try:
        written_for = found.extra["owner"], found.extra["id"]
        ttl, created = float(found.extra["ttl"]), float(found.extra["created"])
    except (KeyError, ValueError) as error:
        raise StateMalformed(f"a metadata entry is missing or malformed: {error!r}") from None
    check_ttl("ttl", ttl)
    if written_for != (name.owner, name.id):
        raise StateMalformed("it was written for another owner or id")
    return Found(opened.generation, found, created, ttl)


def _result_of(want: Want) -> FetchResult:
    assert want.found is not None
    return result_of(want.found.generation, want.found.snapshot is not None)


def _name_of(file: str) -> StateName:
    return StateName(*file.split("/", 1))


def _as_error(result: Result) -> EngineError | None:
    if isinstance(result, EngineError):
        return result
    return StoreUnavailable(str(result)) if isinstance(result, OSError) else None
