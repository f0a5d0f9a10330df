"""StateCallHandler: carries out clients' calls about named states (`StateCall`).

Each call gets one reply, at once unless something must be waited for:

| action | waits for |
| --- | --- |
| get, list | nothing |
| delete | its file to be removed |
| fork, move | a row, if only a file has the state; the file to be written |
| export | a row, likewise; the step that exports it; a worker thread that makes the snapshot |
| import | a worker thread that checks the snapshot; the file to be written |

With a store that several servers share, a call waits first until the names that it uses are
fetched. "get" and "list" are answered by the store.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import partial

from msgspec.structs import replace

from engine.cache.resume_point import NamedState, ResumePoint
from engine.cache.shared.client import Found
from engine.cache.shared.store import ABSENT
from engine.cache.state_manager import StateCacheManager
from engine.cache.storage import snapshot
from engine.cache.storage.named_state_file import check_id, is_id
from engine.cache.storage.snapshot import Snapshot
from engine.cache.storage.worker_threads import Result
from engine.cache.store_waiters import StoreResult
from engine.cache.tiered_store import CachedState
from engine.errors import EngineError, InvalidRequest, StateNotFound, StateQuota, StepFailed
from engine.protocol.failed import Failed
from engine.protocol.state_calls import StateCall, StateInfo, StateReply
from engine.protocol.token_ids import ID_BYTES
from engine.protocol.validation import check_ttl

MOST_LISTED = 1000


@dataclass(eq=False, slots=True)
class _PendingCall:
    """A call that has not been answered."""

    client: Hashable
    call: StateCall
    loads: int = 0  # how often its state was read from a file
    locked: tuple[str, ...] = ()  # ids that a fetch has locked for it


class StateCallHandler:
    """Handles state calls, one per engine; `replies` collects (client, reply) until taken."""

    def __init__(self, cache: StateCacheManager) -> None:
        self._states = cache.states
        self._transfer = cache.transfer
        self._shared = cache.shared
        self._layout = cache.config.layout
        self._placement = cache.config.placement
        self._most_states = cache.config.most_states
        self._loading: dict[CachedState, list[_PendingCall]] = {}
        self.replies: list[tuple[Hashable, StateReply]] = []
        cache.on_loaded = self._on_loaded

    def handle(self, client: Hashable, call: StateCall) -> None:
        """Answer a call, now or later, with one reply. Never raises."""
        self._states.expire()
        pending = _PendingCall(client, call)
        self._run(self._begin if self._shared is None else self._fetch, pending)

    # Calls with a shared store.

    def _fetch(self, pending: _PendingCall) -> None:
        """Begin the call when the store has told what it has of the names that are used."""
        call, shared = pending.call, self._shared
        assert shared is not None
        if call.ttl is not None:
            check_ttl("ttl", call.ttl)
        if call.action == "list":
            _check_limit(call.limit)
            then = partial(self._on_listed, pending)
            shared.list_states(call.owner, call.id, call.limit, then)
            return
        locks = {}
        if call.action != "import":
            if not is_id(call.id):
                raise StateNotFound(f"there is no state {call.id!r}", param="id")
            locks[call.id] = call.action in ("delete", "move")
        if call.action in ("fork", "move", "import") and not call.brief:
            if call.target:
                check_id("target", call.target)
            else:  # chosen now, so that it can be locked and counted
                target = self._placement.new_id(call.owner)
                pending.call = call = replace(call, target=target)
            locks[call.target] = True
        if call.action == "import" and not locks:
            self._begin(pending)
        elif call.action == "get":
            shared.describe((call.owner, call.id), partial(self._on_described, pending))
        else:
            wants = self._states.wants(call.owner, locks)
            for want in wants:
                want.counts = want.key[1] == call.target  # the other one is removed or only read
            # the id that a move leaves is removed later
            most = self._most_states + (call.action == "move" and call.target != call.id)
            shared.fetch(wants, most, partial(self._on_fetched, pending, locks))

    def _on_fetched(
        self, pending: _PendingCall, locks: dict[str, bool], error: EngineError | None
    ) -> None:
        if error is not None:
            self._refuse(pending, error)
            return
        pending.locked = tuple(id for id, lock in locks.items() if lock)
        self._run(self._begin, pending)

    def _on_listed(
        self, pending: _PendingCall, found: tuple[list[StateInfo], bool] | EngineError
    ) -> None:
        if isinstance(found, EngineError):
            self._refuse(pending, found)
            return
        states = [self._states.with_tier(info) for info in found[0]]
        self._reply(pending, StateReply(pending.call.call, states=states, more=found[1]))

    def _on_described(self, pending: _PendingCall, found: StateInfo | EngineError | None) -> None:
        call = pending.call
        if found is None:  # it may be one that the store could not take
            self._states.on_found((call.owner, call.id), Found(ABSENT))
            self._run(self._begin, pending)
        elif isinstance(found, EngineError):
            self._refuse(pending, found)
        else:
            info = self._states.with_tier(found)
            self._reply(pending, StateReply(call.call, states=[info]))

    def _begin(self, pending: _PendingCall) -> None:
        call = pending.call
        if call.ttl is not None:
            check_ttl("ttl", call.ttl)
        match call.action:
            case "get":
                info = self._states.info(self._states.get(call.owner, call.id))
                self._reply(pending, StateReply(call.call, states=[info]))
            case "list":
                self._list(pending)
            case "delete":
                self._states.delete(call.owner, call.id, partial(self._on_stored, pending))
            case "fork" | "move" | "export":
                self._with_row(pending)
            case "import":
                self._import(pending)

    def _list(self, pending: _PendingCall) -> None:
        call = pending.call
        _check_limit(call.limit)
        found, more = self._states.list_states(call.owner, call.id, call.limit)
        self._reply(pending, StateReply(call.call, states=found, more=more))

    # Calls that need the state in a row.

    def _with_row(self, pending: _PendingCall) -> None:
        """Continue the call at once, or again when the state's file has been read."""
        call = pending.call
        named = self._states.get(call.owner, call.id)
        state = named.point.state
        if not state.has_row:
            self._transfer.load(state, pending.loads, "id")
            pending.loads += 1
            self._loading.setdefault(state, []).append(pending)
            return
        match call.action:
            case "fork":
                id = self._states.reserve(call.owner, call.target, "target")
                then = partial(self._on_stored, pending)
                self._states.store(call.owner, id, named.point, call.ttl, then, must_last=True)
            case "move":
                then = partial(self._on_stored, pending)
                self._states.move(named, call.target, call.ttl, then)
            case "export":
                self._export(pending, named)

    def _on_loaded(self, state: CachedState) -> None:
        for pending in self._loading.pop(state, ()):
            self._run(self._with_row, pending)

    def _export(self, pending: _PendingCall, named: NamedState) -> None:
        info = self._states.info(named)
        then = partial(self._on_exported, pending, info, named.point)
        self._transfer.export(named.point.state, then)

    def _on_exported(
        self, pending: _PendingCall, info: StateInfo, point: ResumePoint, content: bytes | None
    ) -> None:
        if content is None:
            self._refuse(pending, StepFailed("the round that exported the state failed"))
            return
        serialize = partial(snapshot.write, point.snapshot(content), self._layout)
        self._transfer.run_aside(serialize, partial(self._on_serialized, pending, info))

    def _on_serialized(self, pending: _PendingCall, info: StateInfo, content: Result) -> None:
        if isinstance(content, bytes):
            self._reply(pending, StateReply(pending.call.call, states=[info], content=content))
        else:
            self._refuse(pending, _as_error(content))

    # Import of a client's snapshot.

    def _import(self, pending: _PendingCall) -> None:
        if pending.call.target:
            check_id("target", pending.call.target)
        found: list[Snapshot] = []

        def check() -> bytes:
            found.append(snapshot.read(pending.call.content, self._layout))
            return b""

        self._transfer.run_aside(check, partial(self._on_checked, pending, found))

    def _on_checked(self, pending: _PendingCall, found: list[Snapshot], result: Result) -> None:
        if isinstance(result, bytes):
            self._run(partial(self._store_import, found[0]), pending)
        else:
            self._refuse(pending, _as_error(result))

    def _store_import(self, found: Snapshot, pending: _PendingCall) -> None:
        call = pending.call
        id = self._states.reserve(call.owner, call.target, "target")
        state = CachedState(found.tokens - len(found.tail) // ID_BYTES, call.owner)
        try:
            self._states.check_quota(call.owner, id)
            if not self._transfer.import_state(state, found.state):
                raise StateQuota("no memory is left for a state; delete some, or wait for others")
        except EngineError:
            self._states.cancel(call.owner, id)
            raise
        point, lasts = ResumePoint.of(state, found), not call.brief
        then = partial(self._on_stored, pending)
        self._states.store(call.owner, id, point, call.ttl, then, must_last=lasts, wait=lasts)

    # Replies.

    def _run(self, step: Callable[[_PendingCall], None], pending: _PendingCall) -> None:
        """Run one step of a call; an EngineError becomes the reply."""
        try:
            step(pending)
        except EngineError as error:
            self._refuse(pending, error)

    def _on_stored(self, pending: _PendingCall, result: StoreResult) -> None:
        if isinstance(result, EngineError):
            self._refuse(pending, result)
        else:
            states = [] if result is None else [result]
            self._reply(pending, StateReply(pending.call.call, states=states))

    def _refuse(self, pending: _PendingCall, error: EngineError) -> None:
        call = pending.call.call
        failed = Failed.of(call, error)
        self._reply(pending, StateReply(call, failed))

    def _reply(self, pending: _PendingCall, reply: StateReply) -> None:
        self._states.release_locks(pending.call.owner, pending.locked)
        self.replies.append((pending.client, reply))


def _check_limit(limit: int) -> None:
    if not 1 <= limit <= MOST_LISTED:
        raise InvalidRequest(f"limit is {limit}; allowed: 1 to {MOST_LISTED}", param="limit")


def _as_error(error: OSError | EngineError) -> EngineError:
    return error if isinstance(error, EngineError) else EngineError(str(error))
