"""FinishedStates: what sequences leave when they end, how it is kept, and when they are told.

A sequence that leaves a state has ended before its client hears of it: where the state has a file,
that is written first, and snapshots are made aside. What ends the waiting early is
`store_waiters`'s.
"""

from __future__ import annotations

from collections.abc import Callable

from engine.cache.named_states import NamedStates
from engine.cache.resume_point import ResumePoint
from engine.cache.sequence_state import SequenceState
from engine.cache.storage import snapshot
from engine.cache.storage.snapshot import MOST_RECENT, StateLayout
from engine.cache.storage.worker_threads import Result
from engine.cache.store_waiters import Told
from engine.cache.tiered_store import TieredStateStore
from engine.cache.transfer import StateTransfer
from engine.errors import EngineError, StepFailed
from engine.protocol.events import Finished
from engine.protocol.requests import FinishReason
from engine.protocol.token_ids import ID_BYTES, pack_ids, unpack_ids
from engine.sequence import Sequence
from engine.step_plan import Copy

Tell = Callable[[Finished | EngineError], None]

LEAST_PATIENCE = 2.0  # seconds for a state's file, where the request's own time is over before


class FinishedStates:
    """The half of StateCacheManager, which has these, that keeps what sequences leave."""

    shape: StateLayout
    tiers: TieredStateStore
    traffic: StateTransfer
    states: NamedStates

    def conclude(
        self,
        sequence: Sequence,
        keeping: SequenceState,
        told: Sequence,
        reason: FinishReason,
        now: float,
        tell: Tell,
    ) -> None:
        """Keeps what is to be kept of a sequence that ends, and tells how it ended, when it is
        kept; `told` is the one whose state it rebuilt, else itself. Its slot is still its own."""
        keep = keeping.keep
        if keep is None or keeping.base < 0 or reason == "abort":
            tell(told.finished(reason, now))
            return
        if not keeping.has_base:
            tell(StepFailed("the state that was to be kept is lost"))
            return
        standing = self._standing(sequence, told, keeping)
        id, keeping.id, owner = keeping.id, "", sequence.request.owner

        def name(content: bytes = b"") -> None:
            if not keep.store:
                tell(told.finished(reason, now, None, content))
                return

            def stored(info: Told) -> None:
                if isinstance(info, EngineError):
                    tell(info)
                else:
                    tell(told.finished(reason, now, info, content))

            due = None
            if told.deadline is not None:
                due = max(told.deadline, now + LEAST_PATIENCE)
            waiter = sequence.client, sequence.request.id
            self.states.put(
                owner,
                id,
                standing,
                keep.ttl,
                stored,
                must=keep.must_last,
                wait=not keep.brief,
                key=waiter,
                due=due,
            )

        if not keep.export:
            name()
            return

        def lose(error: EngineError) -> None:
            if keep.store:
                self.states.end(owner, id)
            tell(error)

        def fetched(state: bytes | None) -> None:
            if state is None:
                lose(StepFailed("the round that was to export the state failed"))
                return
            self.tiers.hold(standing.kept)

            def made(content: Result) -> None:
                if isinstance(content, bytes):
                    name(content)
                else:
                    lose(StepFailed(f"the snapshot could not be made: {content}"))
                self.tiers.release(standing.kept)

            self.traffic.do(lambda: snapshot.write(standing.snapshot(state), self.shape), made)

        self.traffic.fetch(standing.kept, fetched)

    def _standing(self, sequence: Sequence, told: Sequence, keeping: SequenceState) -> ResumePoint:
        """What is kept; plans the copy to where it is to lie."""
        spare, source = keeping.spare, keeping.source
        assert spare is not None
        answer = keeping.answer if keeping.rebuilds else keeping.answer_of(sequence)
        tokens = self._before(sequence) + told.prompt_tokens + len(answer)
        latest = pack_ids(source.recent) if source is not None else b""
        latest += told.request.prompt[-MOST_RECENT * ID_BYTES :] + pack_ids(answer[-MOST_RECENT:])
        recent = tuple(unpack_ids(latest[-MOST_RECENT * ID_BYTES :]))
        if answer:
            self.tiers.moves.append(Copy(sequence.slot, spare.place))
            spare.position = tokens - 1
            return ResumePoint(spare, pack_ids(answer[-1:]), tokens, True, recent)
        drawn = source is not None and source.drawn and not told.request.prompt
        return ResumePoint(spare, told.text[keeping.base * ID_BYTES :], tokens, drawn, recent)

    def _before(self, sequence: Sequence) -> int:
        """Tokens that the state at the beginning of its text has read."""
        return 0 if sequence.keeping is None else sequence.keeping.before
