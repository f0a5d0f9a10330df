"""StateCacheManager: the scheduler's only access to cached and named states.

The scheduler reports the life of a sequence by these calls, in this order:

| call | when | what it does |
| --- | --- | --- |
| `fetch` | it arrives | asks the shared store, if there is one, for its named states |
| `on_add` | it is enqueued, or fetched | looks up the named state, reserves the name it leaves |
| `lookup` | it could be admitted | finds where it may start, or what it has to wait for |
| `on_admit` | it is admitted | plans the copy to its slot, makes it the reader of its marks |
| `on_prefill` | a plan reads part of its text | plans the copies to cached states |
| `on_stored` | that plan is committed | they are stored; others may go on |
| `on_slot_reused` | its slot goes to another one | plans a copy of what its slot holds |
| `store_answer`, or `needs_rebuild` and `on_finish` | it ends | stores its final state |
| `cancel_pending` | it reads no more | others wait for it no longer |
| `release` | it is over | releases all that it has pinned |

A sequence whose state is to be kept gets a row for it at admission, its *target*. When its prompt
has been read up to the last token (with whole chunks: up to the last multiple), the state is copied
there; this is its *base*. At its end there are three cases:

- nothing of the answer is kept: the base is stored, with the rest of the prompt as its tail;
- the answer ends with a token that is kept: the state in the slot has read all but that token;
- otherwise the slot has read other tokens than those that are kept, and a *rebuild* takes over: a
  sequence that continues from the base and reads its tail and the answer, except for the last
  token.

A sequence whose request says `no_cache` has nothing to do with the prefix cache: it looks nothing
up, and so has no marks to store a state at, and neither its answer nor its slot is copied there.
Named states are kept for it as for any other.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterable
from functools import partial
from typing import Any

from msgspec.structs import replace

from engine.cache.cache_config import CacheConfig
from engine.cache.disk_tier import DiskTier
from engine.cache.finished_states import FinishedStates, OnFinished
from engine.cache.named_states import NamedStates
from engine.cache.prefix_cache import CacheHit, Node, PrefixCache
from engine.cache.resume_point import ResumePoint
from engine.cache.sequence_state import SequenceState
from engine.cache.shared.client import Fetch, SharedStates
from engine.cache.storage.file_store import StateFileStore
from engine.cache.storage.named_state_file import check_id, is_id
from engine.cache.tiered_store import CachedState, TieredStateStore
from engine.cache.transfer import StateTransfer
from engine.config import SCAN_CHUNK
from engine.errors import (
    EngineError,
    InvalidRequest,
    StateError,
    StateQuota,
    StepFailed,
    TurnAhead,
    TurnDone,
)
from engine.protocol.requests import FinishReason, Request
from engine.protocol.sampling_params import SamplingParams
from engine.protocol.token_ids import ID_BYTES, pack_ids
from engine.sequence import Sequence
from engine.step_plan import INITIAL, Admission, Copy, StepPlan


class StateCacheManager:
    """All cached and named states of an engine; called by the engine's thread only.

    Lengths are tokens of `Sequence.text`. Plans are committed in the order in which they were made;
    another plan may be made before one is committed.
    """

    def __init__(
        self,
        config: CacheConfig,
        file_store: StateFileStore | None = None,
        clock: Callable[[], float] = time.time,
        shared: SharedStates | None = None,
    ) -> None:
        """Load the named states of this model, and the cached ones of this variant, from the files.

        Args:
            config: sizes and limits.
            file_store: this server's folder; with `shared`, for cached prompts alone.
            clock: returns the time of day in seconds.
            shared: where named states are instead of the folder, if several servers share them.

        Raises ConfigError.
        """
        self.config = config
        self.tiers = TieredStateStore(config.device_rows, config.first_row, config.host_rows)
        self.cache = PrefixCache(self.tiers, config.tree_bytes, config.with_whole_chunks)
        store = file_store if shared is None else shared
        self.shared = shared
        # With a shared store, the folder has cached prompts alone.
        self._folder_of_prompts = None if shared is None else file_store
        self.transfer = StateTransfer(self.tiers, config.layout, store)
        self.states = NamedStates(config, self.tiers, self.transfer, store, clock)
        if shared is not None:
            shared.on_found = self.states.on_found
        self.disk = DiskTier(config, self.tiers, self.cache, self.transfer, file_store)
        self._finished = FinishedStates(config.layout, self.tiers, self.transfer, self.states)
        # Called with a state whose file has been read, or could not be.
        self.on_loaded: Callable[[CachedState], None] = lambda state: None
        self._of: dict[int, SequenceState] = {}  # by key, of sequences with named states
        self._fetches: dict[int, Fetch] = {}  # by key, of sequences that wait for the shared store
        self._fetched: list[tuple[Sequence, EngineError | None]] = []
        self._hits = 0
        self._misses: Counter[str] = Counter()

    # Rounds.

    def begin_plan(self) -> None:
        """Begin another plan; call it before anything that belongs to the plan."""
        self.tiers.begin_plan()

    def fill_plan(self, plan: StepPlan) -> None:
        """Add the initial copies and the exports to a plan that is otherwise complete."""
        self.transfer.fill_plan(plan)

    def on_exported(self, ticket: int, content: bytes) -> None:
        """Pass on a state that a committed plan has exported."""
        self.transfer.on_exported(ticket, content)

    def on_plan_failed(self, plan: StepPlan) -> None:
        """Handle a failed plan: states that it should have copied or exported are lost.

        A state that a file has is not lost.
        """
        places = self.tiers.overwritten({move.target for move in (*plan.before, *plan.after)})
        lost = self.tiers.states_in(places)
        self.states.remove_lost({state for state in lost if not state.written})
        for state in lost:
            if state.node is not None and state.written:
                self.tiers.move_to_disk(state)
            else:
                self.cache.evict(state)
                self.tiers.free_row(state)
        for export in plan.exports:
            self.transfer.on_exported(export.ticket, None)

    def collect(self) -> list[CachedState]:
        """Handle results of worker threads and remove expired names; call it once per step.

        Returns:
            The states whose files were read, or could not be, for which sequences may wait
            (`CacheHit.loading`).
        """
        self.states.expire()
        self.disk.collect()
        loaded = self.transfer.collect()
        for state in loaded:
            if state.node is not None and not state.has_row and not state.files:
                # a state that has files could only not be loaded now, for example for lack of a row
                self.cache.evict(state)
        for state in loaded:
            self.on_loaded(state)
        return loaded

    @property
    def exporting(self) -> bool:
        """Whether a plan is needed to export a state, even an empty one."""
        return self.transfer.exporting

    @property
    def busy(self) -> bool:
        """Whether steps are needed, if only to report results of disk operations."""
        return self.transfer.busy

    # The life of a sequence.

    def fetch(self, sequence: Sequence) -> Hashable | None:
        """Ask a shared store for the named states of a new sequence, if it has any.

        Returns:
            What the sequence waits for, until `take_fetched` returns it; None: nothing, so that
            `on_add` may follow at once.

        Raises InvalidRequest for an id that no state can have.
        """
        request, keep = sequence.request, sequence.request.keep
        if self.shared is None:
            return None
        locks = {request.state: False} if is_id(request.state) else {}
        if keep is not None and keep.lasts:
            if keep.id:
                check_id("keep", keep.id)
            else:  # chosen now, so that it can be locked and counted
                keep = replace(keep, id=self.config.placement.new_id(request.owner))
                sequence.request = replace(request, keep=keep)
            locks[keep.id] = True
        if not locks:
            return None
        if request.turn:
            self.states.forget_unstored(request.owner, request.state, request.turn)
        wants = self.states.wants(request.owner, locks)
        then = partial(self._on_fetched, sequence)
        fetch = self.shared.fetch(wants, self.config.most_states, then)
        self._fetches[sequence.key] = fetch
        return fetch

    def _on_fetched(self, sequence: Sequence, error: EngineError | None) -> None:
        if isinstance(error, StateError) and sequence.request.keep is not None:
            error.param = "keep"
        self._fetched.append((sequence, error))

    def take_fetched(self) -> list[tuple[Sequence, EngineError | None]]:
        """Return, once, the sequences whose `fetch` is done, each with its error if it failed.

        Those that were released since are left out.
        """
        fetched, self._fetched = self._fetched, []
        self.states.found.clear()  # `on_add` follows at once
        return [one for one in fetched if self._fetches.pop(one[0].key, None) is not None]

    def on_add(self, sequence: Sequence) -> None:
        """Look up what a new sequence continues from, and reserve the name of the state to keep.

        Raises StateNotFound, StateBusy, StateQuota, TurnDone, TurnAhead or InvalidRequest; nothing
        is reserved then, and no lock is held.
        """
        request = sequence.request
        if not request.state and request.keep is None:
            return
        keep = request.keep
        id = ""
        try:
            # First, because from now on no other engine replaces the state that it starts from.
            if keep is not None and keep.store:
                id = self.states.reserve(request.owner, keep.id, "keep")
            source = self.states.resume_point(request.owner, request.state, request.state_optional)
            if source is None and not request.prompt:
                raise InvalidRequest(
                    f"prompt is empty, and there is no state {request.state!r} to continue from",
                    param="prompt",
                )
            _check_turn(request, source)
        except EngineError:
            if id:
                self.states.cancel(request.owner, id)
            elif keep is not None:
                self.states.release_locks(request.owner, [keep.id])
            raise
        if source is not None:
            self.tiers.pin(source.state)
            sequence.go_on_from(source.tail, source.drawn)
        self._of[sequence.key] = SequenceState(source, keep, id)

    def lookup(self, sequence: Sequence) -> CacheHit:
        """Look up where a waiting sequence may start, in the plan being made.

        A sequence whose state is to be kept gets its row here, unless it has to wait.

        Returns:
            The hit, which is valid until the next look-up or admission. If `awaited` or `loading`
            is set, the sequence must wait for that and be looked up again.

        Raises:
            EngineError: it cannot start at all.
        """
        own = self._of.get(sequence.key)
        source = None if own is None or own.source is None else own.source.state
        request = sequence.request
        cacheable = not request.no_cache and (source is None or request.cache_points)
        hit = self.cache.lookup(sequence, source) if cacheable else CacheHit()
        if hit.state is not None and not hit.state.has_row:
            self.disk.load(hit.state)
            sequence.loads += 1
            return CacheHit(loading=hit.state)
        if own is not None and source is not None and not (hit.state or hit.awaited):
            hit.reason = ""
            if not source.has_row:
                self.transfer.load(source, own.loads, "state")
                own.loads += 1
                return CacheHit(loading=source)
            hit.state = source
        if own is not None and own.keep is not None and hit.awaited is None:
            self._allocate_target(sequence, own, hit)
        return hit

    def replacement(self, sequence: Sequence) -> ResumePoint | None:
        """Return the present state of the name from which a waiting sequence was to continue.

        None if that is the same state, or if there is none.
        """
        own, request = self._of.get(sequence.key), sequence.request
        if own is None or own.source is None:
            return None
        latest = self.states.resume_point(request.owner, request.state, optional=True)
        return None if latest is own.source else latest

    def change_source(self, sequence: Sequence, source: ResumePoint) -> None:
        """Let a waiting sequence continue from another state (`replacement`); its text changes."""
        own = self._of[sequence.key]
        assert own.source is not None and own.target is None
        self.tiers.pin(source.state)
        self.tiers.release(own.source.state)
        own.source, own.loads = source, 0
        sequence.go_on_from(source.tail, source.drawn)

    def _allocate_target(self, sequence: Sequence, own: SequenceState, hit: CacheHit) -> None:
        base = sequence.prompt_tokens - 1
        if self.config.with_whole_chunks:
            base = base // SCAN_CHUNK * SCAN_CHUNK
        if hit.state is not None:
            self.tiers.promote(hit.state)  # so that it stays where it is in this plan
        owner = sequence.request.owner
        if own.id:
            self.states.check_quota(owner, own.id)
        target = CachedState(own.before + base, owner)
        if not self.tiers.allocate(target):
            raise StateQuota("no memory is left for a state; delete some, or wait for others")
        own.target = self.tiers.pin(target)
        if base > hit.length:
            hit.ends = sorted({*hit.ends, base})

    def on_admit(self, plan: StepPlan, sequence: Sequence, hit: CacheHit) -> None:
        """Admit a sequence, which has its slot, at the position of its latest look-up.

        Adds the admission and the copies to the plan being made, and sets the sequence's marks and
        position.
        """
        own, request = self._of.get(sequence.key), sequence.request
        place, cached, before, source = None, hit.length, 0, None
        if cached:
            self._hits += 1
        elif hit.reason:
            self._misses[hit.reason] += 1
        if hit.state is not None:
            place = self.tiers.promote(hit.state)
            if hit.state.node is not None:
                self.disk.touch(hit.state)
        if own is not None and own.source is not None:
            source = own.source.state
        self.cache.add_pending(sequence, hit.marks, source)
        sequence.marks = hit.ends
        sequence.position = sequence.anchor = cached
        sequence.cached_tokens = max(cached - sequence.lead, 0)  # of its own prompt
        if own is not None:
            before = own.before
            if (target := own.base_at(cached)) is not None:
                self.tiers.copy_into(target, INITIAL if place is None else place)
                self._commit_base(own, target, cached)
        text = sequence.text if sequence.text is not request.prompt else b""
        plan.admit.append(
            Admission(request, sequence.key, sequence.slot, place, cached, text, before)
        )
        if own is not None:
            self._release_source(own)

    def on_prefill(self, plan: StepPlan, sequence: Sequence, length: int) -> None:
        """Add the copies that are due when the plan being made has read the text up to `length`."""
        state = self.cache.allocate(sequence, length)
        if state is not None:
            key = sequence.key if state.has_hidden else -1
            plan.after.append(Copy(sequence.slot, state.place, key))
        own = self._of.get(sequence.key)
        if own is not None and (target := own.base_at(length)) is not None:
            plan.after.append(Copy(sequence.slot, target.place))

    def on_stored(self, sequence: Sequence, length: int) -> Node | None:
        """Record that a committed plan has read a sequence's text up to `length`.

        Returns the node for which other sequences may wait (`CacheHit.awaited`), if any.
        """
        own = self._of.get(sequence.key)
        if own is not None and (target := own.base_at(length)) is not None:
            self._commit_base(own, target, length)
        return self.cache.commit(sequence.key, length)

    def on_slot_reused(self, sequence: Sequence) -> None:
        """Save the state in a slot that another sequence gets before the answer is known."""
        if not sequence.request.no_cache:
            self.cache.copy_answer(sequence)

    def may_end(self, sequence: Sequence, reason: FinishReason, kept: int | None) -> bool:
        """Return whether a client may end this sequence now.

        `kept` is how many tokens of its answer belong in the kept state (None: all).
        """
        own = self._of.get(sequence.key)
        if own is None:
            return True
        if own.rebuilds is not None:  # it has already ended; only its state is still being computed
            return reason == "abort"
        own.kept_tokens = None if kept is None else max(kept, 0)
        return True

    def has_named_state(self, sequence: Sequence) -> bool:
        """Return whether a sequence continues from a named state or keeps one.

        Such a sequence ends by `on_finish`, and keeps its slot until then.
        """
        return sequence.key in self._of

    def store_answer(self, sequence: Sequence, reason: FinishReason, read: int | None) -> None:
        """Cache the final state of a sequence without a named state.

        The state in its slot has read `read` tokens of the answer; None: unknown, so nothing is
        stored.
        """
        cacheable = not sequence.request.no_cache and reason in ("stop", "length")
        if read is not None and cacheable:
            self.cache.store_answer(sequence, read)

    def needs_rebuild(self, sequence: Sequence, reason: FinishReason, read: int | None) -> bool:
        """Return whether the state to keep must be recomputed from the base.

        That is so if the state in the slot has read other tokens of the answer than those to keep:
        `read` of them (None: unknown).
        """
        own = self._of[sequence.key]
        if own.rebuilds is not None or not own.has_base:
            return False
        answer = own.answer_of(sequence)
        return reason != "abort" and len(answer) > 0 and read != len(answer) - 1

    def rebuild(self, sequence: Sequence, key: int, reason: FinishReason, now: float) -> Sequence:
        """Return the sequence, with key `key`, that recomputes the state of one that has ended."""
        own, request = self._of.pop(sequence.key), sequence.request
        answer = own.answer_of(sequence)
        text = sequence.text[own.base * ID_BYTES :] + pack_ids(answer[:-1])
        again = Request(
            id=request.id,
            prompt=text,
            sampling=SamplingParams(max_tokens=0),
            owner=request.owner,
            priority=request.priority,
        )
        own.rebuilds, own.reason, own.answer = sequence, reason, answer
        self._of[key] = own
        return Sequence(key, sequence.client, again, (), now)

    def on_readmit(self, plan: StepPlan, heir: Sequence) -> None:
        """Admit a rebuild, which has its slot, in the plan being made.

        Raises StepFailed if its base is lost.
        """
        target = self._of[heir.key].target
        assert target is not None
        if not target.has_row:
            raise StepFailed("the state to be kept was lost")
        place = self.tiers.promote(target)
        plan.admit.append(
            Admission(heir.request, heir.key, heir.slot, place, 0, heir.text, target.position)
        )

    def answered(self, sequence: Sequence) -> Sequence:
        """Return the sequence whose answer the client gets: for a rebuild, its predecessor."""
        own = self._of.get(sequence.key)
        return sequence if own is None else own.rebuilds or sequence

    def on_finish(
        self, sequence: Sequence, reason: FinishReason, now: float, then: OnFinished
    ) -> None:
        """Store and export the final state of a sequence that still has its slot.

        `then` is called once, now or later, with the terminal event of `answered` or an error.
        """
        own = self._of[sequence.key]
        answered = own.rebuilds or sequence
        if own.rebuilds is not None and reason == "length":
            reason = own.reason
        self._finished.finish(sequence, own, answered, reason, now, then)

    def cancel_pending(self, sequence: Sequence) -> list[Node]:
        """Stop a sequence's reading; return the nodes for which others need not wait any more."""
        return self.cache.cancel(sequence.key)

    def release(self, sequence: Sequence) -> None:
        """Release everything that an ended sequence has pinned and reserved."""
        fetch = self._fetches.pop(sequence.key, None)
        if fetch is not None and self.shared is not None:
            self.shared.abandon(fetch)
        own = self._of.pop(sequence.key, None)
        if own is None:
            return
        self._release_source(own)
        if own.target is not None:
            self.tiers.release(own.target)
        if own.id:
            self.states.cancel(sequence.request.owner, own.id)

    def _commit_base(self, own: SequenceState, target: CachedState, length: int) -> None:
        own.base = length
        self.tiers.commit(target)

    def _release_source(self, own: SequenceState) -> None:
        if own.source is not None and not own.source_released:
            own.source_released = True
            self.tiers.release(own.source.state)

    # Waiting for files.

    @property
    def storing(self) -> bool:
        """Whether anybody waits for a state's file to be written or removed."""
        return bool(self.states.waiters)

    def stop_waiting(self, keys: Iterable[Hashable], why: str) -> None:
        """Answer those of these requests, (client, id) each, that only wait for a file."""
        if self.states.waiters:
            self.states.stop_waiting(self.states.waiters.with_keys(keys), why)

    def stop_overdue(self, now: float, why: str) -> None:
        """Answer the requests that have waited long enough, by the scheduler's clock."""
        if self.states.waiters:
            self.states.stop_waiting(self.states.waiters.overdue(now), why)

    def stop_all(self, why: str) -> None:
        """Answer all requests that wait for a file."""
        self.states.stop_waiting(self.states.waiters.all(), why)

    @property
    def pending(self) -> bool:
        """Whether worker threads have work, or results that no step has handled."""
        return self.transfer.pending

    def wait(self, seconds: float) -> None:
        """Wait up to `seconds` until a worker thread has finished something."""
        self.transfer.wait(seconds)

    def write_all(self) -> None:
        """Start writing the cached states that only the device has, at the end.

        Steps are needed until nothing is `exporting`.
        """
        self.disk.write_all()

    def close(self) -> None:
        """Wait until everything is written; must be the last call."""
        if self._folder_of_prompts is not None:
            self._folder_of_prompts.close()
        self.transfer.close()

    # Statistics.

    def load_stats(self, slots: int, state_bytes: int) -> dict[str, Any]:
        """Return the current load as fields of Stats; `slots` rows of `state_bytes` are in use."""
        own = self.states.files if self.shared is None else 0
        return {
            "state_bytes": (slots + self.tiers.device_used) * state_bytes,
            "host_state_bytes": self.tiers.host_used * self.config.host_row_bytes,
            "disk_state_bytes": own * self.config.layout.bytes + self.disk.bytes,
            "states": len(self.states),
        }

    @property
    def has_store_errors(self) -> bool:
        """Whether `take_counts` will report states that could not be stored."""
        return self.states.store_errors > 0 or self.disk.errors > 0

    def take_counts(self) -> dict[str, Any]:
        """Return counts since the last call, as fields of Stats."""
        counts = {
            "prefix_hits": self._hits,
            "prefix_misses": dict(self._misses),
            "evictions": dict(self.tiers.evictions),
            "store_errors": self.states.store_errors + self.disk.errors,
        }
        self._hits, self._misses, self.tiers.evictions = 0, Counter(), Counter()
        self.states.store_errors = self.disk.errors = 0
        if self.shared is not None:
            counts.update(self.shared.times.take())
        return counts


def _check_turn(request: Request, source: ResumePoint | None) -> None:
    """Check that a request's turn, if it has a number, is the next one of its text.

    Raises TurnDone or TurnAhead.
    """
    turns, tokens = (0, 0) if source is None else (source.turns, source.tokens)
    if not request.turn or request.turn == turns + 1:
        return
    had = f"the state has had {turns} turns and has {tokens} tokens"
    if request.turn <= turns:
        raise TurnDone(f"turn {request.turn} was carried out before: {had}", param="turn")
    raise TurnAhead(f"turn is {request.turn}, but {had}; allowed: {turns + 1}", param="turn")
