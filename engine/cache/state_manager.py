"""StateCacheManager: the scheduler's dealings with kept states: what a sequence starts from, what
it leaves.

A sequence that is to be kept has a row of its own for that from its admission on, its `spare`.
When its prompt has been read up to the last token (with whole chunks: up to the last multiple), the
state is copied there, and is its *base*. At its end there are three cases:
- nothing of the answer is kept: the base, and what is left of the prompt is its tail;
- the answer ended with a token that is kept: the state in the slot has read all but that one;
- else the slot has read other tokens than those that are kept, and a *rebuild* takes its place:
  a sequence that reads the base's tail and the answer, but for the last token, after the base.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from engine.cache.disk_tier import DiskTier
from engine.cache.finished_states import FinishedStates
from engine.cache.named_states import NamedStates
from engine.cache.prefix_cache import CacheHit, Place, PrefixCache
from engine.cache.resume_point import ResumePoint
from engine.cache.sequence_state import SequenceState
from engine.cache.storage.file_store import StateFileStore
from engine.cache.storage.snapshot import StateLayout
from engine.cache.tiered_store import CachedState, TieredStateStore
from engine.cache.transfer import StateTransfer
from engine.config import SCAN_CHUNK
from engine.errors import EngineError, InvalidRequest, StateQuota, StepFailed
from engine.protocol.placement import StatePlacement
from engine.protocol.requests import FinishReason, Request
from engine.protocol.sampling_params import SamplingParams
from engine.protocol.token_ids import ID_BYTES, pack_ids
from engine.sequence import Sequence
from engine.step_plan import INITIAL, Admission, Copy, StepPlan


class StateCacheManager(FinishedStates):
    """One per engine. The device has `device_rows` for kept states, from `first_row` on, and main
    memory `host_rows`; `trie_bytes` bounds what is kept of texts to find them by."""

    def __init__(
        self,
        device_rows: int,
        first_row: int,
        host_rows: int = 0,
        *,
        shape: StateLayout | None = None,
        with_whole_chunks: bool = False,
        trie_bytes: int = 2**28,
        ttl: float = 86400.0,
        most_states: int = 2**17,
        shelf: StateFileStore | None = None,
        disk_bytes: int = 0,
        disk_cache_bytes: int = 0,
        variant: str = "",
        home: StatePlacement | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """What is on the shelf is there: named states, up to `disk_bytes`, and cached ones of the
        same `variant` of the model; `home` chooses ids; `clock` is the time of day."""
        self.shape = shape or StateLayout("", 2**31, (1, 1), None)
        self.row_bytes = self.shape.bytes + 4 * self.shape.vocab_size  # of main memory
        self.tiers = TieredStateStore(device_rows, first_row, host_rows)
        self.cache = PrefixCache(self.tiers, trie_bytes, with_whole_chunks)
        self.traffic = StateTransfer(self.tiers, self.shape, shelf)
        self.states = NamedStates(
            self.tiers,
            self.shape,
            ttl=ttl,
            most=most_states,
            shelf=shelf,
            disk_bytes=disk_bytes,
            fetch=self.traffic.fetch,
            clock=clock,
            new_id=(home or StatePlacement()).new_id,
        )
        self.disk = DiskTier(
            self.tiers, self.cache, self.traffic, self.shape, shelf, variant, disk_cache_bytes
        )
        self._with_whole_chunks = with_whole_chunks
        self.on_loaded: Callable[[CachedState], None] = lambda kept: None  # its file has been read
        self._hits = 0
        self._misses: Counter[str] = Counter()

    def collect(self) -> list[CachedState]:
        """What has been read from files since this was last called; also forgets what is out of
        date."""
        self.states.expire()
        self.disk.collect()
        loaded = self.traffic.collect()
        for kept in loaded:
            if kept.node is not None and not kept.has_row and not kept.files:
                self.cache.forget(kept)  # else it could not be had just now, for want of a row, say
        for kept in loaded:
            self.on_loaded(kept)
        return loaded

    # A sequence's life.

    def accept(self, sequence: Sequence) -> None:
        """Takes down what a new sequence starts from and is to leave.

        Raises StateNotFound, StateBusy, StateQuota or InvalidRequest.
        """
        request = sequence.request
        if not request.state and request.keep is None:
            return
        keep = request.keep
        # First of all, since from then on no other engine replaces what it starts from.
        id = self.states.begin(request.owner, keep.id, "keep") if keep and keep.store else ""
        try:
            source = self.states.source(request.owner, request.state, request.state_optional)
            if source is None and not request.prompt:
                raise InvalidRequest(
                    f"prompt is empty, and there is no state {request.state!r} to go on from",
                    param="prompt",
                )
        except EngineError:
            if id:
                self.states.end(request.owner, id)
            raise
        keeping = SequenceState(source, keep, id)
        if source is not None:
            self.tiers.hold(source.kept)
            sequence.go_on_from(source.tail)
        sequence.keeping = keeping

    def find(self, sequence: Sequence) -> CacheHit:
        """Where it may start. With `awaited` it has to wait for that; Raises EngineError where it
        cannot start at all."""
        keeping = sequence.keeping
        source = None if keeping is None or keeping.source is None else keeping.source.kept
        look = source is None or sequence.request.cache_points
        found = self.cache.look(sequence) if look else CacheHit()
        if found.kept is not None and not found.kept.has_row:
            self.disk.fetch(found.kept)
            sequence.loads += 1
            return CacheHit(loading=found.kept)
        if keeping is not None and source is not None and not (found.kept or found.awaited):
            found.reason = ""
            if not source.has_row:
                self.traffic.load(source, keeping.loads, "state")
                keeping.loads += 1
                return CacheHit(loading=source)
            found.kept = source
        if keeping is not None and keeping.keep is not None and found.awaited is None:
            self._reserve(sequence, keeping, found)
        return found

    def successor(self, sequence: Sequence) -> ResumePoint | None:
        """What has the name now of the state that it was to go on from, where that is another."""
        keeping, request = sequence.keeping, sequence.request
        if keeping is None or keeping.source is None:
            return None
        latest = self.states.source(request.owner, request.state, optional=True)
        return None if latest is keeping.source else latest

    def change_source(self, sequence: Sequence, source: ResumePoint) -> None:
        """It goes on from this one; nothing has been found or reserved for it yet."""
        keeping = sequence.keeping
        assert keeping is not None and keeping.source is not None and keeping.spare is None
        self.tiers.hold(source.kept)
        self.tiers.release(keeping.source.kept)
        keeping.source, keeping.loads = source, 0
        sequence.go_on_from(source.tail)

    def _reserve(self, sequence: Sequence, keeping: SequenceState, found: CacheHit) -> None:
        base = sequence.prompt_tokens - 1
        if self._with_whole_chunks:
            base = base // SCAN_CHUNK * SCAN_CHUNK
        if found.kept is not None:
            self.tiers.use(found.kept)  # it stays where it is in this plan
        owner = sequence.request.owner
        if keeping.id:
            self.states.check_part(owner, keeping.id)
        spare = CachedState(self._before(sequence) + base, owner)
        if not self.tiers.put(spare):
            raise StateQuota("no memory is left for a state; delete some, or wait for others")
        keeping.spare = self.tiers.hold(spare)
        if base > found.length:
            found.ends = sorted({*found.ends, base})

    def admit(self, plan: StepPlan, sequence: Sequence, found: CacheHit) -> None:
        """It starts there: plans the copies and sets its marks and position."""
        kept, keeping, request = found.kept, sequence.keeping, sequence.request
        place, cached, before = None, found.length, 0
        if cached:
            self._hits += 1
        elif found.reason:
            self._misses[found.reason] += 1
        if kept is not None:
            place = self.tiers.use(kept)
            if kept.node is not None:
                self.disk.used(kept)
        self.cache.claim(sequence, found.marks)
        sequence.marks = found.ends
        sequence.position = sequence.anchor = cached
        sequence.cached_tokens = max(cached - sequence.lead, 0)  # of its own prompt
        if keeping is not None:
            before = keeping.before
            if (spare := keeping.due(cached)) is not None:
                self.tiers.moves.append(Copy(INITIAL if place is None else place, spare.place))
                self._based(keeping, spare, cached)
        text = sequence.text if sequence.text is not request.prompt else b""
        plan.admit.append(
            Admission(request, sequence.key, sequence.slot, place, cached, text, before)
        )
        if keeping is not None:
            self._leave_source(keeping)

    def passes(self, plan: StepPlan, sequence: Sequence, length: int) -> None:
        """The plan reads its text up to `length`: plans the snapshots that are due there."""
        kept = self.cache.reserve(sequence, length)
        if kept is not None:
            key = sequence.key if kept.logits else -1
            plan.after.append(Copy(sequence.slot, kept.place, key))
        keeping = sequence.keeping
        if keeping is not None and (spare := keeping.due(length)) is not None:
            plan.after.append(Copy(sequence.slot, spare.place))

    def landed(self, sequence: Sequence, length: int) -> Place | None:
        """It has read its text up to `length`. Returns what others may have waited for."""
        keeping = sequence.keeping
        if keeping is not None and (spare := keeping.due(length)) is not None:
            self._based(keeping, spare, length)
        return self.cache.landed(sequence.key, length)

    def may_end(self, sequence: Sequence, reason: FinishReason, kept: int | None) -> bool:
        """Whether a client's word ends it; of its answer `kept` tokens are to be kept (None:
        all)."""
        keeping = sequence.keeping
        if keeping is None:
            return True
        if keeping.rebuilds is not None:  # it has ended already, but for what is kept of it
            return reason == "abort"
        keeping.kept_tokens = None if kept is None else max(kept, 0)
        return True

    def cache_answer(self, sequence: Sequence, reason: FinishReason, read: int | None) -> None:
        """It ends, and has nothing else to do with kept states. Its slot's has read `read` tokens
        of the answer."""
        if read is not None and reason in ("stop", "length"):
            self.cache.keep_answer(sequence, read)

    def hand_over(self, sequence: Sequence) -> None:
        """Its slot goes to another one in the plan being made, before it is known how it ends."""
        self.cache.save_answer(sequence)

    def needs_rebuild(
        self, sequence: Sequence, keeping: SequenceState, reason: FinishReason, read: int | None
    ) -> bool:
        """It ends: whether its state has to be made from its base. Its slot's has read `read`
        tokens of the answer."""
        if keeping.rebuilds is not None or not keeping.has_base:
            return False
        answer = keeping.answer_of(sequence)
        return reason != "abort" and len(answer) > 0 and read != len(answer) - 1

    def rebuild(self, sequence: Sequence, key: int, reason: FinishReason, now: float) -> Sequence:
        """The sequence that takes the place of this one, which has ended."""
        keeping, request = sequence.keeping, sequence.request
        assert keeping is not None
        answer = keeping.answer_of(sequence)
        text = sequence.text[keeping.base * ID_BYTES :] + pack_ids(answer[:-1])
        again = Request(
            id=request.id,
            prompt=text,
            sampling=SamplingParams(max_tokens=0),
            owner=request.owner,
            priority=request.priority,
        )
        heir = Sequence(key, sequence.client, again, (), now)
        heir.keeping = keeping
        keeping.rebuilds, keeping.reason, keeping.answer = sequence, reason, answer
        sequence.keeping = None
        return heir

    def readmit(self, plan: StepPlan, heir: Sequence) -> None:
        """A rebuild begins, in a slot."""
        assert heir.keeping is not None and heir.keeping.spare is not None
        spare = heir.keeping.spare
        if not spare.has_row:
            raise StepFailed("the state that was to be kept is lost")
        place = self.tiers.use(spare)
        plan.admit.append(
            Admission(heir.request, heir.key, heir.slot, place, 0, heir.text, spare.position)
        )

    def leave(self, sequence: Sequence) -> list[Place]:
        """It reads no more: what others need wait for no longer."""
        return self.cache.leave(sequence.key)

    def end(self, sequence: Sequence) -> None:
        """It is over: it holds nothing any more."""
        keeping = sequence.keeping
        if keeping is None:
            return
        self._leave_source(keeping)
        if keeping.spare is not None:
            self.tiers.release(keeping.spare)
            keeping.spare = None
        if keeping.id:
            self.states.end(sequence.request.owner, keeping.id)
            keeping.id = ""

    def load(self, slots: int, state_bytes: int) -> dict[str, Any]:
        """Of Stats: the load, where sequences use so many slots, of so many bytes each."""
        return {
            "state_bytes": (slots + self.tiers.device_used) * state_bytes,
            "host_state_bytes": self.tiers.host_used * self.row_bytes,
            "disk_state_bytes": self.states.files * self.shape.bytes + self.disk.bytes,
            "states": len(self.states),
        }

    def happened(self) -> dict[str, Any]:
        """Of Stats: what happened since the last call."""
        told = {
            "prefix_hits": self._hits,
            "prefix_misses": dict(self._misses),
            "evictions": dict(self.tiers.evictions),
            "store_errors": self.states.store_errors,
        }
        self._hits, self._misses, self.tiers.evictions = 0, Counter(), Counter()
        self.states.store_errors = 0
        return told

    def fail(self, plan: StepPlan) -> None:
        """What a failed plan copied to is lost, but for what a file has."""
        places = self.tiers.tainted({move.target for move in (*plan.before, *plan.after)})
        lost = self.tiers.lost(places)
        self.states.drop({kept for kept in lost if not kept.written})
        for kept in lost:
            if kept.node is not None and kept.written:
                self.tiers.rest(kept)
            else:
                self.cache.forget(kept)
                self.tiers.vacate(kept)
        for one in plan.exports:
            self.traffic.arrived(one.ticket, None)

    def _based(self, keeping: SequenceState, spare: CachedState, length: int) -> None:
        keeping.base = length
        self.tiers.stand(spare)

    def _leave_source(self, keeping: SequenceState) -> None:
        if keeping.source is not None and not keeping.left:
            keeping.left = True
            self.tiers.release(keeping.source.kept)
