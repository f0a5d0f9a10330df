"""Small arrays of numbers on their way to the device, without waiting for it.

Row numbers go up a few at a time and many times a step. Pinned memory of its own for each of them
would take longer than the copies that need them, so they go through an UploadRing.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.ops import copy_words_

PART_WORDS = 2**16
PARTS = 4


class UploadRing:
    """Pinned memory whose parts are used again when the device has passed what was uploaded there.

    A runner has one, for the device that it runs on. All uploads are made on one thread; the stream
    that is current then is the one that may use them.
    """

    def __init__(self, device: torch.device) -> None:
        """On a GPU takes PARTS * PART_WORDS words of 8 bytes there and as many in pinned memory;
        on the CPU nothing is copied."""
        self.device = device
        if device.type == "cuda":
            self._allocate()

    def _allocate(self) -> None:
        words = PARTS * PART_WORDS
        pinned = self.device.type == "cuda"
        with torch.inference_mode(False):  # or nobody else could write to them
            self._host = torch.empty(words, dtype=torch.int64, pin_memory=pinned)
            self._there = torch.empty(words, dtype=torch.int64, device=self.device)
        self._array = self._host.numpy()
        self._passed = [torch.cuda.Event() for _ in range(PARTS)]
        self._at = 0  # the next free word

    def put(self, values: Sequence[int] | Sequence[Sequence[int]] | NDArray[np.int64]) -> Tensor:
        """`values`, int64 of any shape, on the device: to be used by what the current stream is
        given next, not to be kept."""
        array = np.asarray(values, np.int64)
        if self.device.type == "cpu":
            return torch.from_numpy(array)
        if array.size >= PART_WORDS:
            return torch.from_numpy(array).pin_memory().to(self.device, non_blocking=True)
        return self._put(array.reshape(-1)).view(array.shape)

    def _put(self, values: NDArray[np.int64]) -> Tensor:
        """Less than PART_WORDS values in a row."""
        part, used = divmod(self._at, PART_WORDS)
        if used + len(values) >= PART_WORDS:
            self._passed[part].record()
            part = (part + 1) % PARTS
            self._passed[part].synchronize()
            self._at = part * PART_WORDS
        here = slice(self._at, self._at + len(values))
        self._array[here] = values
        there = self._there[here]
        copy_words_(there, self._host[here])
        self._at += len(values)
        return there


def upload(values: Sequence[float], dtype: torch.dtype, device: torch.device) -> Tensor:
    """`values` [n] on the device, in memory of their own."""
    if device.type == "cpu":
        return torch.tensor(values, dtype=dtype)
    return torch.tensor(values, dtype=dtype, pin_memory=True).to(device, non_blocking=True)
