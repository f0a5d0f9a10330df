"""StateSpec: the description of one tensor of a sequence's recurrent state.

A sequence's state is a few named tensors of fixed shape, whatever its length. The state pool,
cached states, state files and backends take names, shapes and types from a model's list of these.
This module does not import torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

StateDtypeName = Literal["float32", "bfloat16"]
# safetensors' names of types
StateDtype = Literal["F32", "BF16"]
DTYPE_BYTES: dict[StateDtype, int] = {"F32": 4, "BF16": 2}


def spec_dtype(name: StateDtypeName) -> StateDtype:
    """Return safetensors' name of a type."""
    return "F32" if name == "float32" else "BF16"


@dataclass(frozen=True, slots=True)
class StateSpec:
    """One tensor of a sequence's state: [layers, *shape], C order.

    `name` identifies the tensor in ModelState and in state files. The type does not follow from
    that of the weights: the hidden state of a gated linear recurrence loses 2 to 20 % over a long
    text if it is kept in bf16.
    """

    name: str
    layers: int
    shape: tuple[int, ...]  # of one layer
    dtype: StateDtype = "F32"

    def __post_init__(self) -> None:
        # Packed states are copied in words of 32 bits.
        assert self.bytes % 4 == 0, f"{self.name}: {self.bytes} bytes, not a multiple of 4"

    @property
    def full_shape(self) -> tuple[int, ...]:
        """The tensor's shape: (layers, *shape)."""
        return (self.layers, *self.shape)

    @property
    def bytes(self) -> int:
        """Bytes of one sequence's tensor."""
        return DTYPE_BYTES[self.dtype] * math.prod(self.full_shape)


def bytes_of(specs: Iterable[StateSpec]) -> int:
    """Return the bytes of one sequence's state."""
    return sum(spec.bytes for spec in specs)


def hidden_bytes_of(d_model: int) -> int:
    """Return the bytes of a hidden state that is stored with a sequence's state.

    It is fp32, which represents the values of every type of activations exactly.
    """
    return 4 * d_model


def offsets_of(specs: Iterable[StateSpec]) -> Iterator[tuple[StateSpec, int, int]]:
    """Yield each tensor with its first and last (exclusive) byte in a packed state."""
    start = 0
    for spec in specs:
        yield spec, start, start + spec.bytes
        start += spec.bytes
