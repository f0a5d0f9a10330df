"""RequestTable: the requests in flight, where each of them is, and how they end.

A sequence waits, reads its prompt, decodes, and ends once: finished or failed. Then its slot is
free. If a sequence's state must be computed again before it can be stored, a *rebuild* takes over
its slot (`state_manager`), reads the text again, and ends in its place.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable

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
    """Adds requests, and ends them whatever their stage.

    It shares its collaborators with the scheduler, which moves sequences from one to the next; the
    table removes them from all when they end.
    """

    def __init__(
        self,
        cache: StateCacheManager,
        slots: SlotAllocator,
        queue: RequestQueue,
        decoding: DecodeScheduler,
        output: StepOutput,
    ) -> None:
        self._cache = cache
        self._slots = slots
        self._queue = queue
        self._decoding = decoding
        self._output = output
        self.next_key = 0  # key of the next sequence
        # Sequences with a slot that do not decode yet, by key, in order of admission.
        self.prefilling: dict[int, Sequence] = {}
        # sequences in `prefilling` that no plan has admitted yet
        self._rebuilds: list[Sequence] = []
        self._clients: dict[Hashable, dict[int, Sequence]] = {}  # in flight, by client and id
        self._deadlines: Deadlines[Sequence] = Deadlines()
        self._ended: list[int] = []  # keys to report to the runner

    def __bool__(self) -> bool:
        """Return whether any request is in flight."""
        return bool(self._clients)

    @property
    def clients(self) -> Collection[Hashable]:
        """The clients that have requests in flight."""
        return self._clients.keys()

    def has(self, client: Hashable, request_id: int) -> bool:
        """Return whether this request is in flight."""
        return request_id in self._clients.get(client, ())

    def running(self, key: int) -> Sequence | None:
        """Return the sequence with this key if it has a slot and has not ended."""
        return self._decoding.sequences.get(key) or self.prefilling.get(key)

    def reading(self, kind: BatchKind) -> list[Sequence]:
        """Return the sequences whose prompts this kind of plan may read, in order of admission."""
        return [sequence for sequence in self.prefilling.values() if kind.has(sequence)]

    def add(self, sequence: Sequence, now: float) -> None:
        """Add a sequence, made with `next_key`, to the queue; the cache must have accepted it."""
        self.next_key += 1
        self._clients.setdefault(sequence.client, {})[sequence.request.id] = sequence
        self._queue.enqueue(sequence, now)
        if sequence.deadline is not None:
            self._deadlines.put(sequence, sequence.deadline)

    # Ends.

    def abort(
        self,
        client: Hashable,
        ids: Iterable[int] | None,
        reason: FinishReason,
        now: float,
        kept: Iterable[int] = (),
    ) -> None:
        """End requests early; see `Scheduler.abort`."""
        lengths, over = iter(kept), []
        for request_id in list(self._clients.get(client, ()) if ids is None else ids):
            sequence, length = self._clients.get(client, {}).get(request_id), next(lengths, None)
            if sequence is None:
                over.append((client, request_id))
            elif self._cache.may_end(sequence, reason, length):
                self.finish(sequence, reason, now)
        if reason == "abort":
            self._cache.stop_waiting(over, "the request was ended early")

    def abort_all(self, now: float) -> None:
        """End every request as aborted."""
        for sequence in self._in_flight():
            self.finish(sequence, "abort", now)

    def expire(self, now: float) -> None:
        """End requests whose timeout has passed, even if they only wait for a state's file."""
        for sequence in self._deadlines.overdue(now):
            self.finish(sequence, "timeout", now)
        self._cache.stop_overdue(now, "the request's timeout has passed")

    def finish(
        self, sequence: Sequence, reason: FinishReason, now: float, read: int | None = None
    ) -> None:
        """End a sequence that was served, completely or in part.

        Args:
            sequence: any that has not ended.
            reason: reported to its client.
            now: seconds.
            read: how many of the answer's tokens the state in its slot has read. None if unknown,
                because the device may have gone on; the answer then gets missing tokens from the
                decode batch.
        """
        if read is None:
            self._decoding.catch_up(sequence)
        if not self._cache.has_named_state(sequence):
            self._cache.store_answer(sequence, reason, read)
            self._output.finished(sequence.client, sequence.finished(reason, now))
            self._end(sequence)
            return
        if self._cache.needs_rebuild(sequence, reason, read):
            self._rebuild(sequence, reason, now)
            return

        def tell(finished: Finished | EngineError) -> None:
            if isinstance(finished, EngineError):
                self._output.failed(sequence.client, sequence.request.id, finished)
            else:
                self._output.finished(sequence.client, finished)

        self._cache.on_finish(sequence, reason, now, tell)
        self._end(sequence)

    def fail(self, sequence: Sequence, error: EngineError) -> None:
        """End a sequence that cannot be served."""
        self._decoding.catch_up(sequence)
        self._end(sequence)
        self._output.failed(sequence.client, sequence.request.id, error)

    def fail_all(self, error: EngineError) -> None:
        """Fail every request."""
        for sequence in self._in_flight():
            self.fail(sequence, error)

    # Parts of plans that concern ending sequences.

    def readmit(self, plan: StepPlan, kind: BatchKind) -> None:
        """Plan the admission of rebuilds, which have their slots already."""
        rebuilds = [one for one in self._rebuilds if kind.has(one)]
        self._rebuilds = [one for one in self._rebuilds if not kind.has(one)]
        for rebuild in rebuilds:
            if rebuild.over:
                continue
            try:
                self._cache.on_readmit(plan, rebuild)
            except EngineError as error:
                self.fail(rebuild, error)

    def ending(self) -> list[Sequence]:
        """Return sequences that end with the round in flight, whatever its result.

        Their slots may be given to others in the next plan.
        """
        own = self._cache.has_named_state
        return [one for one in self._decoding.ending() if not (one.over or own(one))]

    def hand_over(self, sequence: Sequence) -> None:
        """Free the slot of a sequence that is `ending`, before it has ended.

        Its tokens from the round in flight are delivered all the same.
        """
        self._cache.on_slot_reused(sequence)
        self._decoding.hand_over(sequence)
        self._slots.release(sequence.slot)

    def take_ended(self) -> list[int]:
        """Return the keys of the sequences that ended since the last call."""
        ended, self._ended = self._ended, []
        return ended

    def put_back_ended(self, keys: Iterable[int]) -> None:
        """Report these keys with the next plan, because the plan that had them failed."""
        self._ended.extend(keys)

    def _in_flight(self) -> list[Sequence]:
        return [sequence for mine in self._clients.values() for sequence in mine.values()]

    def _rebuild(self, sequence: Sequence, reason: FinishReason, now: float) -> None:
        """Replace a sequence by one that ends when the state to keep has been computed."""
        rebuild = self._cache.rebuild(sequence, self.next_key, reason, now)
        self.next_key += 1
        rebuild.slot, sequence.over = sequence.slot, True
        if sequence.deadline is not None:
            self._deadlines.discard(sequence, sequence.deadline)
        self._clients[sequence.client][sequence.request.id] = rebuild
        self._stop(sequence)
        self.prefilling[rebuild.key] = rebuild
        self._rebuilds.append(rebuild)

    def _end(self, sequence: Sequence) -> None:
        sequence.over = True
        if sequence.deadline is not None:
            self._deadlines.discard(sequence, sequence.deadline)
        mine = self._clients[sequence.client]
        del mine[sequence.request.id]
        if not mine:
            del self._clients[sequence.client]
        if sequence.slot < 0:
            self._queue.remove(sequence)
            self._cache.release(sequence)
            return
        self._queue.refund(sequence, self._cache.answered(sequence).unspent)
        self._cache.release(sequence)
        self._stop(sequence)
        if not sequence.handed_over:
            self._slots.release(sequence.slot)

    def _stop(self, sequence: Sequence) -> None:
        """Remove a sequence that has a slot from everything that runs."""
        self.prefilling.pop(sequence.key, None)
        for awaited in self._cache.cancel_pending(sequence):
            self._queue.resume(awaited)
        self._decoding.remove(sequence)
        self._ended.append(sequence.key)
