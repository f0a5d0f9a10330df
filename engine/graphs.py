"""CUDA graphs of the decode step: one launch instead of one per kernel.

A decode step of a small model is bound by launching its kernels, not by running them. A graph fixes
shapes and addresses, so one is captured per batch bucket; a batch is padded up to its bucket with
rows whose slot is negative, which every operator skips.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

# Rises by a half or less from 16 on, so that at most a third of a batch is padding.
_BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)


def buckets(max_batch: int) -> list[int]:
    """Batch sizes to capture, rising, up to `max_batch`, which is one of them.

    Beyond 1024 rows the kernels outlast their launches: larger batches run without a graph.
    """
    largest = min(max_batch, _BUCKETS[-1])
    return [*(size for size in _BUCKETS if size < largest), largest]


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
            with torch.cuda.graph(graph, pool=pool):
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
