"""Indices: row numbers on their way to the device, a few at a time and many times a round.

Pinned memory of its own for each of them would take longer than the copies that need them. So they
go through a ring, whose parts are used again when the device has passed what was uploaded there.
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
    """For one device."""

    def __init__(self, device: torch.device) -> None:
        words = PARTS * PART_WORDS
        pinned = device.type == "cuda"
        with torch.inference_mode(False):  # or nobody else could write to them
            self._host = torch.empty(words, dtype=torch.int64, pin_memory=pinned)
            self._there = torch.empty(words, dtype=torch.int64, device=device)
        self._array = self._host.numpy()
        self._passed = [torch.cuda.Event() for _ in range(PARTS)]
        self._at = 0  # the next free word

    def put(self, values: NDArray[np.int64]) -> Tensor:
        """`values`, less than PART_WORDS of them in a row, on the device."""
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


_rings: dict[torch.device, UploadRing] = {}


def to_device(
    values: Sequence[int] | Sequence[Sequence[int]] | NDArray[np.int64], device: torch.device
) -> Tensor:
    """`values`, int64 of any shape, on the device, without waiting for it: to be used by what the
    current stream is given next, not to be kept."""
    array = np.asarray(values, np.int64)
    if device.type == "cpu":
        return torch.from_numpy(array)
    if array.size >= PART_WORDS:
        return torch.from_numpy(array).pin_memory().to(device, non_blocking=True)
    ring = _rings.get(device)
    if ring is None:
        ring = _rings[device] = UploadRing(device)
    return ring.put(array.reshape(-1)).view(array.shape)
