"""Scheduler: which tokens of which sequences the next round reads; integers only, no torch.

Continuous batching: a round decodes tokens of every sequence whose prompt has been read, and reads
up to `max_step_tokens` prompt tokens of the others. A state never grows, so a request is admitted
as soon as a slot is free, in the order that `request_queue` decides. `decode_scheduler` decides how
many decode steps a round takes. If the device samples by itself (`StepPlan.plain`), the next round
is planned before the results of this one are known. Rows for which the host samples, such as those
with a grammar, take one step a round, alternating with the others.

Prompt chunks (`prefill_budget`) end where states are to be cached (`state_manager`). With whole
chunks, that changes no bit of an answer.

Invariants:

- Plans are completed in the order in which they were made, by `commit` or `fail`.
- Plan N+1 may be made before round N has ended (`schedule_ahead`), plan N+2 may not. It uses
  nothing that round N's results decide: a sequence may turn out to have ended, and the tokens that
  its row then samples are dropped.
- The device executes plans in order. So a free slot is given to another sequence in the next plan,
  even if a round in flight still writes to it.
- At most one copy of a plan writes to a row of the state pool. A row from which a plan admits a
  request is not reused in that plan.
- A sequence is in one place: in the queue (ready or held), in `RequestTable.prefilling`, in
  `DecodeScheduler.sequences`, or it has ended.
- A sequence without a slot waits, and has read nothing. Nothing that runs is preempted.
- A request ends in exactly one `Finished` or `Failed`, its last event.
- A round reads at most `max_step_tokens` prompt tokens. It takes several decode steps only if its
  plan is `plain`.
"""

from __future__ import annotations

import logging
import sys
from array import array
from collections.abc import Collection, Hashable, Iterable
from dataclasses import dataclass

import msgspec

from engine.cache.state_manager import StateCacheManager
from engine.errors import EngineError, StateNotFound
from engine.protocol.events import Run, Scores, Stats, StepEvents
from engine.protocol.logprobs import PackedLogprobs
from engine.protocol.requests import FinishReason, Request
from engine.protocol.token_ids import pack_ids
from engine.protocol.validation import check_request
from engine.scheduler.decode_scheduler import BatchKind, DecodeScheduler
from engine.scheduler.output import StepOutput
from engine.scheduler.prefill_budget import AdmissionLimit, PrefillBudget
from engine.scheduler.request_queue import RequestQueue
from engine.scheduler.request_table import RequestTable
from engine.sequence import Sequence
from engine.slot_allocator import SlotAllocator
from engine.step_plan import PrefillChunk, Sampled, StepPlan, StepResult
from engine.structured_output.grammar_cache import GrammarCache
from engine.structured_output.masks import MaskBudget

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class SchedulerConfig:
    """The limits of one scheduler, and the abilities of its runner."""

    vocab_size: int
    eos_token_ids: tuple[int, ...]  # each of them ends a text
    slots: int  # rows of the state pool for running sequences, from row 0 on
    state_bytes: int  # size of one row, for the statistics
    max_step_tokens: int  # the most prompt tokens that a round reads
    max_waiting: int  # the most requests without a slot
    max_waiting_tokens: int = sys.maxsize  # the most prompt tokens of waiting requests
    most_steps: int = 1  # the most decode steps in a round; with 1, no plan is plain
    overlaps: bool = False  # `schedule_ahead` will be called


