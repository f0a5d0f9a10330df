"""CUDA graphs of the decode step: one launch instead of one per kernel.

A decode step of a small model is bound by launching its kernels, not by running them. A graph fixes
shapes and addresses, so one is captured per batch bucket; a batch is padded up to its bucket with
rows whose slot is negative, which every operator skips.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

# Rises by a half or less from 16 on, so that at most a third of a batch is padding.
_BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)

DecodeStep = Callable[[Tensor, Tensor], Tensor]


def buckets(max_batch: int) -> list[int]:
    """Batch sizes to capture, rising, up to `max_batch`, which is one of them.

    Beyond 1024 rows the kernels outlast their launches: larger batches run without a graph.
    """
    largest = min(max_batch, _BUCKETS[-1])
    return [*(size for size in _BUCKETS if size < largest), largest]


class DecodeGraphs:
    """Graphs of `step`: tokens int32 [batch], slots int32 [batch] -> logits fp32 [batch, vocab].

    `step` must not wait for the device, nor allocate outside of torch, and must skip negative
    slots. Capturing runs it with negative slots only, so no state moves.
    """

    def __init__(
        self, step: DecodeStep, max_batch: int, vocab_size: int, device: torch.device
    ) -> None:
        self._step = step
        self._buckets = buckets(max_batch)
        largest = self._buckets[-1]
        self._inputs = torch.zeros(2, largest, dtype=torch.int32, device=device)  # tokens, slots
        self._logits = torch.empty(largest, vocab_size, device=device)
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}

    @property
    def max_batch(self) -> int:
        """Larger batches have no graph."""
        return self._buckets[-1]

    def capture(self) -> None:
        """Captures every bucket, largest first, so that the others fit in its memory."""
        pool = torch.cuda.graph_pool_handle()
        self._inputs[0] = 0
        self._inputs[1] = -1
        for size in reversed(self._buckets):
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

    def _run(self, size: int) -> None:
        tokens, slots = self._inputs[:, :size]
        self._logits[:size].copy_(self._step(tokens, slots))

    def replay(self, tokens: Sequence[int], slots: Sequence[int]) -> Tensor:
        """Logits [batch, vocab] of one step; the next replay overwrites them."""
        batch = len(tokens)
        size = next(size for size in self._buckets if size >= batch)
        padding = size - batch
        inputs = torch.tensor(
            [[*tokens, *[0] * padding], [*slots, *[-1] * padding]],
            dtype=torch.int32,
            pin_memory=True,
        )
        self._inputs[:, :size].copy_(inputs, non_blocking=True)
        self._graphs[size].replay()
        return self._logits[:batch]
