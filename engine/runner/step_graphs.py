"""StepGraphs: a decode step as a CUDA graph for each batch size, short ones also several at a time.

A step that comes after another in one graph begins before that one has ended, and 1 to 3 us earlier
than one that is a graph of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from engine.runner.cuda_graphs import BucketGraphs

# So many steps of a graph at most, and for about so long, half a round, since what is left of a
# round is taken step by step.
_MOST_STEPS = 8
_SECONDS = 1e-3


class StepGraphs:
    """Graphs of `run(size)` and `clear(size)` as BucketGraphs has them, for each of `sizes`,
    rising; `run` may be run on its own results."""

    def __init__(
        self, run: Callable[[int], None], clear: Callable[[int], None], sizes: list[int]
    ) -> None:
        self._run = run
        self._clear = clear
        self._sizes = sizes
        self._steps_of: dict[int, int] = {}  # by size, how many steps those of several have
        self._single = BucketGraphs(run, clear, sizes)
        self._several = BucketGraphs(self._run_steps, clear, [])

    def capture(self, pool: Any) -> None:
        """As BucketGraphs.capture."""
        self._single.capture(pool)
        steps = {size: steps_of_graph(self._single.seconds(size)) for size in self._sizes}
        self._steps_of = {size: count for size, count in steps.items() if count > 1}
        self._several = BucketGraphs(self._run_steps, self._clear, list(self._steps_of))
        self._several.capture(pool)

    def size_of(self, batch: int) -> int | None:
        """As BucketGraphs.size_of."""
        return self._single.size_of(batch)

    def replay(self, size: int, steps: int) -> None:
        """`run(size)`, so many times."""
        together = self._steps_of.get(size, 1)
        while together > 1 and steps >= together:
            self._several.replay(size)
            steps -= together
        for _ in range(steps):
            self._single.replay(size)

    def _run_steps(self, size: int) -> None:
        for _ in range(self._steps_of[size]):
            self._run(size)


def steps_of_graph(seconds: float) -> int:
    """Of steps that take so long: the largest power of two within both limits."""
    steps = 1
    while 2 * steps <= _MOST_STEPS and 2 * steps * seconds <= _SECONDS:
        steps *= 2
    return steps
