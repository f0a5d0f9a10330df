"""DecodeBatch: sequences that decode together, round after round, in rows kept by the device.

The device samples for them without the host. A round may therefore take several steps, and may be
started before the results of the previous one are known. Every sequence has a row of its own while
it decodes; a row whose sequence has ended is given to another one. Results arrive later than the
plans that follow, so the batch has two views of its rows: as of the latest plan (`schedule`), and
as of the latest result (`commit`).

Steps are counted from the batch's first one. The tokens of a round are appended to the TokenRing
for all rows at once. A sequence gets its own tokens when it ends, leaves the batch, or falls too
far behind (`catch_up`), so a round costs the host almost nothing per row.
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

RING_STEPS = 1024  # steps kept; a sequence that is further behind would lose tokens
# Not a power of two, so that rows fall into different sets of the CPU's cache.
RING_WIDTH = RING_STEPS + 16
# a sequence this far behind catches up within as many further steps
CATCH_UP_STEPS = RING_STEPS // 4


class TokenRing:
    """A ring buffer of the latest RING_STEPS tokens of each row of a batch."""

    def __init__(self) -> None:
        self._tokens = np.empty((0, RING_WIDTH), np.int32)
        self.steps = 0  # steps appended so far

    def append(self, tokens: bytes, steps: int) -> None:
        """Append the tokens of all rows for the next `steps` steps: packed int32 [rows, steps]."""
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
        """Return a row's packed tokens from step `since` on, at most RING_STEPS steps ago."""
        assert 0 <= self.steps - since <= RING_STEPS, "tokens have been written over"
        at, count = since % RING_STEPS, self.steps - since
        first = min(count, RING_STEPS - at)
        drawn = self._tokens[row, at : at + first].tobytes()
        if first < count:
            drawn += self._tokens[row, : count - first].tobytes()
        return drawn


_Listener = tuple[Hashable, int]  # (client, number of top tokens in its reports)


