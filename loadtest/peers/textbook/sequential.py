"""The recurrence as it is written, step after step: the least work and the greatest depth."""

from __future__ import annotations

import torch
from torch import Tensor

from loadtest.peers.textbook.work import Work


def scan(a: Tensor, b: Tensor) -> Tensor:
    """Return h [batch, time, channels] by a loop over time, a kernel for each token."""
    h = torch.empty_like(b)
    h[:, 0] = b[:, 0]
    for t in range(1, b.shape[1]):
        torch.addcmul(b[:, t], a[:, t], h[:, t - 1], out=h[:, t])
    return h


def work(time: int) -> Work:
    """Return what `scan` does for `time` tokens."""
    steps = time - 1
    return Work(steps, 0, 2 + 4 * steps, 1 + steps, steps)
