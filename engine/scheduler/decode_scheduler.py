"""DecodeScheduler: which sequences decode in a round, for how many steps, and what may follow.

Sequences whose requests are `plain`, so that the device can sample for them without the host, are
kept in a DecodeBatch. The device works in order: what a round in flight still writes to the slot of
a sequence that has ended is written before the next plan begins. The slot is therefore free at
once.

The other sequences are *hosted*: the host samples for them (a grammar, or many log-probabilities).
If the device works asynchronously (`overlaps`), hosted sequences have rounds of their own,
alternating with the batch. The host samples for them while the device runs the batch, and neither
waits. Otherwise all sequences decode together as long as there are hosted ones, since a step of
some takes about as long as a step of all.
"""

from __future__ import annotations

from collections.abc import Collection
from enum import Enum, auto

from engine.protocol.events import Stats
from engine.scheduler.decode_batch import DecodeBatch
from engine.sequence import Sequence
from engine.step_plan import DecodeRow, StepPlan, StepResult
from engine.structured_output.masks import MaskBudget

ROUND_SECONDS = 0.002  # duration that a round aims at, and so the longest delay of its first token
# Duration that a round aims at for a large batch without streams, and beside hosted sequences for
# which the host takes longer. A row whose answer has ended is idle for the rest of its round, and
# for one more if a stop id ended it, so a round must be a small part of an answer's time. On the
# other hand the host must finish all sequences that ended together, and start others, within one
# round, or the device waits for it. Where many answers end at the same step, the round ends there
# too.
QUIET_ROUND_SECONDS = 0.004
LONG_ROUND_SECONDS = 0.008  # upper bound
PART_OF_ANSWER = 0.02  # part of an answer's time that a round may take
KNOWN_PART = 0.09  # the same, for answers without stop ids
MANY_TOGETHER = 1 / 32  # part of the rows that ends a round early
# Reading prompts costs the decoding rows the time of reading the weights once more, so new prompts
# are gathered: for one round per PATIENT_ROWS rows, at most PATIENCE_SECONDS. In smaller batches a
# round that reads prompts has one step, so that their first tokens are not delayed.
PATIENT_ROWS = 64
PATIENCE_SECONDS = 0.008
LEAST_ALIVE = 0.75  # part of a batch's rows; if fewer are in use, a smaller batch is made


class BatchKind(Enum):
    """The sequences that a plan serves: those whose prompts it reads, and those that decode."""

    PLAIN = auto()  # sequences for which the device samples
    HOSTED = auto()  # sequences for which the host takes part in sampling
    ALL = auto()

    def has(self, sequence: Sequence) -> bool:
        """Return whether a plan of this kind may serve the sequence."""
        return self is BatchKind.ALL or sequence.needs_host == (self is BatchKind.HOSTED)


