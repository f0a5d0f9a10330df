"""Rounds: the sequences that decode, how many steps a round takes, what may follow it unseen.

Sequences whose requests are all plain are kept in a DecodeBatch on the device. A slot of theirs is
free only when no round under way, and none to come, writes to it: then `settled` names it.
"""

from __future__ import annotations

from engine.batch import DecodeBatch
from engine.messages import Stats
from engine.plan import DecodeRow, Plan, StepResult
from engine.sequence import Sequence

ROUND_SECONDS = 0.002  # that a round aims at: this long may the first of its tokens be held back
# New prompts interrupt a batch: its next round waits for the host, takes a single step, and is
# followed by a new batch. So they are gathered: for a round per PATIENT_ROWS rows, within
# PATIENCE_SECONDS.
PATIENT_ROWS = 64
PATIENCE_SECONDS = 0.008
LEAST_ALIVE = 0.75  # of a batch's rows; when fewer are left, a smaller batch is made


class Rounds:
    """`most_steps` bounds the steps of a round; with 1, no plan is plain."""

    def __init__(self, most_steps: int) -> None:
        self._most_steps = most_steps
        self.sequences: dict[int, Sequence] = {}  # by key
        self.leaving: list[Sequence] = []  # ended, but rounds under way write to their slots
        self._batch: DecodeBatch | None = None  # of all `sequences`, where they are plain
        self._under_way: list[tuple[Plan, DecodeBatch | None]] = []
        self._step_seconds = 0.0  # of a decode step of the batch, lately; 0: not known
        self._timed_rows = 0  # of that batch
        self._since_prompts = 0  # rounds without any

    @property
    def patient(self) -> bool:
        """Whether prompts should wait for the next round, for the sake of those that decode."""
        rounds = int(PATIENCE_SECONDS / max(self._step_seconds, ROUND_SECONDS))
        return self._since_prompts < min(len(self.sequences) // PATIENT_ROWS, rounds)

    def add(self, sequence: Sequence) -> None:
        """From the next plan on, it decodes."""
        self.sequences[sequence.key] = sequence
        self._batch = None  # it lacks this one

    def remove(self, sequence: Sequence) -> bool:
        """It has ended; whether its slot is free already. If not, `settled` will name it."""
        self.sequences.pop(sequence.key, None)
        if self._batch is None or not self._batch.writes(sequence.key):
            return True
        self.leaving.append(sequence)
        return False

    def settled(self) -> list[Sequence]:
        """Those of `leaving` whose slots are free now."""
        if self._under_way or not self.leaving:
            return []
        self._batch = None  # it would go on writing
        leaving, self.leaving = self.leaving, []
        return leaving

    def plan(self, plan: Plan, reading: bool) -> None:
        """Adds one decode step to `plan`, or several unless prompts are being read.

        No round may be under way.
        """
        sequences = self.sequences.values()
        if self._batch is not None and not self._is_worth_it(self._batch):
            self._batch = None
        if self._batch is None and sequences and self._most_steps > 1:
            plain = all(sequence.plain for sequence in sequences)
            self._batch = DecodeBatch(sequences) if plain else None
        if self._batch is not None:
            self._go_on(plan, self._batch, reading)
            return
        for sequence in sequences:
            plan.decode.append(
                DecodeRow(sequence.key, sequence.slot, sequence.last_token, sequence.drawn)
            )

    def plan_ahead(self) -> Plan | None:
        """The plan after the one that is under way, whatever that brings."""
        batch = self._batch
        if batch is None or len(self._under_way) != 1:
            return None
        if not self._is_worth_it(batch) or batch.left() <= 0:
            return None
        plan = Plan()
        self._go_on(plan, batch, reading=False)
        return plan

    def _is_worth_it(self, batch: DecodeBatch) -> bool:
        alive = len(self.sequences)
        return not batch.spoiled and alive > 0 and alive >= LEAST_ALIVE * len(batch.rows)

    def _go_on(self, plan: Plan, batch: DecodeBatch, reading: bool) -> None:
        plan.plain, plan.again, plan.decode = True, batch.started, batch.rows
        # A much larger batch than the one that was timed takes one step to be timed.
        timed = self._step_seconds > 0 and len(batch.rows) <= 2 * self._timed_rows
        if timed and not reading:
            fitting = round(ROUND_SECONDS / self._step_seconds)
            plan.steps = max(1, min(fitting, self._most_steps, batch.left()))
        batch.planned(plan.steps)

    def start(self, plan: Plan) -> None:
        """The plan is under way."""
        self._under_way.append((plan, self._batch if plan.plain else None))

    def land(self, plan: Plan) -> DecodeBatch | None:
        """The plan is under way no more; the batch that it moved on."""
        for index, (other, batch) in enumerate(self._under_way):
            if other is plan:
                del self._under_way[index]
                return batch
        return None

    def note(self, plan: Plan, result: StepResult, decoding: int, tokens: int) -> Stats:
        """Learns how long a step takes, and counts. Tells what the round did, which decoded
        `decoding` sequences, if it is plain, and brought `tokens` tokens."""
        self._since_prompts = 0 if plan.prefill else self._since_prompts + 1
        if plan.plain and not plan.prefill:
            self._step_seconds = result.decode_seconds / plan.steps
            self._timed_rows = len(plan.decode)
        return Stats(
            batch_size=len(plan.prefill) + (decoding if plan.plain else len(plan.decode)),
            prefill_tokens=sum(len(chunk.tokens) for chunk in plan.prefill),
            decode_tokens=tokens,
            prefill_seconds=result.prefill_seconds,
            decode_steps=plan.steps if plan.decode else 0,
            decode_seconds=result.decode_seconds / plan.steps,
            prefix_queries_tokens=sum(
                one.request.prompt_tokens for one in plan.admit if not one.text
            ),
            prefix_hits_tokens=sum(one.cached_tokens for one in plan.admit),
        )
