"""RequestTable: the sequences in flight, where each of them is, and how they end.

A sequence waits, reads its prompt, decodes, and ends once: finished, or failed. Then its slot is
free. One whose kept state has to be made anew leaves its slot to a rebuild (`state_manager`), which
ends for it.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable

from engine.cache.state_manager import StateCacheManager
from engine.deadlines import Deadlines
from engine.errors import EngineError
from engine.protocol.events import Finished
from engine.protocol.requests import FinishReason
from engine.scheduler.decode_scheduler import BatchKind, DecodeScheduler
from engine.scheduler.output import StepOutput
from engine.scheduler.request_queue import RequestQueue
from engine.sequence import Sequence
from engine.slot_allocator import SlotAllocator
from engine.step_plan import StepPlan


class RequestTable:
    """The scheduler's other half: that one moves sequences on."""

    def __init__(
        self, keeper: StateCacheManager, slots: int, waiting: RequestQueue, rounds: DecodeScheduler
    ) -> None:
        self._keeper = keeper
        self._slots = SlotAllocator(slots)
        self._waiting = waiting
        self._prefilling: dict[int, Sequence] = {}  # by key, in order of admission
        self._rebuilding: list[Sequence] = []  # those of them that no plan has admitted yet
        self._rounds = rounds  # the others that run
        self._clients: dict[Hashable, dict[int, Sequence]] = {}  # in flight, by client and id
        self._deadlines: Deadlines[Sequence] = Deadlines()
        self._released: list[int] = []  # keys to be released with the next plan
        self._next_key = 0
        self._outbox = StepOutput()

    def abort_all(self, now: float) -> None:
        """Ends every request as aborted."""
        for sequence in self._in_flight():
            self._finish(sequence, "abort", now)

    def abort(
        self,
        client: Hashable,
        ids: Iterable[int] | None,
        reason: FinishReason,
        now: float,
        kept: Iterable[int] = (),
    ) -> None:
        """Ends requests early (None: all of the client's), ignoring those ended or unknown; `kept`
        as in Abort. Those that have ended but for their states' files wait no longer for these."""
        lengths, over = iter(kept), []
        for request_id in list(self._clients.get(client, ()) if ids is None else ids):
            sequence, length = self._clients.get(client, {}).get(request_id), next(lengths, None)
            if sequence is None:
                over.append((client, request_id))
            elif self._keeper.may_end(sequence, reason, length):
                self._finish(sequence, reason, now)
        states = self._keeper.states
        if reason == "abort" and states.waiters:
            states.give_up(states.waiters.of(over), "the request was ended")

    def _end_overdue(self, now: float) -> None:
        """Those whose time is over, and who wait for a state's file alone."""
        for sequence in self._deadlines.overdue(now):
            self._finish(sequence, "timeout", now)
        states = self._keeper.states
        if states.waiters:
            states.give_up(states.waiters.overdue(now), "the request's time is over")

    def _running(self, key: int) -> Sequence | None:
        return self._rounds.sequences.get(key) or self._prefilling.get(key)

    def _reading(self, turn: BatchKind) -> list[Sequence]:
        """Whose prompts may be read in such a plan."""
        return [sequence for sequence in self._prefilling.values() if turn.has(sequence)]

    def _in_flight(self) -> list[Sequence]:
        return [sequence for mine in self._clients.values() for sequence in mine.values()]

    def _finish(
        self, sequence: Sequence, reason: FinishReason, now: float, read: int | None = None
    ) -> None:
        """`read`: how many of the answer's tokens its slot's state has read, where that is known
        (the device may have gone on); then so are these tokens."""
        if read is None:
            self._rounds.bring_up(sequence)
        keeping = sequence.keeping
        if keeping is None:
            self._keeper.cache_answer(sequence, reason, read)
            self._outbox.finished(sequence.client, sequence.finished(reason, now))
            self._end(sequence)
            return
        if self._keeper.needs_rebuild(sequence, keeping, reason, read):
            self._rebuild(sequence, reason, now)
            return
        told = keeping.rebuilds or sequence
        if told is not sequence and reason == "length":
            reason = keeping.reason

        def tell(finished: Finished | EngineError) -> None:
            if isinstance(finished, EngineError):
                self._outbox.failed(sequence.client, sequence.request.id, finished)
            else:
                self._outbox.finished(sequence.client, finished)

        self._keeper.conclude(sequence, keeping, told, reason, now, tell)
        self._end(sequence)

    def _rebuild(self, sequence: Sequence, reason: FinishReason, now: float) -> None:
        """Another sequence takes its place, which ends when the state is what is to be kept."""
        heir = self._keeper.rebuild(sequence, self._next_key, reason, now)
        self._next_key += 1
        heir.slot, sequence.over = sequence.slot, True
        if sequence.deadline is not None:
            self._deadlines.discard(sequence, sequence.deadline)
        self._clients[sequence.client][sequence.request.id] = heir
        self._leave(sequence)
        self._prefilling[heir.key] = heir
        self._rebuilding.append(heir)

    def _readmit(self, plan: StepPlan, turn: BatchKind) -> None:
        """Those who rebuild a state have their slots already; the plan has to read for them."""
        rebuilding = [one for one in self._rebuilding if turn.has(one)]
        self._rebuilding = [one for one in self._rebuilding if not turn.has(one)]
        for heir in rebuilding:
            if heir.over:
                continue
            try:
                self._keeper.readmit(plan, heir)
            except EngineError as error:
                self._fail(heir, error)

    def _due(self) -> list[Sequence]:
        """Whose slots may go to others in the plan that follows the round under way."""
        return [one for one in self._rounds.due() if one.keeping is None and not one.over]

    def _hand_over(self, due: Sequence) -> None:
        """Its slot does, and what the round brings to whom it was is delivered all the same."""
        self._keeper.hand_over(due)
        self._rounds.hand_over(due)
        self._slots.give_back(due.slot)

    def _fail(self, sequence: Sequence, error: EngineError) -> None:
        self._rounds.bring_up(sequence)
        self._end(sequence)
        self._outbox.failed(sequence.client, sequence.request.id, error)

    def _end(self, sequence: Sequence) -> None:
        sequence.over = True
        if sequence.deadline is not None:
            self._deadlines.discard(sequence, sequence.deadline)
        mine = self._clients[sequence.client]
        del mine[sequence.request.id]
        if not mine:
            del self._clients[sequence.client]
        if sequence.slot < 0:
            self._waiting.remove(sequence)
            self._keeper.end(sequence)
            return
        told = sequence
        if sequence.keeping is not None and sequence.keeping.rebuilds is not None:
            told = sequence.keeping.rebuilds
        self._waiting.give_back(sequence, told.unspent)
        self._keeper.end(sequence)
        self._leave(sequence)
        if not sequence.handed_over:
            self._slots.give_back(sequence.slot)

    def _leave(self, sequence: Sequence) -> None:
        """It does nothing any more."""
        self._prefilling.pop(sequence.key, None)
        for place in self._keeper.leave(sequence):
            self._waiting.resume(place)
        self._rounds.remove(sequence)
        self._released.append(sequence.key)
