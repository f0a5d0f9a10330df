"""Weight-only quantisation of a matrix: 8-bit values and one fp32 scale per output row.

w[row, :] ~ values[row, :] * scale[row]. Activations, biases and everything except matrices stay
unquantised. Both 8-bit types convert to bfloat16, float16 and float32 without rounding. So a
product with the values, summed in fp32 and scaled once per output, adds no error of its own.

The scale maps the row's largest magnitude to the type's largest value, divided by the headroom (one
of HEADROOM) that gives the row the smallest squared error. Root mean square error against plain
abs-max, on the bundled models and on normal, uniform and Student-t(4) matrices:

- int8: clipping (headroom 0.7 to 0.97) gains at most 0.1 %, so only abs-max is tried.
- fp8 e4m3: steps are relative, so the scale only decides where the row's values lie between two
  powers of two. Eight positions lower the error by 3 to 8 %, four by 2 to 8 %, clipping by about 1
  %.

The same matrix gives the same bits on every device and with any number of threads.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.config import Quantization

QUANTIZED_DTYPES: dict[Quantization, torch.dtype] = {
    "int8": torch.int8,
    "fp8": torch.float8_e4m3fn,
}
# The largest magnitude used: int8 is symmetric (-128 is not used).
LARGEST: dict[Quantization, float] = {"int8": 127.0, "fp8": 448.0}
HEADROOM: dict[Quantization, tuple[float, ...]] = {
    "int8": (1.0,),
    "fp8": tuple(2.0 ** (step / 8) for step in range(8)),
}

# Elements processed at once: they stay in a CPU's L2 cache, and keep a GPU busy.
_BLOCK = {"cpu": 2**16, "cuda": 2**24}
_EXPONENT = 0x7F800000  # exponent bits of a float32
_LEAST_SCALE = torch.finfo(torch.float32).tiny


class NotFiniteError(ValueError):
    """A weight is infinite or NaN, so no scale fits it."""


def quantize(
    weight: Tensor, kind: Quantization, headroom: tuple[float, ...] | None = None
) -> tuple[Tensor, Tensor]:
    """Quantise a matrix.

    Raises NotFiniteError if a weight is not finite.

    Args:
        weight: [rows, columns], any float type.
        kind: the 8-bit type.
        headroom: candidates instead of those of `kind`.

    Returns:
        values [rows, columns] of the kind's type, and scale [rows] fp32, finite and positive, on
        the same device.
    """
    candidates = HEADROOM[kind] if headroom is None else headroom
    values = torch.empty(weight.shape, dtype=QUANTIZED_DTYPES[kind], device=weight.device)
    scale = torch.empty(weight.shape[0], dtype=torch.float32, device=weight.device)
    rows = max(1, _BLOCK[weight.device.type] // max(1, weight.shape[1]))
    for start in range(0, weight.shape[0], rows):
        part = slice(start, start + rows)
        values[part], scale[part] = _quantize_rows(weight[part].float(), kind, candidates)
    return values, scale


def dequantize(values: Tensor, scale: Tensor) -> Tensor:
    """Return the matrix fp32 [rows, columns] of values [rows, columns] and scale [rows]."""
    return widen(values) * scale.unsqueeze(1)


def widen(values: Tensor) -> Tensor:
    """Convert 8-bit values to fp32, exactly; fp8 values must be finite."""
    if values.dtype != torch.float8_e4m3fn or values.device.type != "cpu":
        return values.float()
    # On a CPU torch converts fp8 value by value. After a shift, the lower seven bits of e4m3 are
    # where float16 has the lower four of its exponent and the upper three of its mantissa; the
    # exponents' biases differ by 8. Sign extension has also set bit 14, the exponent's highest.
    half = values.view(torch.int8).to(torch.int16).bitwise_left_shift_(7).bitwise_and_(~0x4000)
    return half.view(torch.float16).float().mul_(2.0**8)


def all_finite(values: Tensor) -> bool:
    """Return whether no 8-bit value is NaN (e4m3 has no infinities, int8 has neither)."""
    if values.dtype == torch.int8:
        return True
    return not bool((values.view(torch.int8).bitwise_and(0x7F) == 0x7F).any())


def _quantize_rows(
    weight: Tensor, kind: Quantization, candidates: tuple[float, ...]
) -> tuple[Tensor, Tensor]:
    largest = weight.abs().amax(1) if weight.shape[1] else weight.new_zeros(weight.shape[0])
    if not bool(largest.isfinite().all()):
        raise NotFiniteError("has values that are not finite")
    scale = _scale(largest, kind, candidates[0])
    if len(candidates) > 1:
        least = _row_errors(weight, scale, kind, candidates[0])
        for headroom in candidates[1:]:
            other = _scale(largest, kind, headroom)
            error = _row_errors(weight, other, kind, headroom)
            scale = torch.where(error < least, other, scale)
            least = torch.minimum(error, least)
    scaled = _scaled(weight, scale).clamp_(-LARGEST[kind], LARGEST[kind])
    return (scaled.round_() if kind == "int8" else scaled).to(QUANTIZED_DTYPES[kind]), scale


def _scale(largest: Tensor, kind: Quantization, headroom: float) -> Tensor:
    # Rows of zeros, or of numbers too small for any scale, become zeros.
    return (largest * (headroom / LARGEST[kind])).clamp_(min=_LEAST_SCALE)


def _scaled(weight: Tensor, scale: Tensor) -> Tensor:
    return weight / scale.unsqueeze(1)


def _row_errors(weight: Tensor, scale: Tensor, kind: Quantization, headroom: float) -> Tensor:
    """Return squared errors [rows], in units of the scale without headroom to avoid overflow."""
    exact = _scaled(weight, scale)
    scaled = exact.clamp(-LARGEST[kind], LARGEST[kind])
    rounded = scaled.round() if kind == "int8" else _rounded_to_e4m3(scaled)
    return _row_sums(rounded.sub_(exact).mul_(headroom).square_())


def _rounded_to_e4m3(x: Tensor) -> Tensor:
    """Round x (up to 448) to the nearest e4m3 value, in fp32.

    On a CPU this is many times as fast as converting to the type and back, with the same result.
    """
    # The steps of e4m3 are 1/8 of the power of two below x, but at least 2^-9. Adding 1.5 * 2^23
    # steps makes fp32 round to a whole step.
    power = x.abs().clamp_(min=2.0**-6).view(torch.int32).bitwise_and_(_EXPONENT)
    shift = power.view(torch.float32).mul_(1.5 * 2.0**20)
    return (x + shift).sub_(shift)


def _row_sums(x: Tensor) -> Tensor:
    """Return the sums [rows] of x [rows, columns], overwriting x.

    They are added as a tree whose shape depends only on the number of columns. torch.sum differs in
    its last bits between machines, and a scale must not.
    """
    columns = x.shape[1]
    while columns > 1:
        half = columns // 2
        x[:, :half] += x[:, columns - half : columns]
        columns -= half
    return x[:, 0] if columns else x.new_zeros(x.shape[0])
