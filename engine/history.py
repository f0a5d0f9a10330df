"""History: the latest tokens of a batch's rows, a line a step, until somebody wants them.

What a round brings is put down at once, for all rows, and what belongs to one sequence is read when
it ends: so a round costs the host next to nothing per row.
"""

from __future__ import annotations

import numpy as np

STEPS = 512  # when there are so many, those who are behind have to be brought up to date


class History:
    """Steps are counted from the batch's first one."""

    def __init__(self) -> None:
        self._tokens = np.empty((STEPS, 0), np.int32)
        self._first = 0  # the step of the first line
        self.steps = 0  # that have been put down

    def fits(self, steps: int) -> bool:
        """Whether there is room for so many more."""
        return self.steps - self._first + steps <= STEPS

    def clear(self) -> None:
        """Everybody has read everything."""
        self._first = self.steps

    def put(self, tokens: bytes, steps: int) -> None:
        """What all rows drew in the next `steps` steps: int32 [rows, steps]."""
        drawn = np.frombuffer(tokens, np.int32).reshape(-1, steps)
        rows = len(drawn)
        known = self._tokens.shape[1]
        if rows > known:
            more = np.empty((STEPS, 2 * rows - known), np.int32)
            self._tokens = np.concatenate([self._tokens, more], axis=1)
        line = self.steps - self._first
        self._tokens[line : line + steps, :rows] = drawn.T
        self.steps += steps

    def of(self, row: int, since: int) -> bytes:
        """What a row drew from step `since` on, packed."""
        return self._tokens[since - self._first : self.steps - self._first, row].tobytes()
