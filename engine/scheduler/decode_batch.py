"""DecodeBatch: sequences that decode together, round after round, while the device keeps them.

The device draws for them without the host, so a round may take several steps, and one may follow
the other before the results of the first are here. Every sequence has a row of its own for as long
as it is here: rows that have ended go to others. What the device draws is known later, so there are
two moments: that of the plans, in which sequences join and leave, and that of the results.

Steps are counted from the batch's first one. What a round brings is put down in the TokenRing at
once, for all rows, and what belongs to one sequence is read when it ends, or leaves for another
reason: so a round costs the host next to nothing per row.
"""

from __future__ import annotations

import heapq
import sys
from array import array
from collections import deque
from collections.abc import Callable, Hashable

import numpy as np

from engine.protocol.events import Run
from engine.protocol.logprobs import PackedLogprobs
from engine.protocol.sampling_params import is_adjusted, is_greedy
from engine.protocol.token_ids import ID_BYTES, unpack_ids
from engine.scheduler.output import StepOutput
from engine.sequence import Sequence
from engine.step_plan import DecodeRow, Drawn, StepPlan

RING_STEPS = 1024  # that are kept: who is behind by more has lost tokens
# No power of two: else all rows' lines would want the same place of the cache.
RING_WIDTH = RING_STEPS + 16
TURN_STEPS = RING_STEPS // 4  # who is behind by so many reads within as many more


class TokenRing:
    """The latest tokens of a batch's rows, until somebody wants them.

    Steps are counted from the batch's first one.
    """

    def __init__(self) -> None:
        self._tokens = np.empty((0, RING_WIDTH), np.int32)
        self.steps = 0  # that have been put down

    def append(self, tokens: bytes, steps: int) -> None:
        """Keeps what all rows drew in the next `steps` steps: int32 [rows, steps]."""
        drawn = np.frombuffer(tokens, np.int32).reshape(-1, steps)
        rows, known = drawn.shape[0], self._tokens.shape[0]
        if rows > known:
            more = np.empty((2 * rows - known, RING_WIDTH), np.int32)
            self._tokens = np.concatenate([self._tokens, more])
        at = self.steps % RING_STEPS
        first = min(steps, RING_STEPS - at)
        self._tokens[:rows, at : at + first] = drawn[:, :first]
        if first < steps:
            self._tokens[:rows, : steps - first] = drawn[:, first:]
        self.steps += steps

    def read(self, row: int, since: int) -> bytes:
        """What a row drew from step `since` on, packed; at most RING_STEPS steps ago."""
        assert 0 <= self.steps - since <= RING_STEPS, "tokens have been written over"
        at, count = since % RING_STEPS, self.steps - since
        first = min(count, RING_STEPS - at)
        drawn = self._tokens[row, at : at + first].tobytes()
        if first < count:
            drawn += self._tokens[row, : count - first].tobytes()
        return drawn


_Listener = tuple[Hashable, int]  # a client, and how many best tokens it is told of


