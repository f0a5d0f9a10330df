"""linear_map: W x for a decode or prefill batch on Hopper, with the norm before it folded in.

RMSNorm(x) W^T is (x * norm_weight) W^T divided by the root mean square of each row of x. The first
factor comes as `x`, written by whoever wrote the residual stream (`linear_residual_`,
`linear_embed`), and the sums of squares beside it; the division is left for the product's sums.

Weights are read while the kernel ahead on the stream may still be running, so that kernel must not
be the one that writes them: a weight is no result of an operator of this library, and whoever has
just changed weights synchronises before the next call. Matrices and vectors begin at multiples of
16 bytes, as torch allocates them.
"""

import torch
from torch import Tensor
from torch.nn import functional

from engine.ops import library  # noqa: F401  (registers the operators)

SQUARE_ROWS = 64  # channels whose squares are summed together


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


def scaled_product(
    x: Tensor, squares: Tensor | None, eps: float, weight: Tensor, bias: Tensor | None
) -> Tensor:
    """W x / norm + bias in float64: what every operator of this family starts with."""
    y = x.double() @ weight.double().t()
    if squares is not None:
        mean = squares.double().sum(0) / x.shape[1]
        y = y * (mean + eps).rsqrt().unsqueeze(-1)
    return y if bias is None else y + bias.double()


def reference(
    x: Tensor,
    squares: Tensor | None,
    eps: float,
    weight: Tensor,
    bias: Tensor | None = None,
    gelu: bool = False,
) -> Tensor:
    """The same in float64."""
    y = scaled_product(x, squares, eps, weight, bias)
    return functional.gelu(y) if gelu else y


def _fake(
    x: Tensor,
    squares: Tensor | None,
    eps: float,
    weight: Tensor,
    bias: Tensor | None = None,
    gelu: bool = False,
    logits: bool = False,
    fixed_order: bool = False,
) -> Tensor:
    dtype = torch.float32 if logits else x.dtype
    return x.new_empty((x.shape[0], weight.shape[0]), dtype=dtype)


torch.library.register_fake("minserve::linear_map", _fake)
