"""The fused GEMMs of decode and prefill on Hopper: W x with what the layer does next as epilogue.

    linear_map         y = W x / norm + bias, with GELU or as fp32 logits
    linear_residual_   x += W y, and what the next norm reads of x
    linear_step        gate projection and one step of the recurrence
    linear_best        the LM head of rows that are sampled greedily: argmax, no logits
    linear_embed       the embedding, prepared for the first norm (an epilogue without a product)

RMSNorm(x) W^T is (x * norm_weight) W^T divided by the root mean square of each row of x. The first
factor comes as `x`, written by whoever wrote the residual stream (`linear_residual_`,
`linear_embed`), and the sums of squares beside it as `squares`; the division is left for the
product's epilogue.

Weights are read while the kernel ahead on the stream may still be running, so that kernel must not
be the one that writes them: a weight is no result of an operator of this library, and whoever has
just changed weights synchronises before the next call. The same holds for biases and norm weights.
Matrices and vectors begin at multiples of 16 bytes, as torch allocates them.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from engine.ops import library  # noqa: F401  (registers the operators)
from engine.ops.scan import mingru_step_reference, minlstm_step_reference

#: Channels whose squares are summed together.
SQUARE_ROWS = 64
#: Logits whose best `linear_best` finds: kArgmaxColumns of csrc/gemm/argmax_head_args.h.
PART = 256
#: Of a weight of more rows than this, sums in a fixed order have one part: no split-K.
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
    """y = W x, divided by the norm, plus bias.

    Args:
        x: [tokens, inputs], bfloat16, contiguous; inputs a multiple of 8. With `squares` it is the
            residual stream times the norm's weight.
        squares: float32 [inputs / 64, tokens], sums of the residual stream's squares; None: no
            norm.
        eps: of the norm.
        weight: [rows, inputs]; rows a multiple of 8. Read before the kernel ahead on the stream
            has ended.
        bias: [rows]. Read as early as weight.
        gelu: exact GELU of y.
        logits: y in float32.
        fixed_order: every row has the bits that it has alone; takes longer now and then.

    Returns:
        [tokens, rows], in x's dtype or float32. Sums are float32; their order depends on the number
        of tokens unless `fixed_order`, and on nothing else of the batch.

    Raises:
        RuntimeError: shapes, dtypes or devices do not fit; NotImplementedError on the CPU.
    """
    y: Tensor = torch.ops.minserve.linear_map(
        x, squares, eps, weight, bias, gelu, logits, fixed_order
    )
    return y


def linear_residual_(
    y: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    x: Tensor,
    norm_weight: Tensor | None,
    fixed_order: bool = False,
    ahead: Tensor | None = None,
    squares: bool = False,
) -> tuple[Tensor, Tensor]:
    """Adds W y (+ bias) to the residual stream, and returns what the next norm reads of it.

    What is returned is of x before `ahead` is added: the bias of the product that is added to x
    next, where the library that multiplies adds none.

    Args:
        y: [tokens, inputs], bfloat16, contiguous; inputs a multiple of 8.
        weight: [channels, inputs]; channels a multiple of 64. Read early, as of `linear_map`.
        bias: [channels]. Read as early as weight, like norm_weight and ahead.
        x: [tokens, channels], contiguous; **changed in place**, so it shares no memory with y.
        norm_weight: [channels], of the norm that comes next; None: none does.
        fixed_order: as of `linear_map`.
        ahead: [channels], added to the rounded x after the next norm's inputs have been taken.
        squares: sums of squares are wanted without norm_weight, too: of a norm whose weights are
            ones, which reads x itself for x * norm_weight.

    Returns:
        x * norm_weight [tokens, channels] in x's dtype, and float32 [channels / 64, tokens], the
        sums of the squares of x, as `linear_map` takes them. Without norm_weight the first is
        empty, and the second unless `squares`.

    Raises:
        RuntimeError: shapes, dtypes or devices do not fit; NotImplementedError on the CPU.
    """
    scaled, sums = torch.ops.minserve.linear_residual_(
        y, weight, bias, x, norm_weight, fixed_order, ahead, squares
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
    linear_candidate: bool = False,
    normalize_gates: bool = True,
    fixed_order: bool = False,
) -> Tensor:
    """Gate projection and one step of the recurrence for every row of a batch.

    The product of a channel's gates never leaves the multiprocessor that forms it: there it is
    rounded as pre-activations in memory are, and moves the channel's state on, as `linear_map`
    followed by `mingru_step` or `minlstm_step` does. Those may sum a product in another order,
    which now and then rounds a pre-activation the other way.

    Args:
        x, squares, eps: as of `linear_map`.
        weight: [2 * channels, inputs] = [k | v] of minGRU or [3 * channels, inputs] = [f | i | v]
            of minLSTM; channels a multiple of 8. Read early, as of `linear_map`.
        bias: [rows of weight]. Read as early as weight.
        state: float32 [num_slots, channels], rows aligned to 16 bytes; **changed in place**.
        slots: int32 [batch]; negative: a padding row, skipped, its h is zero. No row may be named
            twice.
        linear_candidate: g(x) = x.
        normalize_gates: of minLSTM: f' + i' = 1.
        fixed_order: as of `linear_map`.

    Returns:
        h [batch, channels] in x's dtype.

    Raises:
        RuntimeError: shapes, dtypes or devices do not fit (slots out of range are skipped);
            NotImplementedError on the CPU.
    """
    h: Tensor = torch.ops.minserve.linear_step(
        x, squares, eps, weight, bias, state, slots, linear_candidate, normalize_gates, fixed_order
    )
    return h


def linear_best(
    x: Tensor,
    squares: Tensor | None,
    eps: float,
    weight: Tensor,
    bias: Tensor | None,
    vocabulary: int,
) -> Tensor:
    """The best of every 256 logits W x, divided by the norm, plus bias.

    No logits are written, [rows, vocabulary] in fp32: the best of each part is found while they are
    in registers, and `engine.ops.sampling.sample_best_` samples greedily from these.

    Args:
        x: [rows, inputs], bfloat16, contiguous; inputs a multiple of 8.
        squares, eps: as of `linear_map`. Without them the best is the same but where logits are
            equal or not by rounding.
        weight: [vocabulary and padding, inputs]; rows a multiple of 8. Read early, as of
            `linear_map`.
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


