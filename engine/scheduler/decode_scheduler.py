"""DecodeScheduler: the sequences that decode, how many steps a round takes, what may follow it
unseen.

Sequences whose requests are plain are kept in a DecodeBatch on the device. All that the device is
asked for is done in order, so what a round under way still writes to the slot of a sequence that
has ended is written before the next plan begins, and the slot is free at once.

In the draws of the others the host has a part. Where the device works beside the host, these
decode apart, in turns with the batch: while the device goes on with that, the host sees to theirs,
so that neither waits for it. Where it does not, all of them decode together as long as there are
such, since a step of some takes about as long as one of all.
"""

from __future__ import annotations

from collections.abc import Collection
from enum import Enum, auto

from engine.protocol.events import Stats
from engine.scheduler.decode_batch import DecodeBatch
from engine.sequence import Sequence
from engine.step_plan import DecodeRow, StepPlan, StepResult
from engine.structured_output.masks import MaskBudget

ROUND_SECONDS = 0.002  # that a round aims at: this long may the first of its tokens be held back
# Likewise, of a large batch of which no token is told before the end, and of one beside sequences
# that the host takes longer for. A row whose answer has ended is idle for the rest of its round,
# and if a stop id ended it for one more, so rounds are a small part of an answer's time. But within
# one the host takes leave of all who ended together and begins others, and the device waits for it
# where that takes longer. Where many end together, so does the round.
QUIET_ROUND_SECONDS = 0.004
LONG_ROUND_SECONDS = 0.008  # at most
PART_OF_ANSWER = 0.02
KNOWN_PART = 0.09  # of answers that no stop id can end
MANY_TOGETHER = 1 / 32  # of the rows
# Reading new prompts costs those that decode the time in which the weights are read once more. So
# they are gathered: for a round per PATIENT_ROWS rows, within PATIENCE_SECONDS. In smaller batches
# a round in which prompts are read has one step, so that their first tokens are not held back.
PATIENT_ROWS = 64
PATIENCE_SECONDS = 0.008
LEAST_ALIVE = 0.75  # of a batch's rows; when fewer are left, a smaller batch is made


class BatchKind(Enum):
    """Whose prompts are read in a plan, and who decodes."""

    PLAIN = auto()
    HOSTED = auto()  # those in whose draws the host has a part
    ALL = auto()

    def has(self, sequence: Sequence) -> bool:
        return self is BatchKind.ALL or sequence.needs_host == (self is BatchKind.HOSTED)


