"""ModelState and StateSpec: the recurrent state of sequences, and the description of its tensors.

A model's state is a few named fp32 tensors of fixed shape per sequence, whatever its length. The
state pool, state files and backends take names and shapes from here.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.config import ModelConfig

# Independent of the type of the weights: a bf16 state loses 2 to 20 % over a long text.
STATE_DTYPE = torch.float32


@dataclass(slots=True)
class ModelState:
    """The recurrent state of `rows` sequences, on the model's device, in fp32.

    A row is complete: copying it to another row forks a sequence.
    """

    cell: Tensor  # [layers, rows, inner]
    conv: Tensor | None  # [layers, rows, conv_kernel - 1, d_model]; None without convolutions

    def tensors(self) -> list[Tensor]:
        """Return the tensors that the model has, in the order of `state_specs`."""
        return [self.cell] if self.conv is None else [self.cell, self.conv]


@dataclass(frozen=True, slots=True)
class StateSpec:
    """A tensor of a sequence's state; `name` is its field in ModelState and in files."""

    name: str
    layers: int
    shape: tuple[int, ...]  # shape of one layer
    dtype: torch.dtype = STATE_DTYPE

    @property
    def bytes(self) -> int:
        """Bytes of one sequence's tensor."""
        return self.layers * math.prod(self.shape) * self.dtype.itemsize

    def zeros(self, rows: int, device: torch.device | None = None) -> Tensor:
        """Return zeros [layers, rows, *shape] on `device` (None: the CPU)."""
        return torch.zeros(self.layers, rows, *self.shape, dtype=self.dtype, device=device)


def state_specs(config: ModelConfig) -> tuple[StateSpec, ...]:
    """Return the tensors of a sequence's state, in the order in which they are packed."""
    specs = [StateSpec("cell", config.n_layers, (config.inner,))]
    if config.conv_shape is not None:
        layers, *inputs = config.conv_shape
        specs.append(StateSpec("conv", layers, tuple(inputs)))
    return tuple(specs)


def new_state(
    config: ModelConfig,
    rows: int,
    initial: Tensor | None = None,
    device: torch.device | None = None,
) -> ModelState:
    """Return the state of `rows` sequences that have read nothing, on `device` (None: the CPU).

    `initial` is every layer's h_0, [layers, inner]; None: zeros.
    """
    tensors = {spec.name: spec.zeros(rows, device) for spec in state_specs(config)}
    if initial is not None:
        cell = tensors["cell"].to(initial.dtype)  # fp64 in fp64 models, which are for training
        tensors["cell"] = cell.copy_(initial.unsqueeze(1))
    return ModelState(tensors["cell"], tensors.get("conv"))


# tokens, state, slots -> logits (ModelBackend.step)
Step = Callable[[Tensor, ModelState, Tensor], Tensor]
# tokens, state, slots -> bests (engine/ops/gemm.py)
StepToBests = Callable[[Tensor, ModelState, Tensor], Tensor]
