"""Scheduler: which tokens of which sequences are read in the next round; integers only, no torch.

Continuous batching: a round is one step, which decodes one token of every sequence whose prompt has
been read, and reads up to `max_step_tokens` prompt tokens of the others. State never grows, so a
request is admitted as soon as a slot is free, in the order that `waiting` decides. While no prompt
is being read and every request is plain (`Plan`), a round takes several decode steps, and the next
one can be planned before its results are known.

Prompt chunks (`budget`) end where states are to be kept (`keeping`); with whole chunks, that
changes no bit.
"""

from __future__ import annotations

import logging
import sys
from array import array
from collections.abc import Callable, Hashable, Iterable

import msgspec

from engine.budget import PromptBudget
from engine.errors import EngineError
from engine.grammars import Grammars
from engine.keeping import Keeper
from engine.lives import Lives
from engine.messages import (
    FinishReason,
    Request,
    Run,
    Scores,
    Stats,
    StepEvents,
    pack_ids,
    unpack_ids,
)
from engine.plan import Plan, PrefillChunk, Sampled, StepResult
from engine.rounds import Rounds
from engine.sequence import Sequence
from engine.tiers import Kept
from engine.validation import check_request
from engine.waiting import WaitingQueue

log = logging.getLogger(__name__)

PREPARED_AT_ONCE = 32  # requests admitted while a round is under way: about half a millisecond


