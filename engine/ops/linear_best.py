"""linear_best: the head of a decode step on Hopper whose rows all draw the best token.

No logits are written, [rows, vocabulary] in fp32: the best of each 256 of them is found while they
are in registers, and draw_best_ draws from these.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.ops import library  # noqa: F401  (registers the operators)

PART = 256  # logits whose best is found; kArgmaxColumns of csrc/gemm/argmax_head_args.h
#: Of a weight of more rows than this, sums in a fixed order have one part (no split-K).
IN_ONE_PART: int = torch.ops.minserve.linear_one_part_rows()
_LOW = 2**32 - 1
_SIGN = 2**31


def linear_best(
    x: Tensor,
    squares: Tensor | None,
    eps: float,
    weight: Tensor,
    bias: Tensor | None,
    vocabulary: int,
) -> Tensor:
    """The bests of the logits W x, divided by the norm, plus bias.

    Args:
        x: [rows, inputs], bfloat16, contiguous; inputs a multiple of 8.
        squares, eps: as of `linear_map`. Without them the best is the same but where logits are
            equal or not by rounding.
        weight: [vocabulary and padding, inputs]; rows a multiple of 8. Read before the kernel ahead
            on the stream has ended (see linear_map).
        bias: [vocabulary and padding], in x's dtype.
        vocabulary: rows of weight that are no padding.

    Returns:
        int64 [rows, parts], parts of PART rows of weight, as `best_of`; where the best is not
        finite, the id is any. Sums are float32, in an order that nothing but the inputs has a part
        in; those of `linear_map` with `fixed_order`, for a weight of more than `IN_ONE_PART` rows.

    Raises:
        RuntimeError: shapes, dtypes or devices do not fit; NotImplementedError on the CPU.
    """
    best: Tensor = torch.ops.minserve.linear_best(x, squares, eps, weight, bias, vocabulary)
    return best


def best_of(logits: Tensor) -> Tensor:
    """The same of float32 logits [rows, vocabulary]: of each part a number that orders pairs of a
    logit (by its bits; NaN above all) and the inverted id, so that of equal ones the lowest id
    counts. It has 64 bits and no sign, and is told here as int64."""
    bits = (logits + 0.0).view(torch.int32).long() & _LOW
    order = torch.where(bits >= _SIGN, _LOW - bits, bits + _SIGN).masked_fill(logits.isnan(), _LOW)
    ids = torch.arange(logits.shape[1], device=logits.device)
    # As signed numbers they order alike when the highest bit is turned.
    keys = ((order - _SIGN) << 32) | (_LOW - ids)
    best = [part.amax(1) for part in keys.split(PART, dim=1)]
    return torch.stack(best, 1) ^ torch.iinfo(torch.int64).min


def ids_of(best: Tensor) -> Tensor:
    """Of each row the id of its best logit: int64 [rows]."""
    return _LOW - ((best ^ torch.iinfo(torch.int64).min).amax(1) & _LOW)


def draw_best_(
    best: Tensor,
    tokens: Tensor,
    slots: Tensor,
    positions: Tensor,
    remaining: Tensor,
    cursor: Tensor,
    out: Tensor,
    stop_ids: Tensor,
) -> None:
    """What draw_ does with rows of temperature 0 whose bests these are: int64 [rows, parts]. On
    CUDA alone; the other arguments are draw_'s.

    Raises:
        RuntimeError: shapes, dtypes or devices do not fit; NotImplementedError on the CPU.
    """
    torch.ops.minserve.draw_best_(best, tokens, slots, positions, remaining, cursor, out, stop_ids)


def _fake(
    x: Tensor,
    squares: Tensor | None,
    eps: float,
    weight: Tensor,
    bias: Tensor | None,
    vocabulary: int,
) -> Tensor:
    return x.new_empty((len(x), -(-len(weight) // PART)), dtype=torch.int64)


def _draw_fake(
    best: Tensor,
    tokens: Tensor,
    slots: Tensor,
    positions: Tensor,
    remaining: Tensor,
    cursor: Tensor,
    out: Tensor,
    stop_ids: Tensor,
) -> None:
    """Returns nothing; what it changes keeps its shape."""


torch.library.register_fake("minserve::linear_best", _fake)
torch.library.register_fake("minserve::draw_best_", _draw_fake)
