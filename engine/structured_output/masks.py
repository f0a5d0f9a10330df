"""Computes masks of many matchers on threads, and limits slow masks per round.

A mask usually takes microseconds. Within the limits of engine.structured_output.compiler one can
take ten milliseconds, and a request may have hundreds of prompts: every request would wait for
seconds at each of their tokens. So sequences with slow masks take turns.

Many masks are computed by threads of the library, while the engine goes on. Copies of one matcher
wait for each other (engine.structured_output.grammar_cache), so they are passed next to each other:
a thread takes adjacent ones. Only the calling thread uses these objects; the library's threads do
not hold the GIL.
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
ROUND_SECONDS = 0.02  # total per round for slow masks
_NEWS = 0.2  # weight of the latest mask in the mean


@dataclass(eq=False, slots=True)
class MaskCost:
    """The mean duration of a grammar's masks, over all sequences that use it."""

    seconds: float = 0.0  # recent seconds per mask, on one thread

    @property
    def is_slow(self) -> bool:
        """Whether sequences with this grammar must take turns."""
        return self.seconds >= SLOW_SECONDS

    def note(self, seconds: float) -> None:
        """Update the mean with the duration of one mask."""
        self.seconds += _NEWS * (seconds - self.seconds)


class MaskBudget:
    """The remaining time for slow masks in a round."""

    def __init__(self) -> None:
        self._left = ROUND_SECONDS

    def has_room(self, cost: MaskCost | None) -> bool:
        """Return whether one more mask fits, and count it; the first one always fits."""
        if cost is None or not cost.is_slow:
            return True
        if self._left <= 0:
            return False
        self._left -= cost.seconds
        return True


Rows = Sequence[tuple["LLMatcher", int]]  # (matcher, row to which its mask is written)


class MaskThreads:
    """The library's mask threads, created when they are first needed."""

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._library: LLExecutor | None = None
        self._caller: ThreadPoolExecutor | None = None
        self._under_way: Future[None] | None = None

    def compute(self, rows: Rows, out: NDArray[np.int32]) -> None:
        """Write masks to rows of out [n, words].

        Raises what a matcher raises; other masks may then be missing.
        """
        if self._library is None:
            from llguidance import LLExecutor

            self._library = LLExecutor(self._threads)
        width = out.shape[1] * out.itemsize
        self._library.unsafe_compute_mask_ptr(list(rows), out.ctypes.data, width, len(out))

    def begin(self, rows: Rows, out: NDArray[np.int32]) -> None:
        """Start `compute` in the background and return; do not use these matchers before `wait`.

        Raises RuntimeError if no thread can be started.
        """
        if self._caller is None:
            self._caller = ThreadPoolExecutor(1, "masks")
        begun = threading.Event()

        def compute() -> None:
            begun.set()
            self.compute(rows, out)

        try:
            self._under_way = self._caller.submit(compute)
        except RuntimeError:  # no thread can be started; one that is later would still run this
            self._caller = None
            raise
        # Otherwise that thread would request the GIL, and get it only when this thread waits.
        begun.wait()

    def wait(self) -> None:
        """Wait until what was begun, if anything, is done. Raises what `compute` raises."""
        under_way, self._under_way = self._under_way, None
        if under_way is not None:
            under_way.result()