class DecodeScheduler:
    """`most_steps` bounds the steps of a round; with 1, no plan is plain. `overlaps`: plans follow
    others whose results are not known."""

    def __init__(self, most_steps: int, overlaps: bool) -> None:
        self._most_steps = most_steps
        self._apart = overlaps and most_steps > 1
        self.sequences: dict[int, Sequence] = {}  # by key
        self._hosted: dict[int, Sequence] = {}  # of them, that are not plain
        self._outside: dict[int, Sequence] = {}  # of the others, that are in no batch
        self._batch: DecodeBatch | None = None
        self._latest_apart = False  # the latest plan was
        self._under_way: list[tuple[StepPlan, DecodeBatch | None]] = []
        self._round_seconds = 0.0  # that the latest round decoded for
        self._host_seconds = 0.0  # that the host took for the latest one apart
        self._step_seconds = 0.0  # of a decode step of the batch, lately; 0: not known
        self._timed_rows = 0  # of that batch
        self._aim = ROUND_SECONDS  # of the latest round
        self._since_prompts = 0  # rounds without any

    def defers_prompts(self, kind: BatchKind) -> bool:
        """Whether prompts should wait for the next round, for the sake of those that decode."""
        if kind is BatchKind.HOSTED:
            return False
        decoding = len(self.sequences)
        if self._apart:
            decoding -= len(self._hosted)
        rounds = int(PATIENCE_SECONDS / max(self._round_seconds, self._aim))
        return self._since_prompts < min(decoding // PATIENT_ROWS, rounds)

    def kinds(self) -> tuple[BatchKind, ...]:
        """Of the next plan, where none is under way: the first of which it has something to do."""
        if not self._apart:
            return (BatchKind.ALL,)
        return (
            (BatchKind.PLAIN, BatchKind.HOSTED)
            if self._latest_apart
            else (BatchKind.HOSTED, BatchKind.PLAIN)
        )

    def kinds_ahead(self, prompts: Collection[Sequence], coming: int) -> list[BatchKind]:
        """Likewise, of a plan that follows the one under way unseen. There are these prompts to
        read; about `coming` more sequences will decode soon, in slots of those that are `due`
        too."""
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
        """Whether somebody takes steps in such a plan."""
        if kind is BatchKind.HOSTED:
            return bool(self._hosted)
        return bool(self._outside) or (self._batch is not None and self._batch.left() > 0)

    def ending(self) -> list[Sequence]:
        """Whose answers end with the round under way, whatever it brings."""
        if self._batch is None or not self._is_under_way():
            return []
        return self._batch.ending()

    def _is_under_way(self) -> bool:
        """Whether a round of the batch is."""
        return any(batch is not None for _, batch in self._under_way)

    def hand_over(self, sequence: Sequence) -> None:
        """One that is due needs its slot no more in the plan that follows that round unseen."""
        assert self._batch is not None
        self._batch.hand_over(sequence)

    def add(self, sequence: Sequence) -> None:
        """From the next plan on, it decodes; its last token is known."""
        self.sequences[sequence.key] = sequence
        (self._outside if sequence.plain else self._hosted)[sequence.key] = sequence

    def remove(self, sequence: Sequence) -> None:
        """It has ended, or was never here."""
        if self.sequences.pop(sequence.key, None) is None:
            return
        if not sequence.plain:
            del self._hosted[sequence.key]
            if not self._hosted:
                self._host_seconds = 0.0  # of these, nothing is known of others
        elif sequence.row < 0:
            del self._outside[sequence.key]
        elif self._batch is not None:
            self._batch.leave(sequence)

    def catch_up(self, sequence: Sequence) -> None:
        """Lets a sequence know of all tokens that have been drawn for it."""
        if sequence.row >= 0 and self._batch is not None:
            self._batch.catch_up(sequence)

    def schedule(self, plan: StepPlan, kind: BatchKind, beginning: Collection[Sequence]) -> None:
        """Adds decode steps to `plan`, which draws the first tokens of `beginning`, of which `turn`
        has all. Those of these that have a `row` afterwards decode from this plan on; for the
        others, `add` is called when their first tokens are here.

        Where another round is under way, `turns_ahead` has been asked.
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
        if len(served) < len(sequences):  # it is the others' turn next
            for one in served:
                if one.mask_cost is not None and one.mask_cost.is_slow:
                    self.sequences[one.key] = self.sequences.pop(one.key)
                    self._hosted[one.key] = self._hosted.pop(one.key)

    def _steps(self, batch: DecodeBatch, reading: bool) -> int:
        if not self._is_timed(batch.rows) or (reading and len(batch) < PATIENT_ROWS):
            return 1
        self._aim = ROUND_SECONDS
        if self._hosted:  # whose next turn comes after this, when the host has seen to the last
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
        """A much larger batch than the one that was timed takes one step to be timed."""
        return self._step_seconds > 0 and rows <= 2 * self._timed_rows

    def _is_thin(self, coming: int) -> bool:
        """Whether there should be another batch than the present one."""
        batch = self._batch
        if batch is None:
            return False
        alive = len(batch) + len(self._outside) + coming
        return batch.spoiled or alive < LEAST_ALIVE * batch.rows

    def _dissolve(self) -> None:
        """No round of the batch may be under way."""
        if self._batch is not None:
            self._batch.dissolve()
            self._outside = {key: one for key, one in self.sequences.items() if one.plain}
            self._batch = None

    def start(self, plan: StepPlan) -> None:
        """The plan is under way."""
        self._under_way.append((plan, self._batch if plan.plain else None))
        self._latest_apart = plan.apart
        if not plan.apart:
            self._since_prompts = 0 if plan.prefill else self._since_prompts + 1

    def fail(self, plan: StepPlan) -> list[Sequence]:
        """The plan could not be carried out: the sequences of the batch that took part in it."""
        if self._batch is not None and plan.plain:
            self._batch.spoiled = True
        if self.complete(plan) is None:
            return []
        return [one for one in self.sequences.values() if one.row >= 0]

    def complete(self, plan: StepPlan) -> DecodeBatch | None:
        """The plan is under way no more; the batch that it moved on."""
        for index, (other, batch) in enumerate(self._under_way):
            if other is plan:
                del self._under_way[index]
                return batch
        return None

    def measure(
        self, plan: StepPlan, result: StepResult, decoding: int, left: int, tokens: int
    ) -> Stats:
        """Learns how long a step takes, and counts. Tells what the round did, which decoded
        `decoding` sequences, of which `left` are left, and brought `tokens` tokens."""
        if plan.apart:
            if plan.decode and self._hosted:
                self._host_seconds = result.host_seconds
        elif plan.decodes:
            self._round_seconds = result.decode_seconds
        # A round that reads prompts takes in those who join, too; one of which nobody is left may
        # have ended early.
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
                [one.request.prompt_tokens for one in plan.admit if not one.text]
            ),
            prefix_hits_tokens=sum([one.cached_tokens for one in plan.admit]),
        )