class DecodeScheduler:
    """The sequences that decode, and what a round does for them.

    `most_steps` bounds the steps of a round; with 1, no plan is plain. `overlaps` says whether
    plans are made before the results of the previous round are known.
    """

    def __init__(self, most_steps: int, overlaps: bool) -> None:
        self._most_steps = most_steps
        self._apart = overlaps and most_steps > 1  # hosted sequences have plans of their own
        self.sequences: dict[int, Sequence] = {}  # all decoding sequences, by key
        self._hosted: dict[int, Sequence] = {}  # decoding sequences that are not plain
        self._outside: dict[int, Sequence] = {}  # plain sequences that are not in the batch
        self._batch: DecodeBatch | None = None
        self._latest_apart = False  # whether the latest plan was `apart`
        # rounds in flight, at most two
        self._under_way: list[tuple[StepPlan, DecodeBatch | None]] = []
        self._round_seconds = 0.0  # decode time of the latest round
        self._host_seconds = 0.0  # host time for the latest plan apart
        self._step_seconds = 0.0  # recent duration of the batch's decode step; 0: unknown
        self._timed_rows = 0  # rows of the batch when that was measured
        self._aim = ROUND_SECONDS  # target duration of the latest round
        self._since_prompts = 0  # rounds since the latest one that read prompts

    def defers_prompts(self, kind: BatchKind) -> bool:
        """Return whether new prompts should wait for a later round.

        More of them are then read at once, and the decoding rows are interrupted less often.
        """
        if kind is BatchKind.HOSTED:
            return False
        decoding = len(self.sequences)
        if self._apart:
            decoding -= len(self._hosted)
        rounds = int(PATIENCE_SECONDS / max(self._round_seconds, self._aim))
        return self._since_prompts < min(decoding // PATIENT_ROWS, rounds)

    def kinds(self) -> tuple[BatchKind, ...]:
        """Return the kinds that the next plan may have, the preferred one first.

        No round may be in flight. The plan is of the first kind that has something to do.
        """
        if not self._apart:
            return (BatchKind.ALL,)
        return (
            (BatchKind.PLAIN, BatchKind.HOSTED)
            if self._latest_apart
            else (BatchKind.HOSTED, BatchKind.PLAIN)
        )

    def kinds_ahead(self, prompts: Collection[Sequence], coming: int) -> list[BatchKind]:
        """Return the kinds of plan that may follow the one round in flight, whatever its result.

        Args:
            prompts: sequences whose prompts are to be read.
            coming: about how many sequences will decode soon, including those in slots of `ending`.
        """
        if len(self._under_way) != 1 or not self._apart:
            return []
        if self._under_way[0][0].apart:
            others = self.decodes(BatchKind.PLAIN) or any(
                BatchKind.PLAIN.has(one) for one in prompts
            )
            return [BatchKind.PLAIN] if others else []
        turns = [BatchKind.HOSTED] if self._has_hosted(prompts) else []
        thin = self._is_thin(coming - len(self.ending()))
        return turns if thin else [*turns, BatchKind.PLAIN]

    def decodes(self, kind: BatchKind) -> bool:
        """Return whether a plan of this kind has decode steps to do."""
        if kind is BatchKind.HOSTED:
            return bool(self._hosted)
        return bool(self._outside) or (self._batch is not None and self._batch.left() > 0)

    def ending(self) -> list[Sequence]:
        """Return the sequences that end with the round in flight, whatever its result."""
        if self._batch is None or not self._is_under_way():
            return []
        return self._batch.ending()

    def _is_under_way(self) -> bool:
        """Return whether a round of the batch is in flight."""
        return any(batch is not None for _, batch in self._under_way)

    def hand_over(self, sequence: Sequence) -> None:
        """Give the row of a sequence that is `ending` to others in the plan being made."""
        assert self._batch is not None
        self._batch.hand_over(sequence)

    def add(self, sequence: Sequence) -> None:
        """Add a sequence whose last token is known; it decodes from the next plan on."""
        self.sequences[sequence.key] = sequence
        (self._outside if sequence.plain else self._hosted)[sequence.key] = sequence

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence that has ended; sequences that were never added are ignored."""
        if self.sequences.pop(sequence.key, None) is None:
            return
        if not sequence.plain:
            del self._hosted[sequence.key]
            if not self._hosted:
                self._host_seconds = 0.0  # measured for the sequences that left; unknown for others
        elif sequence.row < 0:
            del self._outside[sequence.key]
        elif self._batch is not None:
            self._batch.leave(sequence)

    def catch_up(self, sequence: Sequence) -> None:
        """Give a sequence all its tokens of results so far, wherever it decodes."""
        if sequence.row >= 0 and self._batch is not None:
            self._batch.catch_up(sequence)

    def schedule(self, plan: StepPlan, kind: BatchKind, beginning: Collection[Sequence]) -> None:
        """Add decode steps to a plan. With a round in flight, `kinds_ahead` must have allowed it.

        Args:
            plan: already contains its prompt chunks.
            kind: which sequences it decodes.
            beginning: sequences of this kind whose first tokens the plan samples. Those that have a
                `row` afterwards decode from this plan on. The others must be added (`add`) when
                their first tokens are known.
        """
        if kind is BatchKind.HOSTED:
            plan.apart = True
            self._decode_through_host(plan, self._hosted.values())
            return
        if self._most_steps == 1 or (kind is BatchKind.ALL and self._has_hosted(beginning)):
            self._dissolve()
            self._decode_through_host(plan, self.sequences.values())
            return
        if not self._is_under_way() and self._is_thin(len(beginning)):
            self._dissolve()
        lasting = [one for one in beginning if one.max_tokens > 1]
        batch = DecodeBatch() if self._batch is None else self._batch
        if not (lasting or self._outside or batch.left() > 0):
            return
        self._batch = batch
        for sequence in self._outside.values():
            batch.join(plan, sequence, drawn=False)
        self._outside = {}
        for sequence in lasting:
            self.sequences[sequence.key] = sequence
            batch.join(plan, sequence, drawn=True)
        batch.schedule(plan, self._steps(batch, reading=bool(plan.prefill)))

    def _has_hosted(self, prompts: Collection[Sequence]) -> bool:
        return bool(self._hosted) or any(one.needs_host for one in prompts)

    def _decode_through_host(self, plan: StepPlan, sequences: Collection[Sequence]) -> None:
        budget = MaskBudget()
        served = [one for one in sequences if budget.has_room(one.mask_cost)]
        plan.decode += [DecodeRow(one.key, one.slot, one.last_token, one.drawn) for one in served]
        if len(served) < len(sequences):  # the others are served first next time
            for one in served:
                if one.mask_cost is not None and one.mask_cost.is_slow:
                    self.sequences[one.key] = self.sequences.pop(one.key)
                    self._hosted[one.key] = self._hosted.pop(one.key)

    def _steps(self, batch: DecodeBatch, reading: bool) -> int:
        if not self._is_timed(batch.rows) or (reading and len(batch) < PATIENT_ROWS):
            return 1
        self._aim = ROUND_SECONDS
        # hosted sequences decode after this round, once the host has sampled for the last
        if self._hosted:
            self._aim = min(max(self._host_seconds, ROUND_SECONDS), LONG_ROUND_SECONDS)
        elif not batch.streamed and len(batch) >= PATIENT_ROWS:
            part = PART_OF_ANSWER + (KNOWN_PART - PART_OF_ANSWER) * batch.known / len(batch)
            seconds = part * batch.mean_answer * self._step_seconds
            self._aim = min(max(seconds, QUIET_ROUND_SECONDS), LONG_ROUND_SECONDS)
        fitting = round(self._aim / self._step_seconds)
        fitting = max(1, min(fitting, self._most_steps, batch.left()))
        if self._aim > ROUND_SECONDS and not self._hosted:
            together = batch.last_steps(fitting)
            step = max(together, key=lambda step: (together[step], step), default=0)
            if 2 * step > fitting and together[step] >= MANY_TOGETHER * batch.rows:
                return step
        return fitting

    def _is_timed(self, rows: int) -> bool:
        """Return whether a step's duration is known for a batch of this many rows.

        A batch that is much larger than the measured one is measured again, in a round of one step.
        """
        return self._step_seconds > 0 and rows <= 2 * self._timed_rows

    def _is_thin(self, coming: int) -> bool:
        """Return whether a new batch should replace the present one, because many rows are idle."""
        batch = self._batch
        if batch is None:
            return False
        alive = len(batch) + len(self._outside) + coming
        return batch.spoiled or alive < LEAST_ALIVE * batch.rows

    def _dissolve(self) -> None:
        """End the batch; no round of it may be in flight."""
        if self._batch is not None:
            self._batch.dissolve()
            self._outside = {key: one for key, one in self.sequences.items() if one.plain}
            self._batch = None

    def start(self, plan: StepPlan) -> None:
        """Record that a plan is being executed."""
        self._under_way.append((plan, self._batch if plan.plain else None))
        self._latest_apart = plan.apart
        if not plan.apart:
            self._since_prompts = 0 if plan.prefill else self._since_prompts + 1

    def fail(self, plan: StepPlan) -> list[Sequence]:
        """Complete a plan that failed; return the sequences of its batch."""
        if self._batch is not None and plan.plain:
            self._batch.spoiled = True
        if self.complete(plan) is None:
            return []
        return [one for one in self.sequences.values() if one.row >= 0]

    def complete(self, plan: StepPlan) -> DecodeBatch | None:
        """Record that a plan has ended; return the batch that it advanced, if any."""
        for index, (other, batch) in enumerate(self._under_way):
            if other is plan:
                del self._under_way[index]
                return batch
        return None

    def measure(
        self, plan: StepPlan, result: StepResult, decoding: int, left: int, tokens: int
    ) -> Stats:
        """Update the measured durations from a round.

        Args:
            plan: the round's plan.
            result: the round's result.
            decoding: sequences that decoded in it.
            left: batch sequences that have not ended.
            tokens: tokens that it delivered.

        Returns:
            The round's counters.
        """
        if plan.apart:
            if plan.decode and self._hosted:
                self._host_seconds = result.host_seconds
        elif plan.decodes:
            self._round_seconds = result.decode_seconds
        # Not measured: a round that reads prompts also spends time on the joining rows, and a round
        # after which no row is left may have ended early.
        if plan.plain and left and not (plan.prefill and self._is_timed(decoding)):
            self._step_seconds = result.decode_seconds / plan.steps
            self._timed_rows = decoding
        return Stats(
            batch_size=len(plan.prefill) + decoding,
            prefill_tokens=sum([len(chunk.tokens) for chunk in plan.prefill]),
            decode_tokens=tokens,
            prefill_seconds=result.prefill_seconds,
            decode_steps=plan.steps if plan.decodes else 0,
            decode_seconds=result.decode_seconds / plan.steps,
            prefix_queries_tokens=sum(
                [
                    one.request.prompt_tokens
                    for one in plan.admit
                    if not (one.text or one.request.no_cache)
                ]
            ),
            prefix_hits_tokens=sum([one.cached_tokens for one in plan.admit]),
        )
