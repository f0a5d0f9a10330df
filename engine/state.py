"""StatePool: the recurrent state of every sequence, one row each, in device memory.

The scheduler hands rows out (engine/slots.py); this file only moves them. All of it is fp32,
whatever the weights are: a bf16 state loses 2 to 20 % over a long text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from engine.config import ModelConfig
from engine.device import available_memory, upload
from engine.errors import ConfigError, InvalidRequest
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

    def _index(self, rows: Sequence[int]) -> Tensor:
        for row in rows:
            self._check_row(row)
        return upload(rows, torch.int64, self.device)

    def reset(self, rows: Sequence[int]) -> None:
        """Puts `rows` at the model's initial state."""
        if not rows:
            return
        index = self._index(rows)
        self.state.cell[:, index] = self._initial.unsqueeze(1)
        if self.state.conv is not None:
            self.state.conv.index_fill_(1, index, 0.0)

    def copy(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copies row sources[i] over row targets[i]; every source is read before any is written."""
        if len(sources) != len(targets):
            raise ValueError(f"{len(sources)} sources, but {len(targets)} targets")
        if not sources:
            return
        source, target = self._index(sources), self._index(targets)
        for tensor in self._tensors().values():
            tensor[:, target] = tensor[:, source]

    def snapshot(self, row: int) -> dict[str, Tensor]:
        """A copy of one row in host memory: cell [layers, inner], and with convolutions
        conv [layers, conv_kernel - 1, d_model]. Waits for the device."""
        self._check_row(row)
        return {
            name: tensor[:, row].to("cpu", copy=True) for name, tensor in self._tensors().items()
        }

    def restore(self, row: int, snapshot: Mapping[str, Tensor]) -> None:
        """Puts `row` at a snapshot of the same model, bit for bit.

        Raises InvalidRequest for names, shapes, types or values that no snapshot has; the row is
        then left as it was.
        """
        self._check_row(row)
        own = self._tensors()
        if snapshot.keys() != own.keys():
            raise InvalidRequest(
                f"a state holds {sorted(own)}, and this one {sorted(snapshot)}", param="state"
            )
        for name, tensor in own.items():
            given, shape = snapshot[name], tensor[:, row].shape
            if given.shape != shape or given.dtype != torch.float32:
                raise InvalidRequest(
                    f"state {name!r} must be float32 {list(shape)}, "
                    f"not {str(given.dtype).removeprefix('torch.')} {list(given.shape)}",
                    param="state",
                )
            if not bool(given.isfinite().all()):
                raise InvalidRequest(f"state {name!r} is not finite", param="state")
        for name, tensor in own.items():
            tensor[:, row] = snapshot[name].to(self.device)

    def _check_row(self, row: int) -> None:
        if not 0 <= row < self.rows:
            raise IndexError(f"row {row} of a state pool of {self.rows}")

    def _tensors(self) -> dict[str, Tensor]:
        tensors = {"cell": self.state.cell}
        if self.state.conv is not None:
            tensors["conv"] = self.state.conv
        return tensors
