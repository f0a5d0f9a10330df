"""TokenRing: the latest tokens of a batch's rows, until somebody wants them.

What a round brings is put down at once, for all rows, and what belongs to one sequence is read when
it ends: so a round costs the host next to nothing per row.
"""

from __future__ import annotations

import numpy as np

STEPS = 1024  # that are kept: who is behind by more has lost tokens
WIDTH = STEPS + 16  # no power of two: else all rows' lines would want the same place of the cache
TURN_STEPS = STEPS // 4  # who is behind by so many reads within as many more


class TokenRing:
    """Steps are counted from the batch's first one."""

    def __init__(self) -> None:
        self._tokens = np.empty((0, WIDTH), np.int32)
        self.steps = 0  # that have been put down

    def put(self, tokens: bytes, steps: int) -> None:
        """What all rows drew in the next `steps` steps: int32 [rows, steps]."""
        drawn = np.frombuffer(tokens, np.int32).reshape(-1, steps)
        rows, known = drawn.shape[0], self._tokens.shape[0]
        if rows > known:
            more = np.empty((2 * rows - known, WIDTH), np.int32)
            self._tokens = np.concatenate([self._tokens, more])
        at = self.steps % STEPS
        first = min(steps, STEPS - at)
        self._tokens[:rows, at : at + first] = drawn[:, :first]
        if first < steps:
            self._tokens[:rows, : steps - first] = drawn[:, first:]
        self.steps += steps

    def of(self, row: int, since: int) -> bytes:
        """What a row drew from step `since` on, packed."""
        assert 0 <= self.steps - since <= STEPS, "tokens have been written over"
        at, count = since % STEPS, self.steps - since
        first = min(count, STEPS - at)
        drawn = self._tokens[row, at : at + first].tobytes()
        if first < count:
            drawn += self._tokens[row, : count - first].tobytes()
        return drawn
