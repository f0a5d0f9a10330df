"""StatePool: the recurrent state of every sequence, one row each, in device memory.

The scheduler allocates rows (engine/slot_allocator.py); this file only moves their contents.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from engine.config import ModelConfig
from engine.device import available_memory
from engine.errors import ConfigError
from engine.models.state import new_state
from engine.ops.upload import UploadRing

log = logging.getLogger(__name__)


class StatePool:
    """`rows` states of one model, all initialized, and one more row that is always initial.

    That row, `initial_row`, is a source for copies. `uploads` is the runner's, for the pool's
    device. `initial` has the tensors [layers, *shape] that do not begin as zeros. `host_bytes` may
    be taken for states in main memory later. Raises ConfigError, naming max_slots, if the rows do
    not fit in the device's free memory.
    """

    def __init__(
        self,
        config: ModelConfig,
        rows: int,
        uploads: UploadRing,
        initial: Mapping[str, Tensor] | None = None,
        host_bytes: int = 0,
    ) -> None:
        self.device = device = uploads.device
        self._uploads = uploads
        self.bytes = (rows + 1) * config.state_bytes
        self._refuse_if_too_large(config, rows, device, host_bytes)
        self.state = new_state(config.state, rows + 1, initial, device)
        self.rows = self.initial_row = rows
        # A separate tensor, because an indexed write must not overlap with what it reads.
        self._initial = [tensor[:, rows:].clone() for tensor in self.state.tensors()]

    def _refuse_if_too_large(
        self, config: ModelConfig, rows: int, device: torch.device, host_bytes: int
    ) -> None:
        free = available_memory(device)
        if self.bytes > free:
            most = max(free // config.state_bytes - 1, 0)
            raise ConfigError(
                f"the states of {rows} sequences ({config.state_bytes:,} bytes each) need "
                f"{self.bytes:,} bytes, but {device} has only {free:,} free: "
                f"max_slots + share_slots may be at most {most:,}",
                param="max_slots",
            )
        if device.type == "cpu" and self.bytes + host_bytes > free:
            log.warning(
                "the states of %d sequences need %s bytes, and cached and kept ones may take %s "
                "more, but only %s are free: lower max_slots, share_slots or host_state_bytes",
                *(rows, f"{self.bytes:,}", f"{host_bytes:,}", f"{free:,}"),
            )

    def _check(self, rows: Sequence[int], end: int) -> None:
        if rows and (min(rows) < 0 or max(rows) >= end):
            wrong = next(row for row in rows if not 0 <= row < end)
            raise IndexError(f"row {wrong} is outside a state pool of {self.rows} rows")

    def copy(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy row sources[i] over row targets[i]; every source is read before any is written."""
        if len(sources) != len(targets):
            raise ValueError(f"{len(sources)} sources do not match {len(targets)} targets")
        if not sources:
            return
        self._check(sources, self.rows + 1)
        self._check(targets, self.rows)
        source, target = self._uploads.put([sources, targets])
        for tensor in self.state.tensors():
            tensor.index_copy_(1, target, tensor.index_select(1, source))

    def reset(self, rows: Sequence[int]) -> None:
        """Set rows to the initial state."""
        if not rows:
            return
        self._check(rows, self.rows)
        index = self._uploads.put(rows)
        for tensor, initial in zip(self.state.tensors(), self._initial, strict=True):
            tensor.index_copy_(1, index, initial.expand(-1, len(rows), *initial.shape[2:]))

    @property
    def width(self) -> int:
        """Words of 32 bits of one state, as packed by `gather`."""
        return sum(_words(tensor[:, 0].shape, tensor) for tensor in self.state.tensors())

    def gather(self, rows: Sequence[int]) -> Tensor:
        """Return packed states [n, width]: the tensors [layers, *shape], one after the other.

        The result is fp32; tensors of another type are reinterpreted, so that no bit changes.
        """
        self._check(rows, self.rows + 1)
        index = self._uploads.put(rows)
        parts = [
            tensor.index_select(1, index).transpose(0, 1).flatten(1).view(torch.float32)
            for tensor in self.state.tensors()
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)

    def scatter(self, states: Tensor, rows: Sequence[int]) -> None:
        """Write states [n, width], packed as by `gather`, to rows."""
        self._check(rows, self.rows)
        index, start = self._uploads.put(rows), 0
        for tensor in self.state.tensors():
            shape = tensor[:, 0].shape
            words = _words(shape, tensor)
            part = states[:, start : start + words].contiguous().view(tensor.dtype)
            tensor.index_copy_(1, index, part.view(len(rows), *shape).transpose(0, 1))
            start += words


def _words(shape: torch.Size, tensor: Tensor) -> int:
    """Return the words of 32 bits in a tensor of this shape and `tensor`'s type."""
    return shape.numel() * tensor.element_size() // 4
