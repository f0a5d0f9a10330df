"""Masks of many matchers by threads, what masks cost, and how many slow ones a round may have.
A mask takes microseconds as a rule. Within the limits of engine.structured_output.compiler one can
take ten milliseconds, and a request may have hundreds of prompts: everybody would wait for seconds
at each of their tokens. So those whose masks are slow take turns.

Many masks are computed by threads of the library, while the engine goes on. Matchers that are
copies of one wait for each other (engine.structured_output.grammar_cache), so those are given
together: threads take neighbours. Only the thread that calls them knows of these objects; the
library's hold no lock of Python's.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher

SLOW_SECONDS = 1e-3
ROUND_SECONDS = 0.02  # for slow masks
_NEWS = 0.2  # the part that the latest one has in what is known


@dataclass(eq=False, slots=True)
class MaskCost:
    """Of one grammar, whoever has it."""

    seconds: float = 0.0  # that a mask takes, by one thread, lately

    @property
    def is_slow(self) -> bool:
        return self.seconds >= SLOW_SECONDS

    def note(self, seconds: float) -> None:
        """One has taken so long."""
        self.seconds += _NEWS * (seconds - self.seconds)


class MaskBudget:
    """Of a round."""

    def __init__(self) -> None:
        self._left = ROUND_SECONDS

    def has_room(self, cost: MaskCost | None) -> bool:
        """For one more, which counts from now on; the first one always has room."""
        if cost is None or not cost.is_slow:
            return True
        if self._left <= 0:
            return False
        self._left -= cost.seconds
        return True


Rows = Sequence[tuple["LLMatcher", int]]  # matchers, and the rows that their masks go to


class MaskThreads:
    """So many threads of the library, which are made when they are needed."""

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._library: LLExecutor | None = None
        self._caller: ThreadPoolExecutor | None = None
        self._under_way: Future[None] | None = None

    def compute(self, rows: Rows, out: NDArray[np.int32]) -> None:
        """Writes masks to rows of out [n, words]. Raises what a matcher raises; then others may be
        missing."""
        if self._library is None:
            from llguidance import LLExecutor

            self._library = LLExecutor(self._threads)
        width = out.shape[1] * out.itemsize
        self._library.unsafe_compute_mask_ptr(list(rows), out.ctypes.data, width, len(out))

    def begin(self, rows: Rows, out: NDArray[np.int32]) -> None:
        """Likewise, but returns when that has begun. Nobody may use these matchers before `wait`.
        Raises RuntimeError where there is no thread to be had."""
        if self._caller is None:
            self._caller = ThreadPoolExecutor(1, "masks")
        begun = threading.Event()

        def compute() -> None:
            begun.set()
            self.compute(rows, out)

        try:
            self._under_way = self._caller.submit(compute)
        except RuntimeError:  # no thread can be had; one that came later would still compute this
            self._caller = None
            raise
        # Else that thread would ask this one for the interpreter, and get it when this one waits.
        begun.wait()

    def wait(self) -> None:
        """Until what was begun is done, if anything was. Raises what `compute` raises."""
        under_way, self._under_way = self._under_way, None
        if under_way is not None:
            under_way.result()
