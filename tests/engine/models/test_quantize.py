"""Quantising one matrix: how near it stays, what it refuses, and that its bits are always the
same."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from engine.config import Quantization
from engine.models import quantize as quantization
from engine.models.quantize import (
    LARGEST,
    QUANTIZED_DTYPES,
    NotFiniteError,
    all_finite,
    dequantize,
    quantize,
    widen,
)

KINDS: tuple[Quantization, ...] = ("int8", "fp8")
kinds = pytest.mark.parametrize("kind", KINDS)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def spread(rows: int, columns: int) -> Tensor:
    """Rows whose magnitudes differ by up to 10^6, as no one scale could serve."""
    return normal(rows, columns) * 10.0 ** torch.linspace(-3, 3, rows).unsqueeze(1)


def bits(values: Tensor) -> Tensor:
    return values.cpu().view(torch.uint8)


def squared_error(weight: Tensor, values: Tensor, scale: Tensor) -> Tensor:
    """Of every row, in float64."""
    return (weight.double() - values.double() * scale.double().unsqueeze(1)).square().sum(1)


@pytest.fixture
def restored_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@kinds
def test_every_weight_is_within_half_a_step(kind: Quantization) -> None:
    weight = spread(64, 300)
    values, scale = quantize(weight, kind)
    assert values.dtype == QUANTIZED_DTYPES[kind] and values.shape == weight.shape
    assert scale.dtype == torch.float32 and scale.shape == (64,)
    exact, steps = weight.double(), scale.double().unsqueeze(1)
    error = (exact - values.double() * steps).abs()
    if kind == "int8":
        bound = steps.expand_as(exact) / 2
    else:  # e4m3: three bits of mantissa; below 2^-6 equal steps of 2^-9
        bound = torch.maximum(exact.abs() / 2**4, steps / 2**10)
    assert (error <= bound * (1 + 1e-5)).all()
    assert torch.equal(dequantize(values, scale), values.float() * scale.unsqueeze(1))


@kinds
def test_what_the_type_can_hold_comes_back_exactly(kind: Quantization) -> None:
    held = torch.arange(256, dtype=torch.uint8).view(QUANTIZED_DTYPES[kind]).float()
    held = held[held.isfinite() & (held.abs() <= LARGEST[kind])]
    weight = torch.stack((held / 4, held * 8))  # powers of two: the scales are exact
    values, scale = quantize(weight, kind)
    assert torch.equal(dequantize(values, scale), weight)


@kinds
def test_widening_is_exact(kind: Quantization) -> None:
    values = torch.arange(256, dtype=torch.uint8).view(QUANTIZED_DTYPES[kind])
    finite = values.double().isfinite()
    assert torch.equal(widen(values).double()[finite], values.double()[finite])
    assert torch.equal(widen(values).signbit()[finite], values.float().signbit()[finite])
    for value, ok in zip(values.split(1), finite.tolist(), strict=True):
        assert all_finite(value) == ok


@kinds
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_values_are_exact_in_every_activation_type(
    kind: Quantization, dtype: torch.dtype
) -> None:
    values = torch.arange(256, dtype=torch.uint8).view(QUANTIZED_DTYPES[kind])
    exact = values.double()
    assert torch.equal(values.to(dtype).double().nan_to_num(), exact.nan_to_num())


@kinds
def test_the_scale_is_never_worse_than_the_largest_magnitude_s(kind: Quantization) -> None:
    for weight in (spread(64, 300), normal(64, 300) ** 3, normal(64, 300).sign()):
        chosen = squared_error(weight, *quantize(weight, kind))
        plain = squared_error(weight, *quantize(weight, kind, headroom=(1.0,)))
        assert (chosen <= plain * (1 + 1e-5)).all()


def test_fp8_gains_by_choosing_its_scale() -> None:
    weight = normal(64, 300)
    chosen = squared_error(weight, *quantize(weight, "fp8")).sum()
    plain = squared_error(weight, *quantize(weight, "fp8", headroom=(1.0,))).sum()
    assert chosen < 0.95 * plain


def test_clipping_is_measured_with_what_it_cuts_off() -> None:
    """One outlier in a row: scales that cut it off must count what they lose by it."""
    weight = torch.cat((0.1 * normal(8, 200), torch.full((8, 1), 3.0)), dim=1)
    whole = squared_error(weight, *quantize(weight, "int8"))
    chosen = squared_error(weight, *quantize(weight, "int8", headroom=(1.0, 0.9, 0.5, 0.1)))
    assert (chosen <= whole * (1 + 1e-5)).all()


def test_rounding_in_fp32_is_the_type_s_own() -> None:
    """Ties, both signs, subnormal values and zeros included."""
    held = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    held = held[held.isfinite()].sort().values
    between = (held[1:] + held[:-1]) / 2
    least = torch.finfo(torch.float32).smallest_normal
    x = torch.cat((held, between, between * (1 + 2**-20), between * (1 - 2**-20)))
    x = torch.cat((x, normal(1000), 100 * normal(1000), normal(1000) / 1000, torch.tensor([least])))
    x = x.clamp(-448, 448)
    assert torch.equal(quantization._rounded_to_e4m3(x), x.to(torch.float8_e4m3fn).float())


@kinds
def test_rows_of_every_magnitude(kind: Quantization) -> None:
    weight = torch.zeros(5, 3)
    weight[1] = 1e-42  # subnormal: there is no scale so small
    weight[2] = torch.finfo(torch.float32).max
    weight[3, 1] = -7.0
    weight[4] = 1e-30
    values, scale = quantize(weight, kind)
    assert (scale.isfinite() & (scale > 0)).all()
    got = dequantize(values, scale)
    assert not got[:2].any()
    assert torch.allclose(got[2:], weight[2:], rtol=0.04, atol=0)


@kinds
@pytest.mark.parametrize("shape", [(0, 4), (4, 0), (1, 1), (3, 1)])
def test_empty_and_narrow_matrices(kind: Quantization, shape: tuple[int, int]) -> None:
    weight = normal(*shape)
    values, scale = quantize(weight, kind)
    assert values.shape == shape and scale.shape == shape[:1]
    assert torch.allclose(dequantize(values, scale), weight, rtol=0.04)


@kinds
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_weights_that_are_not_finite_are_refused(kind: Quantization, bad: float) -> None:
    weight = normal(4, 5)
    weight[2, 3] = bad
    with pytest.raises(NotFiniteError, match="not finite"):
        quantize(weight, kind)


@kinds
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bit_weights_are_quantised_as_they_are_widened(
    kind: Quantization, dtype: torch.dtype
) -> None:
    weight = normal(20, 33).to(dtype)
    narrow, wide = quantize(weight, kind), quantize(weight.float(), kind)
    assert torch.equal(bits(narrow[0]), bits(wide[0])) and torch.equal(narrow[1], wide[1])


@kinds
def test_a_row_s_bits_are_its_own(
    kind: Quantization, monkeypatch: pytest.MonkeyPatch, restored_threads: None
) -> None:
    """Whatever rows are beside it, however many are done at once and by however many threads."""
    weight = spread(70, 257)
    torch.set_num_threads(1)
    values, scale = quantize(weight, kind)
    order = torch.randperm(70, generator=torch.Generator().manual_seed(1))
    torch.set_num_threads(3)
    for block in (2**16, 257 * 3, 1):
        monkeypatch.setitem(quantization._BLOCK, "cpu", block)
        other_values, other_scale = quantize(weight[order], kind)
        assert torch.equal(bits(other_values), bits(values)[order])
        assert torch.equal(other_scale, scale[order])


@pytest.mark.gpu
@kinds
def test_the_gpu_gives_the_same_bits(kind: Quantization) -> None:
    for weight in (spread(300, 2048), normal(64, 65), normal(33, 7).to(torch.bfloat16)):
        values, scale = quantize(weight, kind)
        gpu_values, gpu_scale = quantize(weight.cuda(), kind)
        assert gpu_values.is_cuda and gpu_scale.is_cuda
        assert torch.equal(bits(gpu_values), bits(values))
        assert torch.equal(gpu_scale.cpu(), scale)
