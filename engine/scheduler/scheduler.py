"""Scheduler: which tokens of which sequences are read in the next round; integers only, no torch.

Continuous batching: a round decodes tokens of every sequence whose prompt has been read, and reads
up to `max_step_tokens` prompt tokens of the others. State never grows, so a request is admitted as
soon as a slot is free, in the order that `request_queue` decides. Of plain requests (`StepPlan`) a
round takes as many steps as `decode_scheduler` decides, and the next one is planned before its
results are known; those in whose draws the host has a part take one, and turns with the others
(`decode_scheduler`).

Prompt chunks (`prefill_budget`) end where states are to be kept (`state_manager`); with whole
chunks, that changes no bit.
"""

from __future__ import annotations

import logging
import sys
from array import array
from collections.abc import Collection, Hashable

import msgspec

from engine.cache.state_manager import StateCacheManager
from engine.errors import EngineError, StateNotFound
from engine.protocol.events import Run, Scores, Stats, StepEvents
from engine.protocol.logprobs import PackedLogprobs
from engine.protocol.requests import Request
from engine.protocol.token_ids import pack_ids
from engine.protocol.validation import check_request
from engine.scheduler.decode_scheduler import BatchKind, DecodeScheduler
from engine.scheduler.prefill_budget import Intake, PrefillBudget
from engine.scheduler.request_queue import RequestQueue
from engine.scheduler.request_table import RequestTable
from engine.sequence import Sequence
from engine.step_plan import PrefillChunk, Sampled, StepPlan, StepResult
from engine.structured_output.grammar_cache import GrammarCache
from engine.structured_output.masks import MaskBudget

log = logging.getLogger(__name__)


