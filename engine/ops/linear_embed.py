"""linear_embed: rows of an embedding table on Hopper, prepared for the first norm."""

import torch
from torch import Tensor

from engine.ops import library  # noqa: F401  (registers the operators)
from engine.ops.gemm import SQUARE_ROWS


def linear_embed(
    tokens: Tensor, table: Tensor, norm_weight: Tensor | None, squares: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """The residual stream of a model's first layer.

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


def _fake(
    tokens: Tensor, table: Tensor, norm_weight: Tensor | None, squares: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    count, channels = tokens.shape[0], table.shape[1]
    rows = count if norm_weight is not None else 0
    blocks = channels // SQUARE_ROWS if norm_weight is not None or squares else 0
    return (
        table.new_empty((count, channels)),
        table.new_empty((rows, channels)),
        table.new_empty((blocks, count), dtype=torch.float32),
    )


torch.library.register_fake("minserve::linear_embed", _fake)
