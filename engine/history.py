"""History: the latest tokens of a batch's rows, a column a step, until somebody wants them.

What a round brings is put down at once, for all rows, and what belongs to one sequence is read when
it ends: so a round costs the host next to nothing per row.
"""

from __future__ import annotations

import numpy as np

COLUMNS = 512  # steps; when they are full, those who are behind have to be brought up to date


class History:
    """Steps are counted from the batch's first one."""

    def __init__(self) -> None:
        self._tokens = np.empty((0, COLUMNS), np.int32)
        self._first = 0  # the step of the first column
        self.steps = 0  # that have been put down

    def fits(self, steps: int) -> bool:
        """Whether there is room for so many more."""
        return self.steps - self._first + steps <= COLUMNS

    def clear(self) -> None:
        """Everybody has read everything."""
        self._first = self.steps

    def put(self, tokens: bytes, steps: int) -> None:
        """What all rows drew in the next `steps` steps: int32 [rows, steps]."""
        drawn = np.frombuffer(tokens, np.int32).reshape(-1, steps)
        rows = len(drawn)
        if rows > len(self._tokens):
            more = np.empty((2 * rows - len(self._tokens), COLUMNS), np.int32)
            self._tokens = np.concatenate([self._tokens, more])
        column = self.steps - self._first
        self._tokens[:rows, column : column + steps] = drawn
        self.steps += steps

    def of(self, row: int, since: int) -> bytes:
        """What a row drew from step `since` on, packed."""
        return self._tokens[row, since - self._first : self.steps - self._first].tobytes()