class Scheduler:
    """Turns requests into plans, and results of rounds into events.

    For each round call `schedule`, execute the plan, then call `commit`, or `fail` if it raised. In
    between, `schedule_ahead` may return the plan to follow. `enqueue`, `abort` and `events` may be
    called at any time between these calls. One thread makes all calls. A client is any hashable
    value. Times are seconds of any one monotonic clock.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        cache: StateCacheManager,
        grammars: GrammarCache | None = None,
    ) -> None:
        """Create a scheduler without requests.

        Args:
            config: limits and sizes.
            cache: the engine's cached and named states, whose rows follow those of the slots.
            grammars: the model's grammars; None if requests cannot have one.
        """
        self._config = config
        self._cache = cache
        self._grammars = grammars or GrammarCache(None)
        self._slots = SlotAllocator(config.slots)
        self._queue = RequestQueue(config.max_waiting, config.max_waiting_tokens)
        self._decoding = DecodeScheduler(config.most_steps, config.overlaps)
        self._output = StepOutput()
        self._table = RequestTable(cache, self._slots, self._queue, self._decoding, self._output)
        self._admission = AdmissionLimit(config.slots, config.overlaps)
        self._budgets = {
            kind: PrefillBudget(config.max_step_tokens)
            for kind in (BatchKind.ALL, BatchKind.HOSTED)
        }
        self._budgets[BatchKind.PLAIN] = self._budgets[BatchKind.ALL]
        self._refusal: EngineError | None = None  # the error for all new requests
        self._now = 0.0  # time of the latest commit
        self._step = Stats()  # counters of the latest round, until `events`

    @property
    def has_work(self) -> bool:
        """Whether there is something to run or to report."""
        return bool(self._table or self._output or self._cache.busy)

    # Requests.

    def enqueue(self, client: Hashable, request: Request, now: float) -> None:
        """Add a request to the queue, or report a refusal as an event.

        A second request with an id that is in flight is ignored. Never raises because of the
        request.

        Args:
            client: receives its events.
            request: its id is unique within the client's requests in flight.
            now: seconds; its timeout counts from here.
        """
        if self._table.has(client, request.id):
            log.warning("ignored a second request with id %d, which is in flight", request.id)
            return
        key, eos = self._table.next_key, self._config.eos_token_ids
        sequence = Sequence(key, client, request, eos, now)
        try:
            self._check(request, now)
            awaited = self._cache.fetch(sequence)
            if awaited is None:
                self._cache.on_add(sequence)
        except EngineError as error:
            self.reject(client, request.id, error)
            return
        self._table.add(sequence, now)
        if awaited is not None:
            self._queue.hold(sequence, awaited)

    def _check(self, request: Request, now: float) -> None:
        if self._refusal is not None:
            raise self._refusal
        check_request(request, self._config.vocab_size, self._config.eos_token_ids)
        refusal = self._queue.refusal(request.owner, request.prompt_tokens, self._slots.free, now)
        if refusal is not None:
            raise refusal

    def reject(self, client: Hashable, request_id: int, error: EngineError) -> None:
        """Report a request that was never enqueued as failed."""
        self._output.failed(client, request_id, error)

    def refuse(self, error: EngineError) -> None:
        """Make all requests that are enqueued from now on fail with `error`."""
        self._refusal = error

    def abort(
        self,
        client: Hashable,
        ids: Iterable[int] | None,
        reason: FinishReason,
        now: float,
        kept: Iterable[int] = (),
    ) -> None:
        """End requests early; ids that are unknown or have ended are ignored.

        Requests that only wait for their states' files stop waiting.

        Args:
            client: whose requests they are.
            ids: which ones; None: all of the client's.
            reason: the finish reason to report.
            now: seconds.
            kept: parallel to `ids`, how many tokens of the answer belong to the kept state
                (`Abort.kept`); empty: all that were delivered.
        """
        self._table.abort(client, ids, reason, now, kept)

    def abort_all(self, now: float) -> None:
        """End every request as aborted."""
        self._table.abort_all(now)

    # Rounds.

    def schedule(self, now: float) -> StepPlan:
        """Make the next plan. No round may be in flight.

        Returns:
            The plan; if it is `empty`, there is nothing to do yet and it must not be executed.
        """
        self._look_around(now)
        return self._first_plan(self._decoding.kinds(), now, [])

    def schedule_ahead(self, now: float) -> StepPlan:
        """Make the plan that follows the one round in flight, whatever its result.

        Returns:
            An empty plan if nothing follows, if two rounds are in flight, or if it cannot be known
            what follows because the host samples for rows of both.
        """
        self._look_around(now)
        ending = self._table.ending()
        free = self._slots.free + len(ending)
        coming = sum(one.max_tokens > 1 for one in self._table.reading(BatchKind.PLAIN))
        coming += min(self._queue.lasting, free)
        first = self._next_waiting(free) if free else None
        prompts = [*self._table.prefilling.values(), *([first] if first else [])]
        return self._first_plan(self._decoding.kinds_ahead(prompts, coming), now, ending)

    def _first_plan(
        self, kinds: Collection[BatchKind], now: float, ending: list[Sequence]
    ) -> StepPlan:
        """Return the plan of the first kind that has something to do."""
        if kinds:
            self._cache.begin_plan()
        for kind in kinds:
            plan = self._schedule(kind, now, ending)
            if not plan.empty:
                return plan
        return StepPlan()

    def _schedule(self, kind: BatchKind, now: float, ending: list[Sequence]) -> StepPlan:
        """Make a plan of this kind; the slots of `ending` sequences may go to others."""
        plan = StepPlan()
        self._table.readmit(plan, kind)
        self._schedule_admissions(plan, kind, now, ending)
        self._schedule_prefill(plan, kind, now)
        self._schedule_decode(plan, kind)
        if not plan.empty or self._cache.exporting:
            self._cache.fill_plan(plan)
        if not plan.empty:
            plan.release = self._table.take_ended()
            self._decoding.start(plan)
        return plan

    def commit(self, plan: StepPlan, result: StepResult, now: float) -> None:
        """Apply the result of a round, which is then no longer in flight.

        Sequences that have ended meanwhile are skipped.

        Args:
            plan: the oldest plan that is not completed yet.
            result: the runner's result for it.
            now: seconds.
        """
        self._now = now
        for ticket, state in result.exports.items():
            self._cache.on_exported(ticket, state)
        running = self._table.running
        batch, decoding = self._decoding.complete(plan), len(plan.decode)
        if batch is not None and result.drawn is not None:
            batch.begin_commit(result.drawn)
            joined = (row.key for row in plan.decode if row.token < 0)
            decoding = batch.active - sum(running(key) is not None for key in joined)
        for key, error in result.errors():
            if (sequence := running(key)) is not None:
                self._table.fail(sequence, error)
        for scored in result.scored:
            if (sequence := running(scored.key)) is not None:
                start = scored.start - sequence.lead
                scores = Scores(sequence.request.id, start, scored.reports)
                self._output.scores(sequence.client, scores)
        for chunk in plan.prefill:
            if (sequence := running(chunk.key)) is not None:
                self._commit_chunk(sequence, chunk.start + len(chunk.tokens), now)
        tokens = 0
        for sampled in result.sampled:
            if (sequence := running(sampled.key)) is not None:
                tokens += self._commit_token(sequence, sampled, now)
        if batch is not None and result.drawn is not None:
            commit_last = self._commit_last
            tokens += batch.commit(result.drawn, plan.steps, self._output, commit_last, now)
        left = 0 if batch is None else batch.active
        self._step = self._decoding.measure(plan, result, decoding, left, tokens)

    def fail(self, plan: StepPlan, error: EngineError) -> None:
        """Fail every sequence that took part in a plan whose execution failed.

        Plans that were started after it must be failed too.
        """
        self._cache.on_plan_failed(plan)
        for sequence in self._decoding.fail(plan):
            self._table.fail(sequence, error)
        for key in plan.participants():
            if (participant := self._table.running(key)) is not None:
                self._table.fail(participant, error)
        self._table.put_back_ended(plan.release)

    def fail_all(self, error: EngineError) -> None:
        """Fail every request, and every later one, because nothing can be served any more."""
        self._table.fail_all(error)
        self.refuse(error)

    # Events.

    def load(self, of: Stats | None = None) -> Stats:
        """Return the current load, together with the round's counters in `of`."""
        return msgspec.structs.replace(
            of or Stats(),
            running=self._slots.used,
            waiting=len(self._queue),
            waiting_tokens=self._queue.tokens,
            pace=self._queue.pace(self._now),
            slots_used=self._slots.used,
            slots_total=self._slots.count,
            **self._cache.load_stats(self._slots.used, self._config.state_bytes),
        )

    def events(self, anybody: Collection[Hashable] = ()) -> dict[Hashable, StepEvents]:
        """Return what happened since the last call, for every client that it concerns.

        Counters that concern no client are included in a later call. Disk errors are not deferred:
        if no other client can receive them, `anybody` gets them.
        """
        listeners: Collection[Hashable] = self._table.clients
        if self._cache.has_store_errors and not self._output:
            listeners = listeners or anybody
        step, self._step = self._step, Stats()
        if not (listeners or self._output):
            return {}
        stats = msgspec.structs.replace(self.load(step), **self._cache.take_counts())
        return self._output.drain(stats, listeners)

    # Scheduling.

    def _look_around(self, now: float) -> None:
        """Resume sequences whose grammar or state has become available, and end overdue ones."""
        for grammar in self._grammars.collect():
            self._queue.resume(grammar)
        for state in self._cache.collect():
            self._queue.resume(state)
        for sequence, error in self._cache.take_fetched():
            self._continue_fetched(sequence, error, now)
        self._table.expire(now)

    def _continue_fetched(self, sequence: Sequence, error: EngineError | None, now: float) -> None:
        """Let a sequence wait for a slot now that the shared store has told what it has."""
        self._queue.remove(sequence)  # the queue counts its present length
        if error is None:
            try:
                self._cache.on_add(sequence)
            except EngineError as refused:
                error = refused
        self._queue.enqueue(sequence, now)
        if error is not None:
            self._table.fail(sequence, error)

    def _schedule_admissions(
        self, plan: StepPlan, kind: BatchKind, now: float, ending: list[Sequence]
    ) -> None:
        """Give slots to waiting requests, unless waiting for more of them pays."""
        free = self._slots.free + len(ending)
        limit, waiting = self._admission.limit(free), min(self._queue.ready, free)
        reading = bool(self._table.reading(kind))
        if waiting < limit and not reading and self._decoding.defers_prompts(kind):
            return
        admitted, masks = 0, MaskBudget()
        # Requests of another kind, whose prompts the next plan reads, are admitted as well if this
        # plan has something to do.
        goes = reading or self._decoding.decodes(kind)
        while (sequence := self._next_waiting(free := self._slots.free + len(ending))) and free:
            own = kind.has(sequence)
            if admitted == limit or not (own or goes) or not masks.has_room(sequence.mask_cost):
                break
            if not self._slots.free:
                # Before the lookup, because freeing the slot may evict the very state that would be
                # found.
                self._table.hand_over(ending.pop(0))
            try:
                found = self._cache.lookup(sequence)
            except EngineError as error:
                if not (isinstance(error, StateNotFound) and self._follow(sequence, now)):
                    self._table.fail(sequence, error)
                continue
            if (awaited := found.awaited or found.loading) is not None:
                self._queue.hold(sequence, awaited)
                continue
            if not own and found.length == sequence.prompt_tokens:
                break  # its first token is sampled in the plan that admits it
            self._queue.dequeue(sequence, sequence.unspent - found.length)
            self._output.started(sequence.client, sequence.request.id)
            sequence.slot = self._slots.allocate()
            self._cache.on_admit(plan, sequence, found)
            admitted, goes = admitted + 1, True
            if sequence.skips_prefill:
                sequence.skip_prefill(now)
                self._decoding.add(sequence)
                continue
            self._table.prefilling[sequence.key] = sequence
            if not sequence.remaining:
                self._schedule_chunk(plan, sequence, 0, now, plan.admit[-1].source)
        self._queue.note_admitted(admitted, now)
        if admitted:
            self._admission.note(self._slots.free)

    def _follow(self, sequence: Sequence, now: float) -> bool:
        """Continue a sequence, whose state is gone, from the state that has its name now.

        Returns False if there is no such state.
        """
        source = self._cache.replacement(sequence)
        if source is None:
            return False
        self._queue.remove(sequence)  # the queue counts its present length
        self._cache.change_source(sequence, source)
        self._queue.enqueue(sequence, now)
        return True

    def _next_waiting(self, free: int) -> Sequence | None:
        """Return the first waiting request whose grammar is compiled.

        Grammars of requests before it are submitted for compilation. While no slot is free only one
        is compiled at a time, because an unused grammar may be evicted again.
        """
        while (sequence := self._queue.first()) and (free or not self._grammars.pending):
            sampling = sequence.request.sampling
            if sampling.grammar is None:
                return sequence
            lacking = self._grammars.lacking(sampling)
            if lacking is None:
                sequence.mask_cost = self._grammars.cost(sampling.grammar)
                return sequence
            if isinstance(lacking, EngineError):
                self._table.fail(sequence, lacking)
            else:
                self._queue.hold(sequence, lacking)
        return None

    def _schedule_prefill(self, plan: StepPlan, kind: BatchKind, now: float) -> None:
        """Share the round's prompt tokens among the sequences that read."""
        reading = [one for one in self._table.reading(kind) if one.remaining]
        for sequence, length in self._budgets[kind].share(reading):
            self._schedule_chunk(plan, sequence, length, now)

    def _schedule_chunk(
        self, plan: StepPlan, sequence: Sequence, length: int, now: float, source: int | None = None
    ) -> None:
        """Plan the next `length` tokens of a prompt.

        With `source` there are none, and the first token is sampled after the hidden state stored
        there.
        """
        if sequence.started_at is None:
            sequence.started_at = now
        start, stop = sequence.position, sequence.position + length
        plan.prefill.append(
            PrefillChunk(
                key=sequence.key,
                slot=sequence.slot,
                start=start,
                tokens=sequence.prompt_slice(start, stop),
                targets=sequence.targets(start, stop),
                score_top=sequence.request.score_top,
                sample=stop == sequence.prompt_tokens and sequence.samples,
                source=source,
            )
        )
        self._cache.on_prefill(plan, sequence, stop)
        sequence.position = stop
        if stop in sequence.marks:
            sequence.anchor = stop

    def _schedule_decode(self, plan: StepPlan, kind: BatchKind) -> None:
        """Add the decode rows; sequences whose prompts end in this plan may join at once."""
        prefilling = self._table.prefilling
        beginning = [prefilling[chunk.key] for chunk in plan.prefill if chunk.sample]
        self._decoding.schedule(plan, kind, beginning)
        for sequence in beginning:
            if sequence.row >= 0:
                del prefilling[sequence.key]

    # Results.

    def _commit_chunk(self, sequence: Sequence, position: int, now: float) -> None:
        """Record that the prompt has been read up to `position`."""
        stored = self._cache.on_stored(sequence, position)
        if stored is not None:
            self._queue.resume(stored)
        if position == sequence.prompt_tokens:
            sequence.is_read = True
            if sequence.max_tokens == 0:
                self._table.finish(sequence, "length", now, read=0)
            elif self._table.prefilling.pop(sequence.key, None) is not None:
                self._decoding.add(sequence)

    def _commit_token(self, sequence: Sequence, sampled: Sampled, now: float) -> int:
        """Deliver a sampled token; return the number of tokens delivered, 0 or 1."""
        verdict = sequence.verdict(sampled.token)
        if verdict == "stop":
            self._table.finish(sequence, "stop", now, read=sequence.drawn)
            return 0
        sequence.append(sampled.token, sampled.report, now)
        request = sequence.request
        if request.stream:
            self._output.token(sequence.client, request.id, sampled.token, sampled.report)
        if sampled.complete:
            verdict = "stop"
        if verdict is not None:
            self._table.finish(sequence, verdict, now, read=sequence.drawn - 1)
        return 1

    def _commit_last(
        self, sequence: Sequence, ids: array[int], reports: PackedLogprobs | None, now: float
    ) -> int:
        """Deliver the tokens with which the device ended a row; return how many there were."""
        taken, verdict = sequence.take_last(ids, now)
        request, reports = sequence.request, reports and reports.part(0, taken)
        if request.stream and taken:
            run = Run([request.id], taken, pack_ids(ids[:taken]), reports)
            self._output.run(sequence.client, run)
        sequence.add_reports(reports)
        if verdict is not None:
            read = sequence.drawn - (verdict == "length")
            self._table.finish(sequence, verdict, now, read)
        return taken
