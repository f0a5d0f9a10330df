"""History: the latest tokens of a batch's rows, a line a step, until somebody wants them.

What a round brings is put down at once, for all rows, and what belongs to one sequence is read when
it ends: so a round costs the host next to nothing per row.
"""

from __future__ import annotations

import numpy as np

STEPS = 1024  # that are kept: who is behind by more has lost tokens
TURN_STEPS = STEPS // 4  # within so many steps everybody should have read once


class History:
    """Steps are counted from the batch's first one."""

    def __init__(self) -> None:
        self._tokens = np.empty((STEPS, 0), np.int32)
        self.steps = 0  # that have been put down

    def put(self, tokens: bytes, steps: int) -> None:
        """What all rows drew in the next `steps` steps: int32 [rows, steps]."""
        drawn = np.frombuffer(tokens, np.int32).reshape(-1, steps).T
        rows, known = drawn.shape[1], self._tokens.shape[1]
        if rows > known:
            more = np.empty((STEPS, 2 * rows - known), np.int32)
            self._tokens = np.concatenate([self._tokens, more], axis=1)
        line = self.steps % STEPS
        first = min(steps, STEPS - line)
        self._tokens[line : line + first, :rows] = drawn[:first]
        self._tokens[: steps - first, :rows] = drawn[first:]
        self.steps += steps

    def of(self, row: int, since: int) -> bytes:
        """What a row drew from step `since` on, packed."""
        assert 0 <= self.steps - since <= STEPS, "tokens have been written over"
        line, count = since % STEPS, self.steps - since
        first = min(count, STEPS - line)
        drawn = self._tokens[line : line + first, row].tobytes()
        if first < count:
            drawn += self._tokens[: count - first, row].tobytes()
        return drawn
