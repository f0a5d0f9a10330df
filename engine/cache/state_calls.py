"""StateCallHandler: answers what clients ask of kept states beside their requests (`StateCall`).

Most answers are there at once. What needs a state's bytes has to wait for a round that exports
them, and before that, where only a file has them, for that to be read; what keeps a state, for its
file to be written. Snapshots are made and checked aside.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable

from engine.cache.resume_point import NamedState, ResumePoint
from engine.cache.state_manager import StateCacheManager
from engine.cache.storage import snapshot
from engine.cache.storage.named_state_file import check_id
from engine.cache.storage.snapshot import Snapshot
from engine.cache.storage.worker_threads import Result
from engine.cache.store_waiters import Then, Told
from engine.cache.tiered_store import CachedState
from engine.errors import EngineError, InvalidRequest, StateQuota, StepFailed
from engine.protocol.failed import Failed
from engine.protocol.state_calls import StateCall, StateInfo, StateReply
from engine.protocol.token_ids import ID_BYTES
from engine.protocol.validation import check_ttl

MOST_LISTED = 1000

Answer = Callable[[], None]


class StateCallHandler:
    """`replies` are what there is to tell, until they are taken."""

    def __init__(self, keeper: StateCacheManager) -> None:
        self._states = keeper.states
        self._traffic = keeper.traffic
        self._shape = keeper.shape
        self._waiting: dict[CachedState, list[Answer]] = {}  # for a file
        self.replies: list[tuple[Hashable, StateReply]] = []
        keeper.on_loaded = self.loaded

    def ask(self, client: Hashable, call: StateCall) -> None:
        """Answers, now or later, with one reply. Raises nothing."""
        self._states.expire()
        self._try(client, call, lambda: self._answer(client, call))

    def loaded(self, kept: CachedState) -> None:
        """A file has been read."""
        for answer in self._waiting.pop(kept, ()):
            answer()

    def refuse(self, client: Hashable, call: int, error: EngineError) -> None:
        self.replies.append((client, StateReply(call, Failed.of(call, error))))

    def _try(self, client: Hashable, call: StateCall, answer: Answer) -> None:
        try:
            answer()
        except EngineError as error:
            self.refuse(client, call.call, error)

    def _tell(self, client: Hashable, call: StateCall, *states: StateInfo) -> None:
        self.replies.append((client, StateReply(call.call, states=list(states))))

    def _teller(self, client: Hashable, call: StateCall) -> Then:
        def then(told: Told) -> None:
            if isinstance(told, EngineError):
                self.refuse(client, call.call, told)
            else:
                self._tell(client, call, *(() if told is None else (told,)))

        return then

    def _answer(self, client: Hashable, call: StateCall) -> None:
        if call.ttl is not None:
            check_ttl("ttl", call.ttl)
        match call.action:
            case "get":
                self._tell(client, call, self._states.info(self._states.find(call.owner, call.id)))
            case "list":
                self._list(client, call)
            case "delete":
                self._states.delete(call.owner, call.id, self._teller(client, call))
            case "fork":
                self._with_row(client, call, self._fork)
            case "move":
                self._with_row(client, call, self._move)
            case "export":
                self._with_row(client, call, self._export)
            case "import":
                self._import(client, call)

    def _list(self, client: Hashable, call: StateCall) -> None:
        if not 1 <= call.limit <= MOST_LISTED:
            raise InvalidRequest(
                f"limit is {call.limit}; allowed: 1 to {MOST_LISTED}", param="limit"
            )
        found, more = self._states.listed(call.owner, call.id, call.limit)
        self.replies.append((client, StateReply(call.call, states=found, more=more)))

    def _with_row(
        self,
        client: Hashable,
        call: StateCall,
        then: Callable[[Hashable, StateCall, NamedState], None],
        tries: int = 0,
    ) -> None:
        """`then`, once the state is in a row."""
        named = self._states.find(call.owner, call.id)
        kept = named.standing.kept
        if kept.has_row:
            then(client, call, named)
            return
        self._traffic.load(kept, tries, "id")

        def again() -> None:
            self._try(client, call, lambda: self._with_row(client, call, then, tries + 1))

        self._waiting.setdefault(kept, []).append(again)

    def _fork(self, client: Hashable, call: StateCall, named: NamedState) -> None:
        id = self._states.begin(call.owner, call.target, "target")
        then = self._teller(client, call)
        self._states.put(call.owner, id, named.standing, call.ttl, then, must=True)

    def _move(self, client: Hashable, call: StateCall, named: NamedState) -> None:
        self._states.move(named, call.target, call.ttl, self._teller(client, call))

    def _export(self, client: Hashable, call: StateCall, named: NamedState) -> None:
        info = self._states.info(named)
        standing = named.standing

        def fetched(state: bytes | None) -> None:
            if state is None:
                self.refuse(client, call.call, StepFailed("the round that was to export it failed"))
                return
            self._traffic.do(
                lambda: snapshot.write(standing.snapshot(state), self._shape),
                lambda content: self._hand_out(client, call, info, content),
            )

        self._traffic.fetch(standing.kept, fetched)

    def _hand_out(
        self, client: Hashable, call: StateCall, info: StateInfo, content: Result
    ) -> None:
        if isinstance(content, bytes):
            self.replies.append((client, StateReply(call.call, states=[info], content=content)))
        else:
            self.refuse(client, call.call, _as_error(content))

    def _import(self, client: Hashable, call: StateCall) -> None:
        if call.target:
            check_id("target", call.target)
        found: list[Snapshot] = []

        def check() -> bytes:
            found.append(snapshot.read(call.content, self._shape))
            return b""

        def checked(result: Result) -> None:
            if isinstance(result, bytes):
                self._try(client, call, lambda: self._take_in(client, call, *found))
            else:
                self.refuse(client, call.call, _as_error(result))

        self._traffic.do(check, checked)

    def _take_in(self, client: Hashable, call: StateCall, found: Snapshot) -> None:
        id = self._states.begin(call.owner, call.target, "target")
        kept = CachedState(found.tokens - len(found.tail) // ID_BYTES, call.owner)
        try:
            self._states.check_part(call.owner, id)
            if not self._traffic.bring_in(kept, found.state):
                raise StateQuota("no memory is left for a state; delete some, or wait for others")
        except EngineError:
            self._states.end(call.owner, id)
            raise
        standing, then = ResumePoint.of(kept, found), self._teller(client, call)
        lasts = not call.brief
        self._states.put(call.owner, id, standing, call.ttl, then, must=lasts, wait=lasts)


def _as_error(error: OSError | EngineError) -> EngineError:
    return error if isinstance(error, EngineError) else EngineError(str(error))
