"""The fused GEMMs of decode and prefill on Hopper: W x with the layer's next operation as epilogue.

    linear_map         y = W x / norm + bias, with GELU or as fp32 logits
    linear_swiglu      y = silu(gate) * up of (gate | up) = W x / norm + bias
    linear_residual_   x += W y, and the inputs of the next norm
    linear_step        gate projection and one step of the recurrence
    linear_convolve    y, of which some channels pass a step of a short convolution and SiLU
    linear_best        the LM head for greedily sampled rows: argmax, no logits
    linear_embed       the embedding, prepared for the first norm (an epilogue without a product)

RMSNorm(x) W^T is (x * norm_weight) W^T divided by the root mean square of each row of x. The kernel
that writes the residual stream (`linear_residual_`, `linear_embed`) also writes the first factor,
passed as `x`, and the sums of squares, passed as `squares`. The product's epilogue does the
division. In the same way HGRN's step leaves the division of the norm of h to the out projection:
W (RMSNorm(h) * norm_weight * silu(g)) is (W diag(norm_weight)) (h * silu(g)) / norm(h).

Weights are prefetched while the previous kernel on the stream may still be running, so that kernel
must not be the one that writes them. A weight must not be the result of an operator of this
library, and whoever has just changed weights must synchronise before the next call. The same holds
for biases and norm weights. Matrices and vectors must be aligned to 16 bytes, as torch allocates
them.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from engine.ops.scan import CELLS, step_reference

# Channels whose squares are summed together.
SQUARE_ROWS = 64
# Logits per part in `linear_best`: kArgmaxColumns of csrc/gemm/argmax_head_args.h.
PART = 256
# For weights of more rows than this, sums in a fixed order have one part (no split-K).
IN_ONE_PART: int = torch.ops.minserve.linear_one_part_rows()

_LOW = 2**32 - 1
_SIGN = 2**31


def linear_map(
    x: Tensor,
    squares: Tensor | None,
    eps: float,
    weight: Tensor,
    bias: Tensor | None = None,
    gelu: bool = False,
    logits: bool = False,
    fixed_order: bool = False,
) -> Tensor:
    """Compute y = W x, divided by the norm, plus bias.

    Args:
        x: [tokens, inputs], bfloat16, contiguous; inputs a multiple of 8. With `squares` it is the
            residual stream times the norm's weight.
        squares: float32 [inputs / 64, tokens], sums of the residual stream's squares; None: no
            norm.
        eps: the norm's epsilon.
        weight: [rows, inputs]; rows a multiple of 8. Prefetched before the previous kernel on the
            stream has ended.
        bias: [rows]. Prefetched like weight.
        gelu: apply exact GELU to y.
        logits: return y in float32.
        fixed_order: every row is bitwise equal to the result for it alone; sometimes slower.

    Returns:
        [tokens, rows], in x's dtype or float32. Sums are float32; their order depends on the number
        of tokens unless `fixed_order` is set, and on nothing else in the batch.

    Raises:
        RuntimeError: shapes, dtypes or devices do not fit; NotImplementedError on the CPU.
    """
    y: Tensor = torch.ops.minserve.linear_map(
        x, squares, eps, weight, bias, gelu, logits, fixed_order
    )
    return y


def linear_swiglu(
    x: Tensor,
    squares: Tensor | None,
    eps: float,
    weight: Tensor,
    bias: Tensor | None = None,
    fixed_order: bool = False,
) -> Tensor:
    """Compute silu(gate) * up of gate | up = W x, divided by the norm, plus bias.

    gate and up are rounded to x's dtype first, as if they had been in memory.

    Args:
        x, squares, eps: as for `linear_map`.
        weight: [2 * channels, inputs], rows gate | up; channels a multiple of 8. Prefetched as in
            `linear_map`.
        bias: [2 * channels]. Prefetched like weight.
        fixed_order: as for `linear_map`.

    Returns:
        [tokens, channels] in x's dtype.

    Raises:
        RuntimeError: shapes, dtypes or devices do not fit; NotImplementedError on the CPU.
    """
    y: Tensor = torch.ops.minserve.linear_swiglu(x, squares, eps, weight, bias, fixed_order)
    return y


def linear_convolve(
    x: Tensor,
    squares: Tensor | None,
    eps: float,
    weight: Tensor,
    bias: Tensor | None,
    filter: Tensor,
    filter_bias: Tensor | None,
    state: Tensor,
    slots: Tensor,
    first: int = 0,
) -> tuple[Tensor, Tensor]:
    """Compute `linear_map`, and of some channels `conv_step` with SiLU, in one kernel.

    Args:
        x, squares, eps: as for `linear_map`, of up to 64 tokens.
        weight, bias: as for `linear_map`.
        filter: [convolved, 4], contiguous, convolved a multiple of 4. Prefetched like weight.
        filter_bias: [convolved]. Prefetched like weight.
        state: float32 [num_slots, 3, convolved], the inputs before, oldest first, channels
            contiguous and aligned to 16 bytes; **changed in place**.
        slots: int32 [batch]; negative: a padding row, which is skipped; its outputs are zero. No
            row may occur twice.
        first: the first row of weight whose channel is convolved, a multiple of 4.

    Returns:
        y [tokens, rows], of which the convolved columns are not written, and SiLU of the
        convolution [tokens, convolved], both in x's dtype. The convolution's input is y rounded.

    Raises:
        RuntimeError: shapes, dtypes or devices do not fit (slots out of range are skipped);
            NotImplementedError on the CPU.
    """
    y, convolved = torch.ops.minserve.linear_convolve(
        x, squares, eps, weight, bias, filter, filter_bias, state, slots, first
    )
    return y, convolved


def linear_residual_(
    y: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    x: Tensor,
    norm_weight: Tensor | None,
    fixed_order: bool = False,
    ahead: Tensor | None = None,
    squares: bool = False,
    y_squares: Tensor | None = None,
    eps: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Add W y / norm (+ bias) to the residual stream, and return the inputs of the next norm.

    They are computed from x before `ahead` is added. `ahead` is the bias of the product that is
    added to x next, by a library that adds no bias.

    Args:
        y: [tokens, inputs], bfloat16, contiguous; inputs a multiple of 8.
        weight: [channels, inputs]; channels a multiple of 64. Prefetched as in `linear_map`.
        bias: [channels]. Prefetched like weight, as are norm_weight and ahead.
        x: [tokens, channels], contiguous; **changed in place**, so it must not share memory with y.
            bfloat16; or float32, of up to 64 tokens, with norm_weight and neither fixed_order nor
            ahead.
        norm_weight: [channels], of the norm that comes next; None: none does.
        fixed_order: as for `linear_map`.
        ahead: [channels], added to the rounded x after the next norm's inputs have been computed.
        squares: return sums of squares without norm_weight, too: for a norm with weights of 1,
            which reads x itself in place of x * norm_weight.
        y_squares: float32 [inputs / 64, tokens], sums of squares of what y was made of, as
            `linear_step` returns them: W y is divided by the root mean square. None: it is not.
        eps: epsilon of that division.

    Returns:
        x * norm_weight [tokens, channels] in y's dtype, and the sums of squares of x, float32
        [channels / 64, tokens], as `linear_map` takes them. Without norm_weight the first is empty,
        and the second unless `squares` is set.

    Raises:
        RuntimeError: shapes, dtypes or devices do not fit; NotImplementedError on the CPU.
    """
    scaled, sums = torch.ops.minserve.linear_residual_(
        y, weight, bias, x, norm_weight, fixed_order, ahead, squares, y_squares, eps
    )
    return scaled, sums


