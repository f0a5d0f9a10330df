"""CUDA graphs of decode steps and prompts: one launch instead of one per kernel.

A step of a small model, or of few tokens, is bound by launching its kernels, not by running them. A
graph fixes shapes and addresses, so one is captured per bucket; a batch is padded up to its bucket
with rows whose slot is negative, which every operator skips. Short steps have graphs of several:
one that comes after another in a graph begins before that one has ended, and 1 to 3 us earlier than
one that is a graph of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch

from engine.gc_tuning import gc_paused

# Rises by a half or less from 16 on, so that at most a third of a batch is padding.
_BUCKETS = (
    *(1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768),
    *(1024, 1536, 2048, 3072, 4096),
)

# From 1,024 on, the kernels of a model of 1.3 billion weights take as long as their launches, 4 ms
# on an H200. Padding tokens cost there what others do: at most MOST_PADDING of them.
_PROMPT_TOKENS = (16, 32, 64, 96, 128, 192, 256, 384, 512, 640, 768, 896, 1024, 1280, 1536)
# The kernels of smaller models do so from more tokens on.
_LONG_PROMPT_TOKENS = (2048, 3072, 4096, 6144, 8192)
#: Tokens that a prompt may be filled up by where they cost the device something.
MOST_PADDING = 255
# Padding sequences cost next to nothing but their row of logits. A scan finds its way among up to
# 31 without searching.
_PROMPT_CHUNKS = (4, 31, 127)

# So many steps of a graph at most, and for about so long, half a run of decode steps, since what is
# left of a run is taken step by step.
_MOST_GRAPH_STEPS = 8
_GRAPH_SECONDS = 1e-3


def buckets(max_batch: int, batches: Collection[int] | None = None) -> list[int]:
    """Batch sizes to capture, rising, up to `max_batch`, which is one of them; with `batches`, none
    but these and the largest.

    Beyond 4096 rows the kernels outlast their launches: larger batches run without a graph.
    """
    sizes = _up_to(max_batch, _BUCKETS)
    return [size for size in sizes if batches is None or size in batches or size == sizes[-1]]


def prompt_buckets(most_tokens: int, most_chunks: int, longest: int = 0) -> dict[int, list[int]]:
    """What to capture of prompts: for so many chunks, so many tokens, all rising. The largest are
    what the arguments allow, unless that is more than pays: then prompts run without a graph.

    longest: up to so many tokens, graphs are known to be worth it for long prompts too.
    """
    chunks = _up_to(min(most_chunks, most_tokens), _PROMPT_CHUNKS)
    tokens = _up_to(most_tokens, _PROMPT_TOKENS)
    tokens += [size for size in long_prompts(most_tokens) if size <= longest]
    return {count: [size for size in tokens if size >= count] for count in chunks}


def long_prompts(most_tokens: int) -> list[int]:
    """Tokens of prompts, rising and at most so many, of which graphs are worth it only where
    launching takes about as long as running."""
    if most_tokens <= _PROMPT_TOKENS[-1]:
        return []
    return _up_to(most_tokens, _LONG_PROMPT_TOKENS)


def _up_to(most: int, sizes: tuple[int, ...]) -> list[int]:
    largest = min(most, sizes[-1])
    return [*(size for size in sizes if size < largest), largest]


class BucketGraphs:
    """Graphs of `run(size)`, one for each of `sizes`, rising.

    `run` works on tensors of its own, always the same ones for one size. It must not wait for the
    device, nor allocate outside of torch. It is run once and captured once for each size, after
    `clear(size)`, which sees to it that all rows are padding, so that no state moves.
    """

    def __init__(
        self, run: Callable[[int], None], clear: Callable[[int], None], sizes: list[int]
    ) -> None:
        self._run = run
        self._clear = clear
        self._sizes = sizes
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}

    def size_of(self, batch: int) -> int | None:
        """The size of the graph for `batch` rows; None where there is none so large."""
        return next((size for size in self._sizes if size >= batch), None)

    def capture(self, pool: Any) -> None:
        """Captures every size, largest first, so that the others fit in its memory; `pool` is a
        torch.cuda.graph_pool_handle()."""
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
        """What `run(size)` does."""
        self._graphs[size].replay()

    def seconds(self, size: int) -> float:
        """How long a replay keeps the device busy whose rows are all padding: somewhat less than
        with real ones. Waits for it."""
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
    """A decode step as a CUDA graph for each batch size, short ones also several at a time.

    Graphs of `run(size)` and `clear(size)` as BucketGraphs has them, for each of `sizes`, rising;
    `run` may be run on its own results.
    """

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
    while 2 * steps <= _MOST_GRAPH_STEPS and 2 * steps * seconds <= _GRAPH_SECONDS:
        steps *= 2
    return steps
