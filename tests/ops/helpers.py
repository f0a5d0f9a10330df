"""Inputs, references and tolerances shared by the operators' tests."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.ops import scan

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
SERVING_DTYPES = [torch.float32, torch.bfloat16, torch.float16]
ALL_DTYPES = [*SERVING_DTYPES, torch.float64]
LENGTHS = [1, 2, 7, 64, 257, 4096, 65537]

# The gates' count and the options of each cell, as positional arguments after the tensors.
CELLS = {"mingru": 2, "minlstm": 3, "hgrn": 3}
# Cells whose step is an epilogue of a product, by their number of gates.
CELL_OF = {2: "mingru", 3: "minlstm"}
# Stands for a lower bound of as many channels as a case has.
BOUND = "bound"
Options = tuple[bool | str | None, ...]
OPTIONS = [
    ("mingru", (False,)),
    ("mingru", (True,)),
    ("minlstm", (False, True)),
    ("minlstm", (True, True)),
    ("minlstm", (False, False)),
    ("hgrn", (None,)),
    ("hgrn", (BOUND,)),
]

# Relative and absolute error allowed against float64. Inputs are exact in every dtype, sums are
# float32, so two-byte dtypes add one rounding of the result: 2^-9 (bfloat16), 2^-11 (float16).
TOLERANCE = {
    torch.float32: (5e-6, 5e-6),
    torch.float64: (1e-12, 1e-12),
    torch.bfloat16: (2.0**-8, 1e-5),
    torch.float16: (2.0**-10, 1e-5),
}


def reference(name: str) -> Callable[..., tuple[Tensor, Tensor]]:
    """The float64 reference of an operator of a cell."""
    cell, operator = name.split("_", 1)
    return partial(getattr(scan, f"{operator}_reference"), cell)


def given_options(options: Options, channels: int, device: str = "cpu") -> tuple[Any, ...]:
    """Options as an operator takes them."""
    bound = (exact(channels, seed=99).abs() / 8).clamp(max=0.96875).float()
    bound[: channels // 2] = 0.96875  # the first half remembers for long
    return tuple(bound.to(device) if option == BOUND else option for option in options)


def channels_for(length: int) -> int:
    """No multiple of any vector width; few where the float64 reference has many steps."""
    return 37 if length <= 4096 else 3


def exact(*shape: int, seed: int, scale: float = 1.0) -> Tensor:
    """Random float64 numbers that bfloat16 and float16 hold exactly."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(*shape, generator=generator) * scale
    return x.bfloat16().half().double()


@lru_cache(maxsize=64)
def linear_case(
    length: int, channels: int, reverse: bool, with_h0: bool
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """a, b [2, length, channels] and h0 [2, channels] for linear_scan, and its float64 result."""
    a = exact(2, length, channels, seed=length).sigmoid().bfloat16().double()
    b = exact(2, length, channels, seed=length + 1)
    h0 = exact(2, channels, seed=length + 2) if with_h0 else None
    return a, b, h0, scan.linear_scan_reference(a, b, h0, reverse)


def close(given: Tensor, wanted: Tensor, dtype: torch.dtype, factor: float = 1.0) -> None:
    rtol, atol = TOLERANCE[dtype]
    torch.testing.assert_close(
        given.detach().cpu().double(), wanted.detach(), rtol=rtol * factor, atol=atol * factor
    )


def same_bits(given: Tensor, wanted: Tensor) -> None:
    """Equal in every bit (a NaN equals itself)."""
    assert given.dtype == wanted.dtype and given.shape == wanted.shape
    width = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[given.element_size()]
    assert torch.equal(given.contiguous().view(width).cpu(), wanted.contiguous().view(width).cpu())


def int32(*values: int, device: str = "cpu") -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


@lru_cache(maxsize=32)
def gated_case(cell: str, options: Options, length: int) -> tuple[Tensor, ...]:
    """pre, state of four slots, and the float64 result of one sequence in slot 2."""
    channels = channels_for(length)
    pre = exact(length, CELLS[cell] * channels, seed=length, scale=2.0)
    state = exact(4, channels, seed=length + 1)
    given = given_options(options, channels)
    h, new_state = reference(f"{cell}_scan")(pre, int32(0, length), state, int32(2), *given)
    return pre, state, h, new_state


def ragged(cell: str, seed: int = 0, channels: int = 37) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """A batch with an empty and a padding sequence, free slots and a padding tail, float64."""
    cu_seqlens = int32(0, 5, 5, 135, 200, 331)
    pre = exact(340, CELLS[cell] * channels, seed=seed, scale=2.0)
    state = exact(6, channels, seed=seed + 1)
    return pre, cu_seqlens, state, int32(3, 0, 5, -1, 1)
