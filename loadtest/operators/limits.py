"""The limits of an operator, measured in the same run: copies and element-wise kernels."""

from __future__ import annotations

from functools import partial

import torch

from loadtest.timing import copy_bandwidth, graph_seconds_per_call, release_memory, rotation

#: Reads that come with one write -> the kernel that moves the same bytes without a recurrence.
ELEMENTWISE = {2: "torch.add", 3: "torch.addcmul"}


class Limits:
    """The limits of one device; each is measured when it is first needed, and then cached."""

    def __init__(self, device: torch.device, copy_bytes: int) -> None:
        self.device = device
        self._copy_bytes = copy_bytes
        self.ceiling = self.copy_rate()
        self._rates: dict[tuple[int, int, torch.dtype], float | None] = {}
        self._copies: dict[int, float] = {}

    def copy_rate(self) -> float:
        """Measure the bytes per second of a large copy, counting bytes read and written."""
        return copy_bandwidth(self.device, self._copy_bytes)

    def elementwise(self, reads: int, elements: int, dtype: torch.dtype) -> float | None:
        """Return the bytes per second of `reads` reads and one write of `elements` numbers.

        None if the tensors do not fit in memory.
        """
        key = (reads, elements, dtype)
        if key not in self._rates:
            try:
                self._rates[key] = self._elementwise(*key)
            except torch.OutOfMemoryError:
                self._rates[key] = None
            release_memory(self.device)
        return self._rates[key]

    def _elementwise(self, reads: int, elements: int, dtype: torch.dtype) -> float:
        size = (reads + 1) * elements * dtype.itemsize
        kernel = torch.add if reads == 2 else torch.addcmul
        calls = []
        for _ in range(rotation(size, self.device)):
            inputs = [
                torch.empty(elements, device=self.device, dtype=dtype).uniform_(0.1, 1)
                for _ in range(reads)
            ]
            calls.append(partial(kernel, *inputs, out=torch.empty_like(inputs[0])))
        return size / graph_seconds_per_call(calls, self.device).seconds

    def copy_seconds(self, size: int, launches: int) -> float:
        """Return the seconds to read size / 2 bytes and write them elsewhere.

        Launched like a step: many calls over rotating buffers in one graph. The faster of torch's
        copy, which a graph may pass to the copy engine, and an element-wise kernel with one read
        and one write (`torch.neg`) counts.
        """
        half = max(1, size // 8)  # float32 numbers that make up half of the bytes
        if half not in self._copies:
            pairs = [
                (torch.randn(half, device=self.device), torch.empty(half, device=self.device))
                for _ in range(rotation(size, self.device))
            ]
            copies = [partial(target.copy_, source) for source, target in pairs]
            kernels = [partial(torch.neg, source, out=target) for source, target in pairs]
            self._copies[half] = min(
                graph_seconds_per_call(calls, self.device, launches=launches).seconds
                for calls in (copies, kernels)
            )
        return self._copies[half]
