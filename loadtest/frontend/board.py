"""A shared file of integers by which the processes of a measurement tell each other."""

from __future__ import annotations

import mmap
from pathlib import Path

READERS = 16  # at most
MOST_STEPS = 1 << 18
_COUNTS = 8  # where the readers' counts begin
_TIMES = 64


class Board:
    """The shared integers; every field has one writer."""

    def __init__(self, path: Path, *, create: bool = False) -> None:
        self.path = path
        size = 8 * (_TIMES + MOST_STEPS)
        if create:
            with path.open("wb") as file:
                file.truncate(size)
        with path.open("r+b") as file:
            self._cells = memoryview(mmap.mmap(file.fileno(), size)).cast("q")

    def set_up(self, *, window: int, period_ns: int = 0, expected: int = 0, chunk: int = 1) -> None:
        """Set up a measurement, and reset all counts.

        Args:
            window: events in flight of each stream; 0: steps come at a steady pace.
            period_ns: nanoseconds between steps of a steady pace; 0 with `window` 0: no steps.
            expected: streams that must have begun before a steady pace begins.
            chunk: tokens of one event.
        """
        measurement = self.measurement + 1
        for cell in range(_TIMES):
            self._cells[cell] = 0
        self._cells[0], self._cells[1], self._cells[2] = window, period_ns, expected
        self._cells[3], self._cells[4] = chunk, measurement

    @property
    def measurement(self) -> int:
        """The number of measurements that were set up."""
        return self._cells[4]

    @property
    def window(self) -> int:
        return self._cells[0]

    @window.setter
    def window(self, steps: int) -> None:
        self._cells[0] = steps

    @property
    def period_ns(self) -> int:
        return self._cells[1]

    @property
    def expected(self) -> int:
        return self._cells[2]

    @property
    def chunk(self) -> int:
        return self._cells[3]

    @property
    def received(self) -> int:
        """Tokens that all readers have read."""
        return sum(self._cells[_COUNTS : _COUNTS + READERS])

    def count(self, reader: int, tokens: int) -> None:
        """Set the number of tokens that a reader has read so far."""
        self._cells[_COUNTS + reader] = tokens

    def stamp(self, step: int, now_ns: int) -> None:
        """Set the time of a step, by time.monotonic_ns."""
        self._cells[_TIMES + step % MOST_STEPS] = now_ns

    def time_of(self, step: int) -> int:
        return self._cells[_TIMES + step % MOST_STEPS]