def linear_embed(
    tokens: Tensor, table: Tensor, norm_weight: Tensor | None, squares: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """The residual stream of a model's first layer: rows of an embedding table.

    Args:
        tokens: ids, int32 [tokens]; those out of range give zeros.
        table: [vocabulary, channels], bfloat16, contiguous; channels a multiple of 64.
        norm_weight: [channels], of the norm that comes next; None: none does.
        squares: as of `linear_residual_`.

    Returns:
        x [tokens, channels], and what `linear_residual_` returns for it.

    Raises:
        RuntimeError: shapes, dtypes or devices do not fit; NotImplementedError on the CPU.
    """
    x, scaled, sums = torch.ops.minserve.linear_embed(tokens, table, norm_weight, squares)
    return x, scaled, sums


def scaled_product(
    x: Tensor, squares: Tensor | None, eps: float, weight: Tensor, bias: Tensor | None
) -> Tensor:
    """W x / norm + bias in float64: what every epilogue starts with."""
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
    """linear_map in float64."""
    y = scaled_product(x, squares, eps, weight, bias)
    return functional.gelu(y) if gelu else y


def linear_residual_reference(y: Tensor, weight: Tensor, bias: Tensor | None, x: Tensor) -> Tensor:
    """linear_residual_ in float64 and functional: the new x before `ahead`."""
    return x.double() + scaled_product(y, None, 0.0, weight, bias)


def norm_inputs(x: Tensor, norm_weight: Tensor | None) -> tuple[Tensor, Tensor]:
    """What linear_residual_ returns for a new x that has been rounded, in its dtype and float32."""
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
    linear_candidate: bool = False,
    normalize_gates: bool = True,
) -> tuple[Tensor, Tensor]:
    """linear_step in float64 and functional, without rounding between: (h, the new state)."""
    pre = scaled_product(x, squares, eps, weight, bias)
    if weight.shape[0] == 2 * state.shape[1]:
        return mingru_step_reference(pre, state, slots, linear_candidate)
    return minlstm_step_reference(pre, state, slots, linear_candidate, normalize_gates)


def best_of(logits: Tensor) -> Tensor:
    """linear_best of known float32 logits [rows, vocabulary].

    Of each part a number that orders pairs of a logit (by its bits; NaN above all) and the inverted
    id, so that of equal ones the lowest id counts. It has 64 bits and no sign, and is told here as
    int64.
    """
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


def _empty_norm_inputs(
    x: Tensor, norm_weight: Tensor | None, squares: bool
) -> tuple[Tensor, Tensor]:
    """What the next norm reads of the residual stream x [tokens, channels], not yet computed."""
    tokens, channels = x.shape
    rows = tokens if norm_weight is not None else 0
    blocks = channels // SQUARE_ROWS if norm_weight is not None or squares else 0
    return x.new_empty((rows, channels)), x.new_empty((blocks, tokens), dtype=torch.float32)


# Fakes name only the arguments that decide about the results; the schema checks the others.


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
) -> tuple[Tensor, Tensor]:
    return _empty_norm_inputs(x, norm_weight, squares)


def _fake_step(
    x: Tensor,
    squares: Tensor | None,
    eps: float,
    weight: Tensor,
    bias: Tensor | None,
    state: Tensor,
    *_: Any,
) -> Tensor:
    return x.new_empty((len(x), state.shape[1]))


def _fake_best(x: Tensor, squares: Tensor | None, eps: float, weight: Tensor, *_: Any) -> Tensor:
    return x.new_empty((len(x), -(-len(weight) // PART)), dtype=torch.int64)


def _fake_embed(
    tokens: Tensor, table: Tensor, norm_weight: Tensor | None, squares: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    x = table.new_empty((len(tokens), table.shape[1]))
    return x, *_empty_norm_inputs(x, norm_weight, squares)


torch.library.register_fake("minserve::linear_map", _fake_map)
torch.library.register_fake("minserve::linear_residual_", _fake_residual)
torch.library.register_fake("minserve::linear_step", _fake_step)
torch.library.register_fake("minserve::linear_best", _fake_best)
torch.library.register_fake("minserve::linear_embed", _fake_embed)