class Scheduler(Lives):
    """Turns requests into plans and step results into events.

    Call `plan`, carry it out, then `commit` (or `fail`, when that raised); `add` and `abort` may
    come at any time between these calls. Before `commit`, `plan_ahead` may give the plan that is
    to follow; they are committed in their order. Every request that is added ends in exactly one
    `Finished` or `Failed` of `events`. Times are seconds of any one monotonic clock.

    `most_steps` bounds the steps of a round; with 1, no plan is plain.
    """

    def __init__(
        self,
        *,
        vocab_size: int,
        eos_token_id: int | None,
        slots: int,
        share_slots: int,
        max_step_tokens: int,
        max_waiting: int,
        max_waiting_tokens: int = sys.maxsize,
        state_bytes: int,
        most_steps: int = 1,
        with_whole_chunks: bool = False,
        grammars: Grammars | None = None,
        keeper: Keeper | None = None,
        on_loaded: Callable[[Kept], None] = lambda kept: None,
    ) -> None:
        self._vocab_size = vocab_size
        self._eos_token_id = eos_token_id
        self._budget = PromptBudget(max_step_tokens)
        self._state_bytes = state_bytes
        self._grammars = grammars or Grammars(None)
        keeper = keeper or Keeper(share_slots, slots, with_whole_chunks=with_whole_chunks)
        super().__init__(
            keeper, slots, WaitingQueue(max_waiting, max_waiting_tokens), Rounds(most_steps)
        )
        self._on_loaded = on_loaded
        self._prepared = Plan()  # what the next plan begins with
        self._refusal: EngineError | None = None  # of everything new
        self._now = 0.0  # of the latest round's end
        self._awaiting: set[Hashable] = set()  # clients: that slots are free that were not
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
        sequence = Sequence(self._next_key, client, request, self._eos_token_id, now)
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
            self._deadlines.put(sequence, (sequence.deadline, sequence.key))

    def reject(self, client: Hashable, request_id: int, error: EngineError) -> None:
        """Reports a request that is not taken as failed."""
        self._outbox.failed(client, request_id, error)

    def abort(
        self,
        client: Hashable,
        ids: Iterable[int] | None,
        reason: FinishReason,
        now: float,
        kept: Iterable[int] = (),
    ) -> None:
        """Ends requests early (None: all of the client's), ignoring those ended or unknown; `kept`
        as in Abort."""
        lengths = iter(kept)
        for request_id in list(self._clients.get(client, ()) if ids is None else ids):
            sequence, length = self._clients.get(client, {}).get(request_id), next(lengths, None)
            if sequence is not None and self._keeper.may_end(sequence, reason, length):
                self._finish(sequence, reason, now)

    def abort_all(self, now: float) -> None:
        """Ends every request as aborted."""
        for sequence in self._in_flight():
            self._finish(sequence, "abort", now)

    def refuse(self, error: EngineError) -> None:
        """From now on new requests fail with `error`."""
        self._refusal = error

    def _check(self, request: Request, now: float) -> None:
        if self._refusal is not None:
            raise self._refusal
        check_request(request, self._vocab_size)
        free = self._slots.free + len(self._rounds.leaving)
        refusal = self._waiting.refusal(request.owner, request.prompt_tokens, free, now)
        if refusal is not None:
            raise refusal

    # A step.

    def plan(self, now: float) -> Plan:
        """The next round; empty only when nothing is in flight. None may be under way."""
        self._look_around(now)
        plan, self._prepared = self._prepared, Plan()
        plan.keep_alive(self._running)
        self._keeper.tiers.begin_plan(one.source for one in plan.admit)
        self._readmit(plan)
        if self._prefilling or not self._rounds.patient:
            self._admit(plan, now)
        self._rounds.plan(plan, reading=bool(self._prefilling))
        reading = [sequence for sequence in self._prefilling.values() if sequence.remaining]
        for sequence, length in self._budget.share(reading):
            self._read(plan, sequence, length, now)
        if not plan.empty or self._keeper.traffic.fetching:
            self._keeper.traffic.take_moves(plan)
        if not plan.empty:
            plan.release, self._released = self._released, []
            self._rounds.start(plan)
        return plan

    def plan_ahead(self, now: float) -> Plan | None:
        """What follows the one round under way, whatever that brings; None when that cannot be
        said: when it reads prompts, when the host has a part in its draws, when somebody can be
        admitted after it or nobody may be left."""
        self._look_around(now)
        prompts = self._prefilling.values()
        if any(sequence.started_at is not None for sequence in prompts):
            return None
        if not self._rounds.patient and (prompts or self._can_admit()):
            return None
        plan = self._rounds.plan_ahead()
        if plan is not None:
            self._rounds.start(plan)
        return plan

    def prepare(self, now: float) -> None:
        """While a round is under way: admits some of those who wait, with the next `plan`."""
        self._admit(self._prepared, now, most=PREPARED_AT_ONCE)

    def commit(self, plan: Plan, result: StepResult, now: float) -> None:
        """Takes in what a plan brought. Sequences that ended meanwhile are passed over."""
        self._now = now
        for ticket, state in result.exports.items():
            self._keeper.traffic.arrived(ticket, state)
        batch, decoding = self._rounds.land(plan), len(self._rounds.sequences)
        if batch is not None and result.drawn is not None:
            batch.note_ended(result.drawn)
        for key, error in result.errors():
            sequence = self._running(key)
            if sequence is not None:
                self._fail(sequence, error)
        for scored in result.scored:
            sequence = self._running(scored.key)
            if sequence is not None:
                start = scored.start - sequence.lead
                scores = Scores(sequence.request.id, start, scored.tokens)
                self._outbox.scores(sequence.client, scores)
        for chunk in plan.prefill:
            sequence = self._running(chunk.key)
            if sequence is not None:
                self._advance(sequence, chunk.start + len(chunk.tokens), now)
        tokens = 0
        for sampled in result.sampled:
            sequence = self._running(sampled.key)
            if sequence is not None:
                tokens += self._take(sequence, sampled, now)
        if batch is not None and result.drawn is not None:
            tokens += batch.take_in(
                result.drawn,
                plan.steps,
                self._outbox,
                lambda sequence, ids: self._take_last(sequence, ids, now),
                now,
            )
        self._step = self._rounds.note(plan, result, decoding, tokens)
        self._settle()

    def fail(self, plan: Plan, error: EngineError) -> None:
        """The plan could not be carried out: every sequence that took part in it fails.

        So must every plan under way after it.
        """
        self._rounds.land(plan)
        lost = self._keeper.fail(plan)
        keys = plan.participants()
        keys += [one.key for one in self._prepared.admit if one.source in lost]
        for key in keys:
            sequence = self._running(key)
            if sequence is not None:
                self._fail(sequence, error)
        self._released.extend(plan.release)
        self._settle()

    def fail_all(self, error: EngineError) -> None:
        """Nothing can be served any more: every request fails, and so does every new one."""
        for sequence in self._in_flight():
            self._fail(sequence, error)
        self.refuse(error)

    def events(self) -> dict[Hashable, StepEvents]:
        """What happened since the last call, for every client that has a part in it."""
        stats = msgspec.structs.replace(
            self._step,
            running=self._slots.used - len(self._rounds.leaving),
            waiting=len(self._waiting),
            waiting_tokens=self._waiting.tokens,
            pace=self._waiting.pace(self._now),
            slots_used=self._slots.used,
            slots_total=self._slots.count,
            state_bytes=(self._slots.used + self._keeper.tiers.device_used) * self._state_bytes,
            **self._keeper.stats(),
        )
        self._step = Stats()
        events = self._outbox.take(stats, self._clients.keys() | self._awaiting)
        self._awaiting = set(events) if self._rounds.leaving else set()
        return events

    # Planning.

    def _look_around(self, now: float) -> None:
        """Whose grammar is compiled and whose state is read by now, and whose time is over?"""
        for grammar in self._grammars.collect():
            self._waiting.resume(grammar)
        for kept in self._keeper.collect():
            self._waiting.resume(kept)
            self._on_loaded(kept)
        while (sequence := self._deadlines.first()) is not None:
            if sequence.deadline is None or sequence.deadline > now:
                return
            self._finish(sequence, "timeout", now)

    def _admit(self, plan: Plan, now: float, most: int = sys.maxsize) -> None:
        admitted = 0
        while (sequence := self._next()) is not None and self._slots.free and admitted < most:
            if plan is self._prepared and sequence.begins_drawn:
                break  # it would be in a batch before the plan that admits it
            try:
                found = self._keeper.find(sequence)
            except EngineError as error:
                self._fail(sequence, error)
                continue
            awaited = found.awaited or found.loading
            if awaited is not None:
                self._waiting.hold(sequence, awaited)
                continue
            self._waiting.depart(sequence, sequence.unspent - found.length)
            self._outbox.started(sequence.client, sequence.request.id)
            sequence.slot = self._slots.take()
            self._keeper.admit(plan, sequence, found)
            admitted += 1
            if sequence.begins_drawn:
                sequence.started_at, sequence.position = now, sequence.prompt_tokens
                (sequence.last_token,) = unpack_ids(sequence.text)
                self._rounds.add(sequence)
                continue
            self._prefilling[sequence.key] = sequence
            if not sequence.remaining:
                self._read(plan, sequence, 0, now, plan.admit[-1].source)
        self._waiting.note_admitted(admitted, now)

    def _next(self) -> Sequence | None:
        """The first that waits and whose grammar is compiled; has those before it compiled, while
        there is no slot one at a time: what is kept for long unused may be forgotten again."""
        free = self._slots.free or self._rounds.leaving
        while (sequence := self._waiting.first()) and (free or not self._grammars.pending):
            lacking = self._grammars.lacking(sequence.request.sampling)
            if lacking is None:
                return sequence
            if isinstance(lacking, EngineError):
                self._fail(sequence, lacking)
            else:
                self._waiting.hold(sequence, lacking)
        return None

    def _can_admit(self) -> bool:
        """Whether somebody waits for nothing but the end of a round."""
        return self._next() is not None and bool(self._slots.free or self._rounds.leaving)

    def _read(
        self, plan: Plan, sequence: Sequence, length: int, now: float, source: int | None = None
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

    # Committing.

    def _advance(self, sequence: Sequence, position: int, now: float) -> None:
        sequence.position = position
        if position in sequence.marks:
            sequence.anchor = position
        place = self._keeper.landed(sequence, position)
        if place is not None:
            self._waiting.resume(place)
        if position == sequence.prompt_tokens:
            if sequence.max_tokens == 0:
                self._finish(sequence, "length", now, read=0)
            else:
                del self._prefilling[sequence.key]
                self._rounds.add(sequence)

    def _take(self, sequence: Sequence, sampled: Sampled, now: float) -> int:
        """Delivers a drawn token; returns how many tokens that were, 0 or 1."""
        verdict = sequence.verdict(sampled.token)
        if verdict == "stop":
            self._finish(sequence, "stop", now, read=sequence.drawn)
            return 0
        sequence.append(sampled.token, sampled.logprobs, now)
        request = sequence.request
        if request.stream:
            self._outbox.token(sequence.client, request.id, sampled.token, sampled.logprobs)
        if sampled.complete:
            verdict = "stop"
        if verdict is not None:
            self._finish(sequence, verdict, now, read=sequence.drawn - 1)
        return 1

    def _take_last(self, sequence: Sequence, ids: array[int], now: float) -> int:
        """Delivers the tokens with which the device ended a row; returns how many that were."""
        taken, verdict = sequence.take_last(ids, now)
        request = sequence.request
        if request.stream and taken:
            self._outbox.run(sequence.client, Run([request.id], taken, pack_ids(ids[:taken])))
        if verdict is not None:
            read = sequence.drawn - (verdict == "length")
            self._finish(sequence, verdict, now, read)
        return taken