class Scheduler(RequestTable):
    """Turns requests into plans and step results into events.

    Call `plan`, carry it out, then `commit` (or `fail`, when that raised); `add` and `abort` may
    come at any time between these calls. Before `commit`, `plan_ahead` may give the plan that is
    to follow; they are committed in their order. Every request that is added ends in exactly one
    `Finished` or `Failed` of `events`. Times are seconds of any one monotonic clock.

    `most_steps` bounds the steps of a round; with 1, no plan is plain. `overlaps` says whether
    `plan_ahead` will be called.
    """

    def __init__(
        self,
        *,
        vocab_size: int,
        eos_token_ids: tuple[int, ...],
        slots: int,
        share_slots: int,
        max_step_tokens: int,
        max_waiting: int,
        max_waiting_tokens: int = sys.maxsize,
        state_bytes: int,
        most_steps: int = 1,
        overlaps: bool = False,
        with_whole_chunks: bool = False,
        grammars: GrammarCache | None = None,
        keeper: StateCacheManager | None = None,
    ) -> None:
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._budgets = {hosted: PrefillBudget(max_step_tokens) for hosted in (False, True)}
        self._state_bytes = state_bytes
        self._grammars = grammars or GrammarCache(None)
        keeper = keeper or StateCacheManager(
            share_slots, slots, with_whole_chunks=with_whole_chunks
        )
        waiting = RequestQueue(max_waiting, max_waiting_tokens)
        super().__init__(keeper, slots, waiting, DecodeScheduler(most_steps, overlaps))
        self._intake = Intake(slots, overlaps)
        self._refusal: EngineError | None = None  # of everything new
        self._now = 0.0  # of the latest round's end
        self._step = Stats()  # the part of the stats that tells of the latest round, until `events`

    @property
    def has_work(self) -> bool:
        """There is something to run or to report."""
        return bool(self._clients or self._outbox or self._keeper.traffic.busy)

    # Requests in.

    def add(self, client: Hashable, request: Request, now: float) -> None:
        """Takes a request, or reports why not. A second request of an id in flight is ignored."""
        mine = self._clients.get(client, {})
        if request.id in mine:
            log.warning("request id %d is in flight already; ignored", request.id)
            return
        sequence = Sequence(self._next_key, client, request, self._eos_token_ids, now)
        try:
            self._check(request, now)
            self._keeper.accept(sequence)
        except EngineError as error:
            self.reject(client, request.id, error)
            return
        self._next_key += 1
        self._clients.setdefault(client, mine)[request.id] = sequence
        self._waiting.add(sequence, now)
        if sequence.deadline is not None:
            self._deadlines.put(sequence, sequence.deadline)

    def reject(self, client: Hashable, request_id: int, error: EngineError) -> None:
        """Reports a request that is not taken as failed."""
        self._outbox.failed(client, request_id, error)

    def refuse(self, error: EngineError) -> None:
        """From now on new requests fail with `error`."""
        self._refusal = error

    def _check(self, request: Request, now: float) -> None:
        if self._refusal is not None:
            raise self._refusal
        check_request(request, self._vocab_size, self._eos_token_ids)
        refusal = self._waiting.refusal(request.owner, request.prompt_tokens, self._slots.free, now)
        if refusal is not None:
            raise refusal

    # A step.

    def plan(self, now: float) -> StepPlan:
        """The next round; empty only when there is nothing to do yet. None may be under way."""
        self._look_around(now)
        return self._first_of(self._rounds.turns(), now, [])

    def plan_ahead(self, now: float) -> StepPlan:
        """What follows the one round under way, whatever that brings. Empty when nothing does, or
        when that cannot be said, because the host has a part in the draws of both."""
        self._look_around(now)
        due = self._due()
        free = self._slots.free + len(due)
        coming = sum(one.max_tokens > 1 for one in self._reading(BatchKind.PLAIN))
        coming += min(self._waiting.lasting, free)
        first = self._next(free) if free else None
        prompts = [*self._prefilling.values(), *([first] if first else [])]
        return self._first_of(self._rounds.turns_ahead(prompts, coming), now, due)

    def _first_of(self, turns: Collection[BatchKind], now: float, due: list[Sequence]) -> StepPlan:
        """That of the first turn with something to do; slots of those `due` may go to others."""
        if turns:
            self._keeper.tiers.begin_plan()
        plans = (self._plan(now, turn, due) for turn in turns)
        return next((plan for plan in plans if not plan.empty), StepPlan())

    def _plan(self, now: float, turn: BatchKind, due: list[Sequence]) -> StepPlan:
        plan = StepPlan()
        self._readmit(plan, turn)
        free = self._slots.free + len(due)
        most, waiting = self._intake.most(free), min(self._waiting.ready, free)
        if waiting >= most or self._reading(turn) or not self._rounds.is_patient(turn):
            self._admit(plan, now, turn, most, due)
        reading = [one for one in self._reading(turn) if one.remaining]
        for sequence, length in self._budgets[turn is BatchKind.HOSTED].share(reading):
            self._read(plan, sequence, length, now)
        beginning = [self._prefilling[chunk.key] for chunk in plan.prefill if chunk.sample]
        self._rounds.plan(plan, turn, beginning)
        for sequence in (one for one in beginning if one.row >= 0):
            del self._prefilling[sequence.key]
        if not plan.empty or self._keeper.traffic.fetching:
            self._keeper.traffic.take_moves(plan)
        if not plan.empty:
            plan.release, self._released = self._released, []
            self._rounds.start(plan)
        return plan

    def commit(self, plan: StepPlan, result: StepResult, now: float) -> None:
        """Takes in what a plan brought. Sequences that ended meanwhile are passed over."""
        self._now = now
        for ticket, state in result.exports.items():
            self._keeper.traffic.arrived(ticket, state)
        batch, decoding = self._rounds.land(plan), len(plan.decode)
        if batch is not None and result.drawn is not None:
            batch.note(result.drawn)
            joined = (row.key for row in plan.decode if row.token < 0)
            decoding = batch.members - sum(self._running(key) is not None for key in joined)
        for key, error in result.errors():
            sequence = self._running(key)
            if sequence is not None:
                self._fail(sequence, error)
        for scored in result.scored:
            sequence = self._running(scored.key)
            if sequence is not None:
                start = scored.start - sequence.lead
                scores = Scores(sequence.request.id, start, scored.reports)
                self._outbox.scores(sequence.client, scores)
        for chunk in plan.prefill:
            if (sequence := self._running(chunk.key)) is not None:
                self._advance(sequence, chunk.start + len(chunk.tokens), now)
        tokens = 0
        for sampled in result.sampled:
            sequence = self._running(sampled.key)
            if sequence is not None:
                tokens += self._take(sequence, sampled, now)
        if batch is not None and result.drawn is not None:
            tokens += batch.take_in(result.drawn, plan.steps, self._outbox, self._take_last, now)
        left = 0 if batch is None else batch.members
        self._step = self._rounds.note(plan, result, decoding, left, tokens)

    def fail(self, plan: StepPlan, error: EngineError) -> None:
        """The plan could not be carried out: every sequence that took part in it fails.

        So must every plan under way after it.
        """
        self._keeper.fail(plan)
        for sequence in self._rounds.fail(plan):
            self._fail(sequence, error)
        for key in plan.participants():
            if (participant := self._running(key)) is not None:
                self._fail(participant, error)
        self._released.extend(plan.release)

    def fail_all(self, error: EngineError) -> None:
        """Nothing can be served any more: every request fails, and so does every new one."""
        for sequence in self._in_flight():
            self._fail(sequence, error)
        self.refuse(error)

    def load(self, of: Stats | None = None) -> Stats:
        """As it is now; the rest is `of` a round."""
        return msgspec.structs.replace(
            of or Stats(),
            running=self._slots.used,
            waiting=len(self._waiting),
            waiting_tokens=self._waiting.tokens,
            pace=self._waiting.pace(self._now),
            slots_used=self._slots.used,
            slots_total=self._slots.count,
            **self._keeper.load(self._slots.used, self._state_bytes),
        )

    def events(self, anybody: Collection[Hashable] = ()) -> dict[Hashable, StepEvents]:
        """What happened since the last call, for every client that has a part in it; what nobody
        has a part in is told later, but for errors of the disk, of which `anybody` is told."""
        listeners: Collection[Hashable] = self._clients.keys()
        if self._keeper.states.store_errors and not self._outbox:
            listeners = listeners or anybody
        step, self._step = self._step, Stats()
        if not (listeners or self._outbox):
            return {}
        stats = msgspec.structs.replace(self.load(step), **self._keeper.happened())
        return self._outbox.take(stats, listeners)

    # Planning.

    def _look_around(self, now: float) -> None:
        """Whose grammar is compiled and whose state is read by now, and whose time is over?"""
        for grammar in self._grammars.collect():
            self._waiting.resume(grammar)
        for kept in self._keeper.collect():
            self._waiting.resume(kept)
        self._end_overdue(now)

    def _admit(
        self, plan: StepPlan, now: float, turn: BatchKind, most: int, due: list[Sequence]
    ) -> None:
        admitted, masks = 0, MaskBudget()
        # Others than its own, who are read in the next plan, come along where this has some to do.
        goes = self._rounds.decodes(turn) or bool(self._reading(turn))
        while (sequence := self._next(free := self._slots.free + len(due))) is not None and free:
            own = turn.has(sequence)
            if admitted == most or not (own or goes) or not masks.has_room(sequence.mask_cost):
                break
            if not self._slots.free:
                self._hand_over(due.pop(0))  # which may cost the state that would be found
            try:
                found = self._keeper.find(sequence)
            except EngineError as error:
                if not (isinstance(error, StateNotFound) and self._follows(sequence, now)):
                    self._fail(sequence, error)
                continue
            if (awaited := found.awaited or found.loading) is not None:
                self._waiting.hold(sequence, awaited)
                continue
            if not own and found.length == sequence.prompt_tokens:
                break  # its first token is drawn in the plan that admits it
            self._waiting.depart(sequence, sequence.unspent - found.length)
            self._outbox.started(sequence.client, sequence.request.id)
            sequence.slot = self._slots.take()
            self._keeper.admit(plan, sequence, found)
            admitted, goes = admitted + 1, True
            if sequence.begins_drawn:
                sequence.begin_drawn(now)
                self._rounds.add(sequence)
                continue
            self._prefilling[sequence.key] = sequence
            if not sequence.remaining:
                self._read(plan, sequence, 0, now, plan.admit[-1].source)
        self._waiting.note_admitted(admitted, now)
        if admitted:
            self._intake.note(self._slots.free)

    def _follows(self, sequence: Sequence, now: float) -> bool:
        """The state that it was to go on from is gone. Where that is because another one has been
        put in its place since it came, it goes on from that; whether it does."""
        source = self._keeper.successor(sequence)
        if source is None:
            return False
        self._waiting.remove(sequence)  # where its length is counted
        self._keeper.change_source(sequence, source)
        self._waiting.add(sequence, now)
        return True

    def _next(self, free: int) -> Sequence | None:
        """The first that waits and whose grammar is compiled; has those before it compiled, while
        no slot is free one at a time: what is kept for long unused may be forgotten again."""
        while (sequence := self._waiting.first()) and (free or not self._grammars.pending):
            sampling = sequence.request.sampling
            if sampling.grammar is None:
                return sequence
            lacking = self._grammars.lacking(sampling)
            if lacking is None:
                sequence.mask_cost = self._grammars.cost(sampling.grammar)
                return sequence
            if isinstance(lacking, EngineError):
                self._fail(sequence, lacking)
            else:
                self._waiting.hold(sequence, lacking)
        return None

    def _read(
        self, plan: StepPlan, sequence: Sequence, length: int, now: float, source: int | None = None
    ) -> None:
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
        self._keeper.passes(plan, sequence, stop)
        sequence.position = stop
        if stop in sequence.marks:
            sequence.anchor = stop

    # Committing.

    def _advance(self, sequence: Sequence, position: int, now: float) -> None:
        place = self._keeper.landed(sequence, position)
        if place is not None:
            self._waiting.resume(place)
        if position == sequence.prompt_tokens:
            sequence.is_read = True
            if sequence.max_tokens == 0:
                self._finish(sequence, "length", now, read=0)
            elif self._prefilling.pop(sequence.key, None) is not None:
                self._rounds.add(sequence)

    def _take(self, sequence: Sequence, sampled: Sampled, now: float) -> int:
        """Delivers a drawn token; returns how many tokens that were, 0 or 1."""
        verdict = sequence.verdict(sampled.token)
        if verdict == "stop":
            self._finish(sequence, "stop", now, read=sequence.drawn)
            return 0
        sequence.append(sampled.token, sampled.report, now)
        request = sequence.request
        if request.stream:
            self._outbox.token(sequence.client, request.id, sampled.token, sampled.report)
        if sampled.complete:
            verdict = "stop"
        if verdict is not None:
            self._finish(sequence, verdict, now, read=sequence.drawn - 1)
        return 1

    def _take_last(
        self, sequence: Sequence, ids: array[int], reports: PackedLogprobs | None, now: float
    ) -> int:
        """Delivers the tokens with which the device ended a row; returns how many that were."""
        taken, verdict = sequence.take_last(ids, now)
        request, reports = sequence.request, reports and reports.part(0, taken)
        if request.stream and taken:
            run = Run([request.id], taken, pack_ids(ids[:taken]), reports)
            self._outbox.run(sequence.client, run)
        sequence.note(reports)
        if verdict is not None:
            read = sequence.drawn - (verdict == "length")
            self._finish(sequence, verdict, now, read)
        return taken
