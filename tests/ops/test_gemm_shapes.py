"""The shapes and types that the fused GEMMs tell torch of, without a GPU: on the meta device."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from engine.ops.gemm import (
    PART,
    linear_best,
    linear_convolve,
    linear_embed,
    linear_map,
    linear_residual_,
    linear_step,
    linear_swiglu,
)
from tests.ops.helpers import CELLS

ROWS, INPUTS, CHANNELS = 5, 128, 192
EPS = 1e-6


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def like(tensor: Tensor) -> tuple[list[int], torch.dtype]:
    return list(tensor.shape), tensor.dtype


X, WEIGHT = meta(ROWS, INPUTS), meta(CHANNELS, INPUTS)
SQUARES = meta(INPUTS // 64, ROWS, dtype=torch.float32)
NOTHING = [0, CHANNELS], torch.bfloat16
SCALED = [ROWS, CHANNELS], torch.bfloat16
NO_SUMS = [0, ROWS], torch.float32
SUMS = [CHANNELS // 64, ROWS], torch.float32


@pytest.mark.parametrize("fixed_order", [False, True])
def test_linear_map(fixed_order: bool) -> None:
    y = linear_map(X, SQUARES, EPS, WEIGHT, gelu=True, fixed_order=fixed_order)
    assert like(y) == ([ROWS, CHANNELS], torch.bfloat16)
    logits = linear_map(X, None, EPS, WEIGHT, logits=True, fixed_order=fixed_order)
    assert like(logits) == ([ROWS, CHANNELS], torch.float32)


@pytest.mark.parametrize("cell", list(CELLS))
def test_linear_step(cell: str) -> None:
    state, slots = meta(9, CHANNELS, dtype=torch.float32), meta(ROWS, dtype=torch.int32)
    weight = meta(CELLS[cell] * CHANNELS, INPUTS)
    h, sums = linear_step(X, SQUARES, EPS, weight, None, state, slots, cell)
    assert like(h) == ([ROWS, CHANNELS], torch.bfloat16)
    assert like(sums) == (SUMS if cell == "hgrn" else NO_SUMS)


def test_linear_swiglu() -> None:
    y = linear_swiglu(X, SQUARES, EPS, meta(2 * CHANNELS, INPUTS), None, fixed_order=True)
    assert like(y) == ([ROWS, CHANNELS], torch.bfloat16)


def test_linear_convolve() -> None:
    state, slots = meta(9, 3, 60, dtype=torch.float32), meta(ROWS, dtype=torch.int32)
    y, convolved = linear_convolve(
        X, SQUARES, EPS, WEIGHT, None, meta(60, 4), meta(60), state, slots, 8
    )
    assert like(y) == ([ROWS, CHANNELS], torch.bfloat16)
    assert like(convolved) == ([ROWS, 60], torch.bfloat16)


def test_a_wide_stream_is_scaled_in_the_type_of_the_inputs() -> None:
    stream = meta(ROWS, CHANNELS, dtype=torch.float32)
    given = linear_residual_(X, WEIGHT, None, stream, meta(CHANNELS))
    assert [*map(like, given)] == [SCALED, SUMS]


def test_linear_best() -> None:
    best = linear_best(X, SQUARES, EPS, meta(2 * PART + 8, INPUTS), None, 2 * PART + 1)
    assert like(best) == ([ROWS, 3], torch.int64)


@pytest.mark.parametrize(
    ("norm", "squares", "scaled", "sums"),
    [
        (False, False, NOTHING, NO_SUMS),
        (False, True, NOTHING, SUMS),
        (True, False, SCALED, SUMS),
        (True, True, SCALED, SUMS),
    ],
)
def test_what_the_next_norm_reads(norm: bool, squares: bool, scaled: object, sums: object) -> None:
    norm_weight = meta(CHANNELS) if norm else None
    stream = meta(ROWS, CHANNELS)
    given = linear_residual_(
        *(X, WEIGHT, None, stream, norm_weight), squares=squares, y_squares=SQUARES, eps=EPS
    )
    assert [*map(like, given)] == [scaled, sums]
    ids = meta(ROWS, dtype=torch.int32)
    x, *given = linear_embed(ids, meta(300, CHANNELS), norm_weight, squares)
    assert like(x) == ([ROWS, CHANNELS], torch.bfloat16)
    assert [*map(like, given)] == [scaled, sums]