class DecodeBatch:
    """The rows of one batch on the device; all of its sequences are `plain`.

    For each round call `join` and `leave`, then `schedule`; when its result has arrived, call
    `begin_commit` and `commit`. Results arrive in the order of the plans.
    """

    def __init__(self) -> None:
        self.started = False  # the batch is on the device
        self.spoiled = False  # the device has ended a row whose sequence goes on
        self.rows = 0  # the largest number of rows in use at once
        self._free: list[int] = []  # free rows, as a heap
        self._ended: list[int] = []  # rows that the device must end before the next round

        # As of the latest plan.
        self._scheduled: dict[int, Sequence] = {}  # by row
        self.streamed = 0  # scheduled sequences that are streamed
        self.known = 0  # scheduled sequences without any stop id
        self._sampled = 0  # scheduled sequences that are not greedy
        self._adjusted = 0  # scheduled sequences with logits processors
        self._tops: dict[int, int] = {}  # number of scheduled sequences by Sequence.top
        self._asked = 0  # sum of max_tokens over scheduled sequences
        self._last: Sequence | None = None  # the one that may last the longest, unless it has ended
        # scheduled sequences, by last step and row
        self._ending: dict[int, dict[int, Sequence]] = {}
        self._planned = 0  # steps planned so far
        self._before_latest = 0  # steps planned before the latest round

        # As of the latest result.
        self._active: dict[int, Sequence] = {}  # by row
        self._coming: deque[Sequence] = deque()  # joined in rounds whose results have not arrived
        self._over: set[int] = set()  # active rows that the device has ended
        self._streams: dict[_Listener, dict[int, int]] = {}  # streamed request ids by row
        # `_streams` as lists: (rows, requests)
        self._listed: dict[_Listener, tuple[list[int], list[int]]] = {}
        # active sequences that gather log-probabilities, by row
        self._gathering: dict[int, Sequence] = {}
        self._arrived: list[Sequence] = []  # became active with the latest result
        self._ring = TokenRing()
        self._next_row = 0  # the next row that may catch up
        self._now = 0.0  # time of the latest result

    def __len__(self) -> int:
        """Return the number of scheduled sequences.

        They have not ended, as far as is known, and have not handed over their slots.
        """
        return len(self._scheduled)

    @property
    def mean_answer(self) -> float:
        """Mean max_tokens of the scheduled sequences."""
        return self._asked / len(self._scheduled) if self._scheduled else 0.0

    @property
    def active(self) -> int:
        """Sequences that took part in the round of the latest result and have not ended."""
        return len(self._active)

    # Planning.

    def join(self, plan: StepPlan, sequence: Sequence, drawn: bool) -> None:
        """Give a sequence a row, in which it decodes from this plan on.

        With `drawn`, a chunk of the same plan samples its first token; otherwise its last token is
        known.
        """
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
        """Remove a sequence that has ended.

        If the device has not ended its row, the next round ends it first.
        """
        row, over = sequence.row, False
        if self._active.get(row) is sequence:
            del self._active[row]
            over = row in self._over
            self._over.discard(row)
            self._stop_telling(sequence)
        else:
            self._coming.remove(sequence)
        if not sequence.handed_over:
            self._free_row(sequence)
            if not over:
                self._ended.append(row)
        sequence.row = -1

    def _free_row(self, sequence: Sequence) -> None:
        """Free the sequence's row for another sequence, from the next plan on."""
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
        """Return the sequences that end with the latest planned round at the latest."""
        steps = range(self._before_latest + 1, self._planned + 1)
        return [one for step in steps for one in self._ending.get(step, {}).values()]

    def hand_over(self, sequence: Sequence) -> None:
        """Free the row and the slot of a sequence that is `ending`, before it has ended."""
        sequence.handed_over = True
        self._free_row(sequence)

    def last_steps(self, steps: int) -> dict[int, int]:
        """Return how many answers end at the latest at each of the next `steps` steps, from 1."""
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
        """Return how many steps beyond the planned ones the longest answer may take."""
        if self._last is None or self._last.over or self._last.row < 0:
            scheduled = self._scheduled.values()
            self._last = max(scheduled, key=lambda one: one.last_step, default=None)
        return 0 if self._last is None else self._last.last_step - self._planned

    def schedule(self, plan: StepPlan, steps: int) -> None:
        """Make the plan this batch's next round, with this many decode steps."""
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
        """Record which rows take part in the next result, and which of them have ended.

        Sequences may `leave` between this call and `commit`, which then skips them.
        """
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
        """Deliver the tokens of the round that was passed to `begin_commit`.

        Args:
            drawn: the round's tokens.
            steps: decode steps of the round.
            output: receives tokens of streamed requests.
            end: called with the last tokens of a sequence that the device has ended, including the
                stop id, and their log-probabilities if requested; returns how many tokens it
                delivered. If they do not end the sequence, the batch is spoiled.
            now: seconds.

        Returns:
            The number of tokens delivered.
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
                sequence.since = sys.maxsize  # nothing to catch up with
                self._stop_telling(sequence)
        for sequence in self._arrived:
            if not sequence.over and sequence.first_token_at is None:
                sequence.first_token_at = now
        for row, sequence in self._gathering.items():
            sequence.add_reports(drawn.reports_of(row, steps, sequence.top))
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
        """Give an active sequence its tokens of all results so far."""
        if sequence.since < self._ring.steps:
            sequence.extend(self._ring.read(sequence.row, sequence.since), self._now)
            sequence.since = self._ring.steps

    def _catch_some_up(self, steps: int) -> None:
        """Let the next few rows catch up, enough that all do before their tokens are overwritten.

        Sequences that are not far behind, as in short answers, are skipped this time.
        """
        late = self._ring.steps - CATCH_UP_STEPS
        for _ in range(-(-self.rows * steps // CATCH_UP_STEPS)):
            self._next_row = self._next_row + 1 if self._next_row + 1 < self.rows else 0
            sequence = self._active.get(self._next_row)
            if sequence is not None and sequence.since <= late:
                self.catch_up(sequence)

    def dissolve(self) -> None:
        """End the batch; no round of it may be in flight.

        Its sequences then have no rows and know all their tokens.
        """
        for sequence in self._scheduled.values():
            self.catch_up(sequence)
            sequence.row = -1


def _of_rows(tokens: bytes, rows: list[int], width: int) -> bytes:
    """Return the tokens of `rows`, out of the tokens of all rows; each row has `width` bytes."""
    if len(rows) * width == len(tokens) and rows == sorted(rows):
        return tokens
    return b"".join([tokens[row * width : row * width + width] for row in rows])
