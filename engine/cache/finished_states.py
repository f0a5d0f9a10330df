"""FinishedStates: stores and exports the states of sequences that have ended.

The client hears of the end only after the state's file, if it has one, was written. A state in
progress is a PendingFinish:

| step | runs | next |
| --- | --- | --- |
| `finish` | when the sequence ends | `_store`; to be exported: the next plan exports it |
| `_on_exported` | when that plan has run | a worker thread makes the snapshot |
| `_on_serialized` | in `StateTransfer.collect` | `_store` |
| `_store` | | `NamedStates.store`; not to be stored: the client is told |
| `_on_stored` | when its file is written, or could not be | the client is told |

`StoreWaiters` handles everything that ends the waiting early.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import partial

from engine.cache.named_states import NamedStates
from engine.cache.resume_point import ResumePoint
from engine.cache.sequence_state import SequenceState
from engine.cache.storage import snapshot
from engine.cache.storage.snapshot import MOST_RECENT, StateLayout
from engine.cache.storage.worker_threads import Result
from engine.cache.store_waiters import StoreResult
from engine.cache.tiered_store import TieredStateStore
from engine.cache.transfer import StateTransfer
from engine.errors import EngineError, StepFailed
from engine.protocol.events import Finished
from engine.protocol.requests import FinishReason, KeepState
from engine.protocol.token_ids import ID_BYTES, pack_ids, unpack_ids
from engine.sequence import Sequence

OnFinished = Callable[[Finished | EngineError], None]

LEAST_PATIENCE = 2.0  # seconds to wait for a state's file, even if the request's timeout is shorter


@dataclass(frozen=True, slots=True)
class PendingFinish:
    """The state of a sequence that has ended, on its way to being stored or exported."""

    answered: Sequence  # the sequence whose answer is reported
    reason: FinishReason
    ended: float  # time of its end, by the scheduler's clock
    then: OnFinished
    keep: KeepState
    owner: str
    id: str  # reserved, if the state is to be stored
    point: ResumePoint
    waiter: Hashable  # the key of its waiter in StoreWaiters

    def tell(self, result: StoreResult = None, content: bytes = b"") -> None:
        """Report the end to the client, with the state's name and its snapshot."""
        if isinstance(result, EngineError):
            self.then(result)
        else:
            self.then(self.answered.finished(self.reason, self.ended, result, content))


class FinishedStates:
    """Stores and exports the states of ended sequences; one per engine."""

    def __init__(
        self,
        layout: StateLayout,
        tiers: TieredStateStore,
        transfer: StateTransfer,
        named: NamedStates,
    ) -> None:
        self._layout = layout
        self._tiers = tiers
        self._transfer = transfer
        self._named = named

    def finish(
        self,
        sequence: Sequence,
        own: SequenceState,
        answered: Sequence,
        reason: FinishReason,
        now: float,
        then: OnFinished,
    ) -> None:
        """Store and export the state of a sequence that is ending and still has its slot.

        Args:
            sequence: the sequence that ends.
            own: its named state.
            answered: the sequence whose state it has rebuilt, else `sequence`.
            reason: the reported finish reason.
            now: seconds, by the scheduler's clock.
            then: called once, now or later, with the terminal event of `answered` or an error.
        """
        keep = own.keep
        if keep is None or own.base < 0 or reason == "abort":
            then(answered.finished(reason, now))
            return
        if not own.has_base:
            then(StepFailed("the state to be kept was lost"))
            return
        point = self._resume_point(sequence, own, answered)
        id, own.id = own.id, ""  # from here on `sequence` does not cancel it
        pending = PendingFinish(
            answered,
            reason,
            now,
            then,
            keep,
            sequence.request.owner,
            id,
            point,
            (sequence.client, sequence.request.id),
        )
        if keep.export:
            self._transfer.export(point.state, partial(self._on_exported, pending))
        else:
            self._store(pending, b"")

    def _resume_point(
        self, sequence: Sequence, own: SequenceState, answered: Sequence
    ) -> ResumePoint:
        """Make the resume point to be kept, and plan the copy of the slot to its row."""
        target, source = own.target, own.source
        assert target is not None
        answer = own.answer if own.rebuilds else own.answer_of(sequence)
        tokens = own.before + answered.prompt_tokens + len(answer)
        latest = pack_ids(source.recent) if source is not None else b""
        latest += answered.request.prompt[-MOST_RECENT * ID_BYTES :]
        latest += pack_ids(answer[-MOST_RECENT:])
        recent = tuple(unpack_ids(latest[-MOST_RECENT * ID_BYTES :]))
        turns = 1 + (0 if source is None else source.turns)
        if answer:
            self._tiers.copy_into(target, sequence.slot, tokens - 1)
            return ResumePoint(target, pack_ids(answer[-1:]), tokens, True, recent, turns)
        drawn = source is not None and source.drawn and not answered.request.prompt
        tail = answered.text[own.base * ID_BYTES :]
        return ResumePoint(target, tail, tokens, drawn, recent, turns)

    def _on_exported(self, pending: PendingFinish, content: bytes | None) -> None:
        if content is None:
            self._fail(pending, StepFailed("the round that exported the state failed"))
            return
        self._tiers.pin(pending.point.state)  # until it has a name
        serialize = partial(snapshot.write, pending.point.snapshot(content), self._layout)
        self._transfer.run_aside(serialize, partial(self._on_serialized, pending))

    def _on_serialized(self, pending: PendingFinish, content: Result) -> None:
        if isinstance(content, bytes):
            self._store(pending, content)
        else:
            self._fail(pending, StepFailed(f"the snapshot could not be made: {content}"))
        self._tiers.release(pending.point.state)

    def _store(self, pending: PendingFinish, content: bytes) -> None:
        """Store the state if requested; `content` is its snapshot if it was exported."""
        keep, deadline = pending.keep, pending.answered.deadline
        if not keep.store:
            pending.tell(content=content)
            return
        self._named.store(
            pending.owner,
            pending.id,
            pending.point,
            keep.ttl,
            partial(self._on_stored, pending, content),
            must_last=keep.must_last,
            wait=not keep.brief,
            key=pending.waiter,
            due=None if deadline is None else max(deadline, pending.ended + LEAST_PATIENCE),
        )

    @staticmethod
    def _on_stored(pending: PendingFinish, content: bytes, result: StoreResult) -> None:
        pending.tell(result, content)

    def _fail(self, pending: PendingFinish, error: EngineError) -> None:
        if pending.keep.store:
            self._named.cancel(pending.owner, pending.id)
        pending.then(error)