def linear_step(
    x: Tensor,
    squares: Tensor | None,
    eps: float,
    weight: Tensor,
    bias: Tensor | None,
    state: Tensor,
    slots: Tensor,
    cell: str,
    linear_candidate: bool = False,
    normalize_gates: bool = True,
    fixed_order: bool = False,
    lower_bound: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute the gate projection and one step of the recurrence for every row of a batch.

    The product of a channel's gates stays in the multiprocessor that computes it. There it is
    rounded like pre-activations in memory, and updates the channel's state as `linear_map` followed
    by the cell's step (`mingru_step`) would. These may sum a product in another order, which
    occasionally rounds a pre-activation the other way.

    Args:
        x, squares, eps: as for `linear_map`.
        weight: the rows of a cell's pre-activations: [2 * channels, inputs] = [k | v] of minGRU,
            [3 * channels, inputs] = [f | i | v] of minLSTM, [i | f | g] of HGRN; channels a
            multiple of 8, of HGRN of 64. Prefetched as in `linear_map`.
        bias: [rows of weight]. Prefetched like weight.
        state: float32 [num_slots, channels], rows aligned to 16 bytes; **changed in place**.
        slots: int32 [batch]; negative: a padding row, which is skipped; its h is zero. No row may
            occur twice.
        cell: "mingru", "minlstm" or "hgrn".
        linear_candidate: g(x) = x; not for HGRN.
        normalize_gates: for minLSTM: f' + i' = 1.
        fixed_order: as for `linear_map`.
        lower_bound: for HGRN: of the forget gate, float32 [channels], contiguous and aligned to 16
            bytes; None is zero. Prefetched like weight.

    Returns:
        h [batch, channels] in x's dtype, of HGRN times silu(g); and of HGRN the sums of squares of
        h, float32 [channels / 64, batch], as `linear_residual_` takes them in `y_squares`. They are
        of h in float32, before its gate. Of other cells they are empty.

    Raises:
        RuntimeError: shapes, dtypes or devices do not fit (slots out of range are skipped);
            `cell` is another one; NotImplementedError on the CPU.
    """
    out, sums = torch.ops.minserve.linear_step(
        x,
        squares,
        eps,
        weight,
        bias,
        state,
        slots,
        cell,
        linear_candidate,
        normalize_gates,
        fixed_order,
        lower_bound,
    )
    return out, sums


def linear_best(
    x: Tensor,
    squares: Tensor | None,
    eps: float,
    weight: Tensor,
    bias: Tensor | None,
    vocabulary: int,
) -> Tensor:
    """Return the best of every 256 logits W x, divided by the norm, plus bias.

    Logits are not written to memory: the best of each part is found while they are in registers,
    and `engine.ops.sampling.sample_best_` samples greedily from these.

    Args:
        x: [rows, inputs], bfloat16, contiguous; inputs a multiple of 8.
        squares, eps: as for `linear_map`. Without them the best is the same, except where rounding
            decides whether logits are equal.
        weight: [vocabulary and padding, inputs]; rows a multiple of 8. Prefetched as in
            `linear_map`.
        bias: [vocabulary and padding], in x's dtype.
        vocabulary: rows of weight that are not padding.

    Returns:
        int64 [rows, parts], parts of PART rows of weight, as from `best_of`. If the best logit is
        not finite, the id is arbitrary. Sums are float32, in an order that depends on nothing
        but the inputs; for a weight of more than `IN_ONE_PART` rows it is that of `linear_map`
        with `fixed_order`.

    Raises:
        RuntimeError: shapes, dtypes or devices do not fit; NotImplementedError on the CPU.
    """
    best: Tensor = torch.ops.minserve.linear_best(x, squares, eps, weight, bias, vocabulary)
    return best


def linear_embed(
    tokens: Tensor, table: Tensor, norm_weight: Tensor | None, squares: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the residual stream of a model's first layer: rows of an embedding table.

    Args:
        tokens: ids, int32 [tokens]; ids out of range give zeros.
        table: [vocabulary, channels], bfloat16, contiguous; channels a multiple of 64.
        norm_weight: [channels], of the norm that comes next; None: none does.
        squares: as for `linear_residual_`.

    Returns:
        x [tokens, channels], and the results of `linear_residual_` for it.

    Raises:
        RuntimeError: shapes, dtypes or devices do not fit; NotImplementedError on the CPU.
    """
    x, scaled, sums = torch.ops.minserve.linear_embed(tokens, table, norm_weight, squares)
    return x, scaled, sums


def scaled_product(
    x: Tensor, squares: Tensor | None, eps: float, weight: Tensor, bias: Tensor | None
) -> Tensor:
    """Return W x / norm + bias in float64, the common part of all epilogues."""
    y = x.double() @ weight.double().t()
    if squares is not None:
        mean = squares.double().sum(0) / x.shape[1]
        y = y * (mean + eps).rsqrt().unsqueeze(-1)
    return y if bias is None else y + bias.double()


def linear_map_reference(
    x: Tensor,
    squares: Tensor | None,
    eps: float,
    weight: Tensor,
    bias: Tensor | None = None,
    gelu: bool = False,
) -> Tensor:
    """Reference of linear_map in float64."""
    y = scaled_product(x, squares, eps, weight, bias)
    return functional.gelu(y) if gelu else y


def linear_swiglu_reference(
    x: Tensor,
    squares: Tensor | None,
    eps: float,
    weight: Tensor,
    bias: Tensor | None = None,
) -> Tensor:
    """Reference of linear_swiglu in float64, without intermediate rounding."""
    gate, up = scaled_product(x, squares, eps, weight, bias).chunk(2, dim=-1)
    return functional.silu(gate) * up


def linear_residual_reference(
    y: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    x: Tensor,
    y_squares: Tensor | None = None,
    eps: float = 0.0,
) -> Tensor:
    """Reference of linear_residual_ in float64; returns the new x before `ahead`."""
    return x.double() + scaled_product(y, y_squares, eps, weight, bias)


def norm_inputs(x: Tensor, norm_weight: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the results of linear_residual_ for a rounded new x, in its dtype and float32."""
    tokens, channels = x.shape
    if norm_weight is None:
        return x.new_empty(0, channels), x.new_empty((0, tokens), dtype=torch.float32)
    squares = x.float().square().view(tokens, channels // SQUARE_ROWS, SQUARE_ROWS).sum(-1)
    return (x.float() * norm_weight.float()).to(x.dtype), squares.t().contiguous()


def linear_step_reference(
    x: Tensor,
    squares: Tensor | None,
    eps: float,
    weight: Tensor,
    bias: Tensor | None,
    state: Tensor,
    slots: Tensor,
    cell: str,
    linear_candidate: bool = False,
    normalize_gates: bool = True,
    lower_bound: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Reference of linear_step in float64, without intermediate rounding.

    Returns (h, of HGRN times its gate; the sums of squares of h; the new state).
    """
    pre = scaled_product(x, squares, eps, weight, bias)
    if cell != "hgrn":
        flags = (linear_candidate, normalize_gates)[: CELLS[cell].flags]
        h, after = step_reference(cell, pre, state, slots, *flags)
        return h, h.new_empty(0, len(h)), after
    h, after = step_reference(cell, pre, state, slots, lower_bound)
    sums = h.square().unflatten(1, (-1, SQUARE_ROWS)).sum(-1)
    return h * functional.silu(pre[:, 2 * state.shape[1] :]), sums.t(), after


def best_of(logits: Tensor) -> Tensor:
    """Reference of linear_best for given float32 logits [rows, vocabulary].

    The result for each part is a key that orders pairs of a logit (by its bits; NaN above all) and
    the inverted id, so that the lowest id wins among equal logits. Keys are unsigned 64-bit
    numbers, returned as int64.
    """
    bits = (logits + 0.0).view(torch.int32).long() & _LOW
    order = torch.where(bits >= _SIGN, _LOW - bits, bits + _SIGN).masked_fill(logits.isnan(), _LOW)
    ids = torch.arange(logits.shape[1], device=logits.device)
    # As signed numbers they have the same order if the highest bit is flipped.
    keys = ((order - _SIGN) << 32) | (_LOW - ids)
    best = [part.amax(1) for part in keys.split(PART, dim=1)]
    return torch.stack(best, 1) ^ torch.iinfo(torch.int64).min


def ids_of(best: Tensor) -> Tensor:
    """Return the id of each row's best logit: int64 [rows]."""
    return _LOW - ((best ^ torch.iinfo(torch.int64).min).amax(1) & _LOW)


def _empty_norm_inputs(
    x: Tensor, norm_weight: Tensor | None, squares: bool
) -> tuple[Tensor, Tensor]:
    """Return empty tensors for the next norm's inputs, of x [tokens, channels]."""
    tokens, channels = x.shape
    rows = tokens if norm_weight is not None else 0
    blocks = channels // SQUARE_ROWS if norm_weight is not None or squares else 0
    return x.new_empty((rows, channels)), x.new_empty((blocks, tokens), dtype=torch.float32)


# Fakes name only the arguments that determine the results; the schema checks the others.


def _fake_map(
    x: Tensor,
    squares: Tensor | None,
    eps: float,
    weight: Tensor,
    bias: Tensor | None = None,
    gelu: bool = False,
    logits: bool = False,
    *_: Any,
) -> Tensor:
    return x.new_empty((len(x), len(weight)), dtype=torch.float32 if logits else x.dtype)


def _fake_residual(
    y: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    x: Tensor,
    norm_weight: Tensor | None,
    fixed_order: bool = False,
    ahead: Tensor | None = None,
    squares: bool = False,
    *_: Any,
) -> tuple[Tensor, Tensor]:
    return _empty_norm_inputs(x.to(y.dtype), norm_weight, squares)


def _fake_swiglu(x: Tensor, squares: Tensor | None, eps: float, weight: Tensor, *_: Any) -> Tensor:
    return x.new_empty((len(x), len(weight) // 2))


def _fake_step(
    x: Tensor,
    squares: Tensor | None,
    eps: float,
    weight: Tensor,
    bias: Tensor | None,
    state: Tensor,
    slots: Tensor,
    cell: str,
    *_: Any,
) -> tuple[Tensor, Tensor]:
    channels = state.shape[1]
    blocks = channels // SQUARE_ROWS if cell == "hgrn" else 0
    return x.new_empty((len(x), channels)), x.new_empty((blocks, len(x)), dtype=torch.float32)


def _fake_convolve(
    x: Tensor,
    squares: Tensor | None,
    eps: float,
    weight: Tensor,
    bias: Tensor | None,
    filter: Tensor,
    *_: Any,
) -> tuple[Tensor, Tensor]:
    return x.new_empty((len(x), len(weight))), x.new_empty((len(x), len(filter)))


def _fake_best(x: Tensor, squares: Tensor | None, eps: float, weight: Tensor, *_: Any) -> Tensor:
    return x.new_empty((len(x), -(-len(weight) // PART)), dtype=torch.int64)


def _fake_embed(
    tokens: Tensor, table: Tensor, norm_weight: Tensor | None, squares: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    x = table.new_empty((len(tokens), table.shape[1]))
    return x, *_empty_norm_inputs(x, norm_weight, squares)


torch.library.register_fake("minserve::linear_map", _fake_map)
torch.library.register_fake("minserve::linear_swiglu", _fake_swiglu)
torch.library.register_fake("minserve::linear_residual_", _fake_residual)
torch.library.register_fake("minserve::linear_step", _fake_step)
torch.library.register_fake("minserve::linear_convolve", _fake_convolve)
torch.library.register_fake("minserve::linear_best", _fake_best)
torch.library.register_fake("minserve::linear_embed", _fake_embed)
