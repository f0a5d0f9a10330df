"""StatePool: the recurrent state of every sequence, one row each, in device memory.

The scheduler hands rows out (engine/slots.py); this file only moves them. All of it is fp32,
whatever the weights are: a bf16 state loses 2 to 20 % over a long text.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.config import ModelConfig
from engine.device import available_memory
from engine.errors import ConfigError
from engine.indices import to_device
from engine.models.cell import ModelState


class StatePool:
    """`rows` states of one model, all at the initial state.

    `initial` [layers, inner] is the hidden state before the first token (None: zeros).
    Raises ConfigError, naming max_slots, when the rows do not fit in the device's free memory.
    """

    def __init__(
        self,
        config: ModelConfig,
        rows: int,
        device: torch.device,
        initial: Tensor | None = None,
    ) -> None:
        self.bytes = rows * config.state_bytes
        self._refuse_if_too_large(config, rows, device)
        layers, inner = config.n_layers, config.inner
        self._initial = torch.zeros(layers, inner, device=device)
        if initial is not None:
            self._initial.copy_(initial)
        cell = self._initial.unsqueeze(1).repeat(1, rows, 1)  # [layers, rows, inner]
        conv = None
        if config.conv_kernel:
            conv = torch.zeros(layers, rows, config.conv_kernel - 1, config.d_model, device=device)
        self.state = ModelState(cell=cell, conv=conv)
        self.rows = rows
        self.device = device

    def _refuse_if_too_large(self, config: ModelConfig, rows: int, device: torch.device) -> None:
        free = available_memory(device)
        if self.bytes > free:
            raise ConfigError(
                f"the state of {rows} sequences ({config.state_bytes:,} bytes each) needs "
                f"{self.bytes:,} bytes, and {device} has {free:,} free: "
                f"max_slots + share_slots may be at most {free // config.state_bytes:,}",
                param="max_slots",
            )

    def _index(self, *several: Sequence[int]) -> Tensor:
        """[n], or of several rows of numbers [several, n], on the device."""
        for rows in several:
            if rows and (min(rows) < 0 or max(rows) >= self.rows):
                wrong = next(row for row in rows if not 0 <= row < self.rows)
                raise IndexError(f"row {wrong} of a state pool of {self.rows}")
        return to_device(several if len(several) > 1 else several[0], self.device)

    def reset(self, rows: Sequence[int]) -> None:
        """Puts `rows` at the model's initial state."""
        if not rows:
            return
        index = self._index(rows)
        initial = self._initial.unsqueeze(1).expand(-1, len(rows), -1)
        self.state.cell.index_copy_(1, index, initial)
        if self.state.conv is not None:
            self.state.conv.index_fill_(1, index, 0.0)

    def copy(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copies row sources[i] over row targets[i]; every source is read before any is written."""
        if len(sources) != len(targets):
            raise ValueError(f"{len(sources)} sources, but {len(targets)} targets")
        if not sources:
            return
        source, target = self._index(sources, targets)
        for tensor in self._tensors():
            tensor.index_copy_(1, target, tensor.index_select(1, source))

    @property
    def width(self) -> int:
        """Floats of one state, as `gather` packs it."""
        return sum(tensor[:, 0].numel() for tensor in self._tensors())

    def gather(self, rows: Sequence[int]) -> Tensor:
        """[n, width]: each row's cell [layers, inner] and then its conv [layers, taps - 1,
        d_model]."""
        index = self._index(rows)
        parts = [
            tensor.index_select(1, index).transpose(0, 1).flatten(1) for tensor in self._tensors()
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)

    def scatter(self, states: Tensor, rows: Sequence[int]) -> None:
        """Puts states [n, width], packed as `gather` does it, in their rows."""
        index, start = self._index(rows), 0
        for tensor in self._tensors():
            shape = tensor[:, 0].shape
            part = states[:, start : start + shape.numel()]
            tensor.index_copy_(1, index, part.reshape(len(rows), *shape).transpose(0, 1))
            start += shape.numel()

    def initial_row(self) -> Tensor:
        """[width]: the initial state, packed."""
        parts = [self._initial.flatten()]
        if self.state.conv is not None:
            parts.append(torch.zeros(self.state.conv[:, 0].numel(), device=self.device))
        return torch.cat(parts)

    def _tensors(self) -> list[Tensor]:
        conv = self.state.conv
        return [self.state.cell] if conv is None else [self.state.cell, conv]
