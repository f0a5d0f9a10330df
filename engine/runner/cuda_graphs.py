"""CUDA graphs of decode steps and prompts: one launch instead of one per kernel.

A step of a small model, or of few tokens, is bound by launching its kernels, not by running them. A
graph fixes shapes and addresses, so one is captured per bucket; a batch is padded to its bucket
with rows whose slot is negative, which every operator skips. Short steps also have graphs of
several steps: inside a graph a step begins before the previous one has ended, 1 to 3 us earlier
than a step that is a graph of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch

from engine.gc_tuning import gc_paused

# From 16 on each bucket is at most half as large again as the one before, so at most a third of a
# batch is padding.
_BUCKETS = (
    *(1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768),
    *(1024, 1536, 2048, 3072, 4096),
)

# From 1,024 tokens on, the kernels of a model of 1.3 billion weights take as long as their
# launches, 4 ms on an H200. Padding tokens then cost as much as others, so there are at most
# MOST_PADDING of them.
_PROMPT_TOKENS = (16, 32, 64, 96, 128, 192, 256, 384, 512, 640, 768, 896, 1024, 1280, 1536)
# Smaller models reach that point with more tokens.
_LONG_PROMPT_TOKENS = (2048, 3072, 4096, 6144, 8192)
# The most tokens with which a prompt is padded if padding costs time.
MOST_PADDING = 255
# Numbers of chunks. Padding sequences cost almost nothing except for their row of logits. A scan
# finds its sequence among up to 31 without a search.
_PROMPT_CHUNKS = (4, 31, 127)

# Bounds of a graph of several steps: number of steps, and about how long they take (half a run of
# decode steps, since the rest of a run is executed step by step).
_MOST_GRAPH_STEPS = 8
_GRAPH_SECONDS = 1e-3


def buckets(max_batch: int, batches: Collection[int] | None = None) -> list[int]:
    """Return the batch sizes to capture, ascending, up to `max_batch`, which is always included.

    `batches`, if given, limits them to these sizes and the largest. Beyond 4096 rows the kernels
    take longer than their launches, so larger batches run without a graph.
    """
    sizes = _up_to(max_batch, _BUCKETS)
    return [size for size in sizes if batches is None or size in batches or size == sizes[-1]]


def prompt_buckets(most_tokens: int, most_chunks: int, longest: int = 0) -> dict[int, list[int]]:
    """Return the prompt shapes to capture: number of chunks -> numbers of tokens, all ascending.

    The largest are the given limits, unless such graphs would not pay; larger prompts then run
    without a graph.

    Args:
        most_tokens: the most tokens of a step.
        most_chunks: the most chunks of a step.
        longest: graphs of long prompts are known to pay up to this many tokens.
    """
    chunks = _up_to(min(most_chunks, most_tokens), _PROMPT_CHUNKS)
    tokens = _up_to(most_tokens, _PROMPT_TOKENS)
    tokens += [size for size in long_prompts(most_tokens) if size <= longest]
    return {count: [size for size in tokens if size >= count] for count in chunks}


def long_prompts(most_tokens: int) -> list[int]:
    """Return the sizes of long prompts, ascending, up to `most_tokens`.

    Graphs of these pay only if launching takes about as long as running.
    """
    if most_tokens <= _PROMPT_TOKENS[-1]:
        return []
    return _up_to(most_tokens, _LONG_PROMPT_TOKENS)


def _up_to(most: int, sizes: tuple[int, ...]) -> list[int]:
    largest = min(most, sizes[-1])
    return [*(size for size in sizes if size < largest), largest]


class BucketGraphs:
    """CUDA graphs of `run(size)`, one for each of `sizes` (ascending).

    `run` works on its own tensors, always the same ones for one size. It must not wait for the
    device, nor allocate memory outside of torch. For each size it is run once and captured once,
    after `clear(size)`, which must turn all rows into padding so that no state changes.
    """

    def __init__(
        self, run: Callable[[int], None], clear: Callable[[int], None], sizes: list[int]
    ) -> None:
        self._run = run
        self._clear = clear
        self._sizes = sizes
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}

    def size_of(self, batch: int) -> int | None:
        """Return the size of the graph for `batch` rows; None if no graph is large enough."""
        return next((size for size in self._sizes if size >= batch), None)

    def capture(self, pool: Any) -> None:
        """Capture every size, largest first, so that the others fit in its memory.

        `pool` is a torch.cuda.graph_pool_handle().
        """
        for size in reversed(self._sizes):
            self._clear(size)
            self._warm_up(size)
            graph = torch.cuda.CUDAGraph()
            with (
                gc_paused(),
                torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"),
            ):
                self._run(size)
            self._graphs[size] = graph

    def _warm_up(self, size: int) -> None:
        # Libraries choose and load their kernels at first use, which a capture does not allow.
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._run(size)
        torch.cuda.current_stream().wait_stream(stream)

    def replay(self, size: int) -> None:
        """Replay the graph of `run(size)`."""
        self._graphs[size].replay()

    def seconds(self, size: int) -> float:
        """Measure how many seconds a replay with padding rows takes on the device.

        This is somewhat less than with real rows. Waits for the device.
        """
        self._clear(size)
        times: list[float] = []
        for _ in range(3):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            self.replay(size)
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) / 1e3)
        return min(times)


class StepGraphs:
    """A decode step as a CUDA graph for each batch size; short steps also as a graph of several.

    `run`, `clear` and `sizes` are as for BucketGraphs; `run` may be repeated on its own results.
    """

    def __init__(
        self, run: Callable[[int], None], clear: Callable[[int], None], sizes: list[int]
    ) -> None:
        self._run = run
        self._clear = clear
        self._sizes = sizes
        self._steps_of: dict[int, int] = {}  # steps in the graph of several, by size
        self._single = BucketGraphs(run, clear, sizes)
        self._several = BucketGraphs(self._run_steps, clear, [])

    def capture(self, pool: Any) -> None:
        """Capture every size; see BucketGraphs.capture."""
        self._single.capture(pool)
        steps = {size: steps_of_graph(self._single.seconds(size)) for size in self._sizes}
        self._steps_of = {size: count for size, count in steps.items() if count > 1}
        self._several = BucketGraphs(self._run_steps, self._clear, list(self._steps_of))
        self._several.capture(pool)

    def size_of(self, batch: int) -> int | None:
        """Return the size of the graph for `batch` rows; see BucketGraphs.size_of."""
        return self._single.size_of(batch)

    def replay(self, size: int, steps: int) -> None:
        """Execute `run(size)` `steps` times."""
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
    """Return how many steps of this duration one graph has: the largest allowed power of two."""
    steps = 1
    while 2 * steps <= _MOST_GRAPH_STEPS and 2 * steps * seconds <= _GRAPH_SECONDS:
        steps *= 2
    return steps
