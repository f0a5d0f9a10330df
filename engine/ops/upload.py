"""Uploads of small arrays of numbers to the device, without waiting for it.

Row indices are uploaded a few at a time and many times a step. Allocating pinned memory for each
would take longer than the copies, so they go through an UploadRing.
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
    """A ring of pinned memory, whose parts are reused when the device has passed their uploads.

    A runner has one, for its device. All uploads are made on one thread; only the stream that is
    current then may use them.
    """

    def __init__(self, device: torch.device) -> None:
        """Create the ring; on the CPU nothing is copied.

        On a GPU it allocates PARTS * PART_WORDS words of 8 bytes there, and as many in pinned
        memory.
        """
        self.device = device
        if device.type == "cuda":
            self._allocate()

    def _allocate(self) -> None:
        words = PARTS * PART_WORDS
        pinned = self.device.type == "cuda"
        with torch.inference_mode(False):  # otherwise nobody else could write to them
            self._host = torch.empty(words, dtype=torch.int64, pin_memory=pinned)
            self._there = torch.empty(words, dtype=torch.int64, device=self.device)
        self._array = self._host.numpy()
        self._passed = [torch.cuda.Event() for _ in range(PARTS)]
        self._at = 0  # the next free word

    def put(self, values: Sequence[int] | Sequence[Sequence[int]] | NDArray[np.int64]) -> Tensor:
        """Upload `values`, int64 of any shape, for the next work on the current stream.

        The result must not be kept.
        """
        array = np.asarray(values, np.int64)
        if self.device.type == "cpu":
            return torch.from_numpy(array)
        if array.size >= PART_WORDS:
            return torch.from_numpy(array).pin_memory().to(self.device, non_blocking=True)
        return self._put(array.reshape(-1)).view(array.shape)

    def _put(self, values: NDArray[np.int64]) -> Tensor:
        """Upload fewer than PART_WORDS values in one dimension."""
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
    """Upload `values` [n] to newly allocated device memory."""
    if device.type == "cpu":
        return torch.tensor(values, dtype=dtype)
    return torch.tensor(values, dtype=dtype, pin_memory=True).to(device, non_blocking=True)
