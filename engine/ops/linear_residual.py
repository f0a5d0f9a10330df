"""linear_residual_: x += W y on Hopper, with what the next norm needs of x written beside it."""

import torch
from torch import Tensor

from engine.ops import library  # noqa: F401  (registers the operators)
from engine.ops.gemm import SQUARE_ROWS, scaled_product


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
    """Adds W y (+ bias) to the residual stream. What is returned is of x before `ahead` is added:
    the bias of the product that is added to x next, where the one who multiplies adds none.

    Args:
        y: [tokens, inputs], bfloat16, contiguous; inputs a multiple of 8.
        weight: [channels, inputs]; channels a multiple of 64. Read early, as of `linear_map`.
        bias: [channels]. Read as early as weight, like norm_weight and ahead.
        x: [tokens, channels], contiguous; **changed in place**, so it shares no memory with y.
        norm_weight: [channels], of the norm that comes next; None: none does.
        fixed_order: as of `linear_map`.
        ahead: [channels], added to the rounded x after the next norm's inputs have been taken.
        squares: sums of squares are wanted without norm_weight, too: of a norm whose weights are
            ones, for which x itself is what others have x * norm_weight for.

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


def reference(y: Tensor, weight: Tensor, bias: Tensor | None, x: Tensor) -> Tensor:
    """The new x before `ahead`, in float64 and functional."""
    return x.double() + scaled_product(y, None, 0.0, weight, bias)


def norm_inputs(x: Tensor, norm_weight: Tensor | None) -> tuple[Tensor, Tensor]:
    """What is returned for a new x that has been rounded, in its dtype and in float32."""
    tokens, channels = x.shape
    if norm_weight is None:
        return x.new_empty(0, channels), x.new_empty((0, tokens), dtype=torch.float32)
    squares = x.float().square().view(tokens, channels // SQUARE_ROWS, SQUARE_ROWS).sum(-1)
    return (x.float() * norm_weight.float()).to(x.dtype), squares.t().contiguous()


def _fake(
    y: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    x: Tensor,
    norm_weight: Tensor | None,
    fixed_order: bool = False,
    ahead: Tensor | None = None,
    squares: bool = False,
) -> tuple[Tensor, Tensor]:
    tokens, channels = x.shape
    rows = tokens if norm_weight is not None else 0
    blocks = channels // SQUARE_ROWS if norm_weight is not None or squares else 0
    return x.new_empty((rows, channels)), x.new_empty((blocks, tokens), dtype=torch.float32)


torch.library.register_fake("minserve::linear_residual_", _fake)
