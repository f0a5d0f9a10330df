"""ModelState: the recurrent state of sequences on a device, any number of named tensors.

Names, shapes and types are those of the model's StateSpecs (engine/state_spec.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from engine.state_spec import StateDtype, StateSpec

STATE_DTYPES: dict[StateDtype, torch.dtype] = {"F32": torch.float32, "BF16": torch.bfloat16}


@dataclass(slots=True)
class ModelState:
    """The recurrent state of `rows` sequences, on the model's device.

    Tensors are [layers, rows, *shape], in the order of the model's specs. They change in place and
    are never replaced. A row is complete: copying it to another row forks a sequence.
    """

    named: dict[str, Tensor]
    _layers: dict[int, Mapping[str, Tensor]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def __getitem__(self, name: str) -> Tensor:
        return self.named[name]

    def get(self, name: str) -> Tensor | None:
        """Return a tensor; None if the model has none of this name."""
        return self.named.get(name)

    def layer(self, index: int) -> Mapping[str, Tensor]:
        """Return one layer's tensors [rows, *shape], views, by name."""
        layer = self._layers.get(index)
        if layer is None:  # views are made once: every step asks for those of every layer
            layer = {name: tensor[index] for name, tensor in self.named.items()}
            self._layers[index] = layer
        return layer

    def tensors(self) -> list[Tensor]:
        """Return the tensors in the order of the model's specs."""
        return list(self.named.values())


def new_state(
    specs: Iterable[StateSpec],
    rows: int,
    initial: Mapping[str, Tensor] | None = None,
    device: torch.device | None = None,
) -> ModelState:
    """Return the state of `rows` sequences that have read nothing, on `device` (None: the CPU).

    `initial` has the tensors [layers, *shape] that do not begin as zeros.
    """
    named = {}
    for spec in specs:
        dtype = STATE_DTYPES[spec.dtype]
        value = None if initial is None else initial.get(spec.name)
        if value is not None and value.dtype == torch.float64:  # a model for tests and training
            dtype = value.dtype
        tensor = torch.zeros(spec.layers, rows, *spec.shape, dtype=dtype, device=device)
        if value is not None:
            tensor.copy_(value.unsqueeze(1))
        named[spec.name] = tensor
    return ModelState(named)


# tokens, state, slots -> logits (ModelBackend.step)
Step = Callable[[Tensor, ModelState, Tensor], Tensor]
# tokens, state, slots -> bests (engine/ops/gemm.py)
StepToBests = Callable[[Tensor, ModelState, Tensor], Tensor]