class DecodeBatch:
    """All of its sequences are plain."""

    def __init__(self) -> None:
        self.started = False  # it is on the device
        self.spoiled = False  # the device has ended a row whose sequence goes on
        self.rows = 0  # of all that were ever needed at once
        self._free: list[int] = []  # rows, as a heap
        self._ended: list[int] = []  # rows that the device has to end before the next round
        self._scheduled: dict[int, Sequence] = {}  # by row, in the moment of the plans
        self.streamed = 0  # of them, of which each token is told
        self.known = 0  # of them, whose answers end with max_tokens
        self._sampled = 0  # of them, who draw others than the best token
        self._adjusted = 0  # of them, whose requests change logits
        self._tops: dict[int, int] = {}  # how many of them, by Sequence.top
        self._asked = 0  # tokens that they asked for
        self._last: Sequence | None = None  # whose answer may last the longest, if it is alive
        self._ending: dict[int, dict[int, Sequence]] = {}  # the alive by their last step, by row
        self._planned = 0  # steps
        self._before_latest = 0  # those planned before the latest round
        # In the moment of the results:
        self._active: dict[int, Sequence] = {}  # by row
        self._coming: deque[Sequence] = deque()  # joined by plans whose results are not here
        self._over: set[int] = set()  # rows of members that the device has ended
        self._streams: dict[_Listener, dict[int, int]] = {}  # requests by row
        self._listed: dict[_Listener, tuple[list[int], list[int]]] = {}  # the same: rows, requests
        self._gathering: dict[int, Sequence] = {}  # members that gather reports, by row
        self._arrived: list[Sequence] = []  # members since the result that was noted last
        self._ring = TokenRing()
        self._turn = 0  # the row that is brought up to date next
        self._now = 0.0  # of the latest result

    def __len__(self) -> int:
        """Sequences that have not ended, nor handed their slots over, as far as known."""
        return len(self._scheduled)

    @property
    def mean_answer(self) -> float:
        """Tokens that they asked for, each."""
        return self._asked / len(self._scheduled) if self._scheduled else 0.0

    @property
    def active(self) -> int:
        """Sequences that take part in the round whose result was noted last, and have not ended."""
        return len(self._active)

    # Plans.

    def join(self, plan: StepPlan, sequence: Sequence, drawn: bool) -> None:
        """It decodes from this plan on; with `drawn` its first token is the one that a chunk of the
        plan draws, else its last token is known."""
        if self._free:
            row = heapq.heappop(self._free)
        else:
            row, self.rows = self.rows, self.rows + 1
        position = 1 if drawn else sequence.drawn
        token = -1 if drawn else sequence.last_token
        plan.decode.append(DecodeRow(sequence.key, sequence.slot, token, position))
        plan.at.append(row)
        sequence.row, sequence.since = row, self._planned
        sequence.last_step = self._planned + sequence.max_tokens - position
        self._scheduled[row] = sequence
        self._ending.setdefault(sequence.last_step, {})[row] = sequence
        self.streamed += sequence.request.stream
        self.known += not sequence.stop_ids
        self._sampled += not is_greedy(sequence.request.sampling)
        self._adjusted += is_adjusted(sequence.request.sampling)
        self._tops[sequence.top] = self._tops.get(sequence.top, 0) + 1
        self._asked += sequence.max_tokens
        self._coming.append(sequence)
        if self._last is not None and sequence.last_step > self._last.last_step:
            self._last = sequence

    def leave(self, sequence: Sequence) -> None:
        """It has ended. Its row, if the device has not ended that, does before the next round."""
        row, over = sequence.row, False
        if self._active.get(row) is sequence:
            del self._active[row]
            over = row in self._over
            self._over.discard(row)
            self._stop_telling(sequence)
        else:
            self._coming.remove(sequence)
        if not sequence.handed_over:
            self._part(sequence)
            if not over:
                self._ended.append(row)
        sequence.row = -1

    def _part(self, sequence: Sequence) -> None:
        """Its row is free for another one."""
        row, step = sequence.row, sequence.last_step
        del self._scheduled[row]
        del self._ending[step][row]
        if not self._ending[step]:
            del self._ending[step]
        self.streamed -= sequence.request.stream
        self.known -= not sequence.stop_ids
        self._sampled -= not is_greedy(sequence.request.sampling)
        self._adjusted -= is_adjusted(sequence.request.sampling)
        self._tops[sequence.top] -= 1
        self._asked -= sequence.max_tokens
        heapq.heappush(self._free, row)

    def ending(self) -> list[Sequence]:
        """Whose answers end with what is planned, if not before."""
        steps = range(self._before_latest + 1, self._planned + 1)
        return [one for step in steps for one in self._ending.get(step, {}).values()]

    def hand_over(self, sequence: Sequence) -> None:
        """The row and the slot of one that is due are for others from the next plan on."""
        sequence.handed_over = True
        self._part(sequence)

    def last_steps(self, steps: int) -> dict[int, int]:
        """How many answers end with each of the `steps` steps that follow, at the latest."""
        coming = range(1, steps + 1)
        ending, planned = self._ending, self._planned
        return {step: len(ending[planned + step]) for step in coming if planned + step in ending}

    def _stop_telling(self, sequence: Sequence) -> None:
        self._gathering.pop(sequence.row, None)
        listener = sequence.client, sequence.top
        if (streams := self._streams.get(listener)) is None:
            return
        if streams.pop(sequence.row, None) is not None:
            self._listed.pop(listener, None)
        if not streams:
            del self._streams[listener]

    def left(self) -> int:
        """How many steps there is still somebody for at most, beyond what is planned."""
        if self._last is None or self._last.over or self._last.row < 0:
            alive = self._scheduled.values()
            self._last = max(alive, key=lambda one: one.last_step, default=None)
        return 0 if self._last is None else self._last.last_step - self._planned

    def schedule(self, plan: StepPlan, steps: int) -> None:
        """The plan is this batch's next round."""
        plan.plain, plan.again, plan.steps = True, self.started, steps
        plan.greedy, plan.adjusted = not self._sampled, self._adjusted > 0
        plan.top = max([top for top, count in self._tops.items() if count], default=-1)
        if self.started:
            plan.leave, self._ended = self._ended, []
        self.started = True
        self._before_latest = self._planned
        self._planned += steps

    # Results.

    def begin_commit(self, drawn: Drawn) -> None:
        """The next round's result is here: which rows the device does not write to any more."""
        step, self._arrived = self._ring.steps, []
        while self._coming and self._coming[0].since <= step:
            sequence = self._coming.popleft()
            self._arrived.append(sequence)
            self._active[sequence.row] = sequence
            if sequence.request.stream:
                listener = sequence.client, sequence.top
                self._streams.setdefault(listener, {})[sequence.row] = sequence.request.id
                self._listed.pop(listener, None)
            elif sequence.gathers:
                self._gathering[sequence.row] = sequence
        self._over.update(row for row in drawn.ended if row in self._active)

    def commit(
        self,
        drawn: Drawn,
        steps: int,
        output: StepOutput,
        end: Callable[[Sequence, array[int], PackedLogprobs | None, float], int],
        now: float,
    ) -> int:
        """Delivers what the round of which `note` was told brought, `steps` steps; returns how many
        tokens that was.

        `end` takes the tokens of a sequence which the device has ended, the stop id included, with
        their reports if it asked for any, and returns how many it delivered. If the sequence does
        not end by them, the batch is spoiled.
        """
        delivered, width = 0, steps * ID_BYTES
        for row in sorted(self._over):
            sequence = self._active[row]
            self.catch_up(sequence)
            first = row * width
            ids = unpack_ids(drawn.tokens[first : first + drawn.ended[row] * ID_BYTES])
            reports = None
            if sequence.top >= 0:
                reports = drawn.reports_of(row, len(ids), sequence.top)
            self._gathering.pop(row, None)
            delivered += end(sequence, ids, reports, now)
            if not sequence.over:
                assert not sequence.handed_over, "it has no slot to go on in"
                self.spoiled = True
                sequence.since = sys.maxsize  # there is nothing to bring up
                self._stop_telling(sequence)
        for sequence in self._arrived:
            if not sequence.over and sequence.first_token_at is None:
                sequence.first_token_at = now
        for row, sequence in self._gathering.items():
            sequence.note(drawn.reports_of(row, steps, sequence.top))
        for listener, streams in self._streams.items():
            if listener not in self._listed:
                self._listed[listener] = list(streams), list(streams.values())
            rows, requests = self._listed[listener]
            client, top = listener
            reports = None if top < 0 else drawn.reports_of(rows, steps, top)
            output.run(client, Run(requests, steps, _of_rows(drawn.tokens, rows, width), reports))
        delivered += steps * (len(self._active) - len(self._over))
        self._ring.append(drawn.tokens, steps)
        self._now = now
        self._catch_some_up(steps)
        return delivered

    def catch_up(self, sequence: Sequence) -> None:
        """Lets it know what has been drawn for it."""
        if sequence.since < self._ring.steps:
            sequence.extend(self._ring.read(sequence.row, sequence.since), self._now)
            sequence.since = self._ring.steps

    def _catch_some_up(self, steps: int) -> None:
        """So many rows in turn that all have had theirs before their tokens are written over. Who
        is not far behind, as in a short answer, can wait for another turn."""
        late = self._ring.steps - TURN_STEPS
        for _ in range(-(-self.rows * steps // TURN_STEPS)):
            self._turn = self._turn + 1 if self._turn + 1 < self.rows else 0
            sequence = self._active.get(self._turn)
            if sequence is not None and sequence.since <= late:
                self.catch_up(sequence)

    def dissolve(self) -> None:
        """It is over, and no round of it is under way: its sequences are as they were before they
        joined, but further on."""
        for sequence in self._scheduled.values():
            self.catch_up(sequence)
            sequence.row = -1


def _of_rows(tokens: bytes, rows: list[int], width: int) -> bytes:
    """The tokens of `rows`, of all that there are, each `width` bytes."""
    if len(rows) * width == len(tokens) and rows == sorted(rows):
        return tokens
    return b"".join([tokens[row * width : row * width + width] for row in rows])
