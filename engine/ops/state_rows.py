"""Rows of a state pool, read and written by operators composed of torch's.

Slots are indices of rows; one out of range belongs to no sequence. The host reads no slot, so that
a CUDA graph can hold an operator.
"""

import torch
from torch import Tensor


def rows_of(state: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
    """Return a row that exists for every slot, int64, and whether it is the slot's."""
    rows = slots.long().clamp(0, state.shape[0] - 1)
    return rows, rows == slots


def written_sources(written: Tensor) -> Tensor:
    """Return for every index itself if it is in `written` (bool [n]), else one that is.

    An operator that writes n rows writes those of the sources, so that no row gets two different
    values. If none is in `written`, all sources are 0.
    """
    every = torch.arange(len(written), device=written.device)
    return torch.where(written, every, written.int().argmax())
