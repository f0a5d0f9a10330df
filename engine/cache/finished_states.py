"""FinishedStates: stores and exports the states that sequences leave when they end.

A sequence that leaves a state has ended before its client hears of it: where the state has a file,
that is written first. One state on its way is a PendingFinish:

| step | runs | next |
| --- | --- | --- |
| `finish` | when the sequence ends | `_store`; to be exported: the next plan exports it |
| `_on_exported` | when that plan has run | a worker thread makes the snapshot |
| `_on_serialized` | in `StateTransfer.collect` | `_store` |
| `_store` | | `NamedStates.store`; not to be stored: the client is told |
| `_on_stored` | when its file is there, or could not be written | the client is told |

What ends the waiting early is `StoreWaiters`'.
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

LEAST_PATIENCE = 2.0  # seconds for a state's file, where the request's own time is over before


@dataclass(frozen=True, slots=True)
class PendingFinish:
    """What a sequence that has ended leaves."""

    answered: Sequence  # whose answer it is
    reason: FinishReason
    ended: float  # seconds, by the scheduler's clock
    then: OnFinished
    keep: KeepState
    owner: str
    id: str  # reserved, where it is to be stored
    point: ResumePoint
    waiter: Hashable  # by which StoreWaiters finds it

    def tell(self, result: StoreResult = None, content: bytes = b"") -> None:
        """Tells its client that it has ended, with the state's name and its snapshot."""
        if isinstance(result, EngineError):
            self.then(result)
        else:
            self.then(self.answered.finished(self.reason, self.ended, result, content))


class FinishedStates:
    """One per engine."""

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
        """Stores and exports what a sequence leaves that ends; its slot is still its own.

        Args:
            answered: the sequence whose state it has rebuilt, else itself.
            now: seconds, by the scheduler's clock.
            then: called once, now or later, with how `answered` has ended or why that failed.
        """
        keep = own.keep
        if keep is None or own.base < 0 or reason == "abort":
            then(answered.finished(reason, now))
            return
        if not own.has_base:
            then(StepFailed("the state that was to be kept is lost"))
            return
        point = self._resume_point(sequence, own, answered)
        id, own.id = own.id, ""  # it is no more the sequence's to cancel
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
        """What is left; plans the copy to its row."""
        target, source = own.target, own.source
        assert target is not None
        answer = own.answer if own.rebuilds else own.answer_of(sequence)
        tokens = own.before + answered.prompt_tokens + len(answer)
        latest = pack_ids(source.recent) if source is not None else b""
        latest += answered.request.prompt[-MOST_RECENT * ID_BYTES :]
        latest += pack_ids(answer[-MOST_RECENT:])
        recent = tuple(unpack_ids(latest[-MOST_RECENT * ID_BYTES :]))
        if answer:
            self._tiers.copy_into(target, sequence.slot, tokens - 1)
            return ResumePoint(target, pack_ids(answer[-1:]), tokens, True, recent)
        drawn = source is not None and source.drawn and not answered.request.prompt
        return ResumePoint(target, answered.text[own.base * ID_BYTES :], tokens, drawn, recent)

    def _on_exported(self, pending: PendingFinish, content: bytes | None) -> None:
        if content is None:
            self._fail(pending, StepFailed("the round that was to export the state failed"))
            return
        self._tiers.pin(pending.point.state)  # until it has its name
        serialize = partial(snapshot.write, pending.point.snapshot(content), self._layout)
        self._transfer.run_aside(serialize, partial(self._on_serialized, pending))

    def _on_serialized(self, pending: PendingFinish, content: Result) -> None:
        if isinstance(content, bytes):
            self._store(pending, content)
        else:
            self._fail(pending, StepFailed(f"the snapshot could not be made: {content}"))
        self._tiers.release(pending.point.state)

    def _store(self, pending: PendingFinish, content: bytes) -> None:
        """`content` is its snapshot, where it was exported."""
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
