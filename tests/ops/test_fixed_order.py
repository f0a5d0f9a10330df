"""With `fixed_order`, a row of a linear map has the same bits in every form of the kernel.

The forms have tiles of 8 to 128 tokens and one or more blocks of rows; parts of the inputs belong
to a block each, or to one that has two or all of them. That a product unit adds up in the same
order whatever the tile is nowhere written, so all of them are compared here.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from engine.config import SCAN_CHUNK
from engine.ops import conv_scan, mingru_scan
from engine.ops.gemm import (
    linear_map,
    linear_map_reference,
    linear_residual_,
    linear_step,
    linear_swiglu,
    norm_inputs,
)
from tests.ops.fixed_order import GATED, SHAPES, TOKENS
from tests.ops.helpers import CELL_OF, int32

pytestmark = pytest.mark.gpu

EPS = 1e-6
MOST = max(TOKENS)
MAPS = [shape[:2] for shape in SHAPES if shape[2] == 1]
STEPS = [shape for shape in SHAPES if shape[2] > 1]

_Read = Callable[[slice], list[Tensor]]  # some rows -> what they give, by row


def noise(*shape: int, seed: int, scale: float = 1.0) -> Tensor:
    """Drawn on the GPU: some of the weights are large."""
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(*shape, generator=generator, device="cuda") * scale


def same_bits(got: Tensor, expected: Tensor) -> None:
    kind = torch.int16 if got.element_size() == 2 else torch.int32
    assert got.dtype == expected.dtype and got.isfinite().all()
    assert torch.equal(got.contiguous().view(kind), expected.contiguous().view(kind))


def normed(tokens: int, inputs: int) -> tuple[Tensor, Tensor]:
    weight = (1 + 0.2 * noise(inputs, seed=2)).bfloat16()
    return norm_inputs(noise(tokens, inputs, seed=4).bfloat16(), weight)


def same_at_every_size(read: _Read) -> None:
    """`read(rows)` equals those rows of the largest batch, at either end of it."""
    whole = read(slice(0, MOST))
    for tokens in TOKENS:
        for rows in (slice(0, tokens), slice(MOST - tokens, MOST)):
            for got, expected in zip(read(rows), whole, strict=True):
                same_bits(got, expected[rows])


@pytest.mark.parametrize("shape", MAPS, ids=str)
def test_linear_map(shape: tuple[int, int]) -> None:
    channels, inputs = shape
    x, squares = normed(MOST, inputs)
    weight = noise(channels, inputs, seed=1, scale=inputs**-0.5).bfloat16()
    bias = noise(channels, seed=3).bfloat16()

    def read(rows: slice) -> list[Tensor]:
        given = x[rows].contiguous(), squares[:, rows].contiguous(), EPS, weight
        return [
            linear_map(*given, bias, logits=True, fixed_order=True),
            linear_map(*given, None, gelu=True, fixed_order=True),
        ]

    same_at_every_size(read)


@pytest.mark.parametrize("shape", STEPS, ids=str)
def test_linear_step(shape: tuple[int, int, int]) -> None:
    channels, inputs, gates = shape
    x, squares = normed(MOST, inputs)
    weight = noise(gates * channels, inputs, seed=1, scale=inputs**-0.5).bfloat16()
    bias = noise(gates * channels, seed=3).bfloat16()
    before = noise(MOST, channels, seed=5)

    def read(rows: slice) -> list[Tensor]:
        state = before.clone()
        slots = torch.arange(MOST, dtype=torch.int32, device="cuda")[rows].contiguous()
        h, _ = linear_step(
            x[rows].contiguous(),
            squares[:, rows].contiguous(),
            EPS,
            weight,
            bias,
            state,
            slots,
            CELL_OF[gates],
            fixed_order=True,
        )
        return [h, state[rows]]

    same_at_every_size(read)


@pytest.mark.parametrize("shape", GATED, ids=str)
def test_step_with_an_output_gate(shape: tuple[int, int, int]) -> None:
    channels, inputs, gates = shape
    x, squares = normed(MOST, inputs)
    weight = noise(gates * channels, inputs, seed=1, scale=inputs**-0.5).bfloat16()
    bias, bound = noise(gates * channels, seed=3).bfloat16(), noise(channels, seed=8).sigmoid()
    before = noise(MOST, channels, seed=5)

    def read(rows: slice) -> list[Tensor]:
        state = before.clone()
        slots = torch.arange(MOST, dtype=torch.int32, device="cuda")[rows].contiguous()
        given = x[rows].contiguous(), squares[:, rows].contiguous(), EPS, weight, bias
        out, sums = linear_step(*given, state, slots, "hgrn", fixed_order=True, lower_bound=bound)
        return [out, sums.t(), state[rows]]

    same_at_every_size(read)


@pytest.mark.parametrize("shape", [shape for shape in STEPS if shape[2] == 2], ids=str)
def test_linear_swiglu(shape: tuple[int, int, int]) -> None:
    channels, inputs, _ = shape
    x, squares = normed(MOST, inputs)
    weight = noise(2 * channels, inputs, seed=1, scale=inputs**-0.5).bfloat16()
    bias = noise(2 * channels, seed=3).bfloat16()

    def read(rows: slice) -> list[Tensor]:
        given = x[rows].contiguous(), squares[:, rows].contiguous(), EPS, weight, bias
        return [linear_swiglu(*given, fixed_order=True)]

    same_at_every_size(read)


@pytest.mark.parametrize("shape", [shape for shape in MAPS if shape[0] % 64 == 0], ids=str)
def test_linear_residual(shape: tuple[int, int]) -> None:
    channels, inputs = shape
    y, before = noise(MOST, inputs, seed=4).bfloat16(), noise(MOST, channels, seed=6).bfloat16()
    weight = noise(channels, inputs, seed=1, scale=inputs**-0.5).bfloat16()
    norm = (1 + 0.2 * noise(channels, seed=7)).bfloat16()
    of_y = noise(-(-inputs // 64), MOST, seed=8).square()

    def read(rows: slice) -> list[Tensor]:
        x = before[rows].clone()  # changed in place
        scaled, squares = linear_residual_(
            y[rows].contiguous(), weight, None, x, norm, fixed_order=True
        )
        unscaled = before[rows].clone()  # as within the layers of a model
        _, of_unscaled = linear_residual_(
            y[rows].contiguous(), weight, None, unscaled, None, fixed_order=True, squares=True
        )
        divided = before[rows].clone()
        linear_residual_(
            *(y[rows].contiguous(), weight, None, divided, None),
            fixed_order=True,
            y_squares=of_y[:, rows].contiguous(),
            eps=EPS,
        )
        return [x, scaled, squares.t(), unscaled, of_unscaled.t(), divided]

    same_at_every_size(read)


@pytest.mark.parametrize("shape", MAPS, ids=str)
@pytest.mark.parametrize("tokens", [1, 100, 2048])
def test_it_is_the_same_product(shape: tuple[int, int], tokens: int) -> None:
    channels, inputs = shape
    x, squares = normed(tokens, inputs)
    weight = noise(channels, inputs, seed=1, scale=inputs**-0.5).bfloat16()
    got = linear_map(x, squares, EPS, weight, logits=True, fixed_order=True)
    expected = linear_map_reference(x, squares, EPS, weight)
    scale = float(expected.abs().max())
    torch.testing.assert_close(got.double(), expected, rtol=2.0**-14, atol=2e-5 * scale)


@pytest.mark.parametrize(("channels", "taps"), [(384, 4), (768, 3), (2048, 4)])
def test_scans_of_packed_sequences(channels: int, taps: int) -> None:
    """A sequence read alone, in company, and in two pieces cut at a multiple of SCAN_CHUNK."""
    lengths = [900, 1, 3 * SCAN_CHUNK, 40, 700, 0, 129]
    edges = [0, *torch.tensor(lengths).cumsum(0).tolist()]
    x = noise(edges[-1], channels, seed=1).bfloat16()
    pre = noise(edges[-1], 2 * channels, seed=2).bfloat16()
    weight = noise(channels, taps, seed=3).bfloat16()
    rows = len(lengths)

    def read(begin: int, end: int, bounds: list[int], cell: Tensor, conv: Tensor) -> list[Tensor]:
        slots = int32(*range(len(bounds) - 1), device="cuda")
        at = int32(*bounds, device="cuda")
        return [
            conv_scan(x[begin:end].contiguous(), weight, None, at, conv, slots),
            mingru_scan(pre[begin:end].contiguous(), at, cell, slots),
        ]

    cell = noise(rows, channels, seed=4)
    conv = noise(rows, taps - 1, channels, seed=5)
    cells, convs = cell.clone(), conv.clone()
    together = read(0, edges[-1], edges, cells, convs)
    for row, (begin, end) in enumerate(itertools.pairwise(edges)):
        cut = begin + min(2 * SCAN_CHUNK, end - begin)
        own_cell, own_conv = cell[row : row + 1].clone(), conv[row : row + 1].clone()
        alone = [
            read(first, last, [0, last - first], own_cell, own_conv)
            for first, last in ((begin, cut), (cut, end))
        ]
        for got, expected in zip(zip(*alone, strict=True), together, strict=True):
            same_bits(torch.cat(got), expected[begin:end])
        same_bits(own_cell[0], cells[row])
        same_bits(own_conv[0], convs[row])
