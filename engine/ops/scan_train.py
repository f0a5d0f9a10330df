"""What the differentiable scans share: the shapes of their results and the way of the gradient.

Both operators of a scan take the same leading arguments, then flags of their own:

    name(pre, cu_seqlens, h0?, *flags) -> (h, h_last)
    name_backward(grad_h, grad_h_last?, pre, h, cu_seqlens, h0?, *flags) -> (grad_pre, grad_h0)
"""

from typing import Any

import torch
from torch import Tensor

from engine.ops import library  # noqa: F401  (registers the operators)
from engine.ops.gates import accumulation_dtype


def _states(pre: Tensor, cu_seqlens: Tensor, channels: int) -> Tensor:
    """An empty state [sequences, channels] in the type that pre's scan accumulates in."""
    shape = (cu_seqlens.shape[0] - 1, channels)
    return pre.new_empty(shape, dtype=accumulation_dtype(pre.dtype))


def register_scan(name: str, gates: int) -> None:
    """Registers shape functions and gradient of minserve::`name`, which reads pre-activations
    [tokens, gates * channels]."""
    backward_operator = getattr(torch.ops.minserve, f"{name}_backward")

    def fake(
        pre: Tensor, cu_seqlens: Tensor, h0: Tensor | None = None, *flags: bool
    ) -> tuple[Tensor, Tensor]:
        channels = pre.shape[1] // gates
        return pre.new_empty((pre.shape[0], channels)), _states(pre, cu_seqlens, channels)

    def fake_backward(
        grad_h: Tensor,
        grad_h_last: Tensor | None,
        pre: Tensor,
        h: Tensor,
        cu_seqlens: Tensor,
        h0: Tensor | None,
        *flags: bool,
    ) -> tuple[Tensor, Tensor]:
        return pre.new_empty(pre.shape), _states(pre, cu_seqlens, h.shape[1])

    def setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        pre, cu_seqlens, h0, *ctx.flags = inputs
        ctx.save_for_backward(pre, output[0], cu_seqlens, h0)

    def backward(ctx: Any, grad_h: Tensor, grad_h_last: Tensor) -> tuple[Tensor | None, ...]:
        pre, h, cu_seqlens, h0 = ctx.saved_tensors
        grad_pre, grad_h0 = backward_operator(
            grad_h, grad_h_last, pre, h, cu_seqlens, h0, *ctx.flags
        )
        return grad_pre, None, None if h0 is None else grad_h0, *(None for _ in ctx.flags)

    torch.library.register_fake(f"minserve::{name}", fake)
    torch.library.register_fake(f"minserve::{name}_backward", fake_backward)
    torch.library.register_autograd(f"minserve::{name}", backward, setup_context=setup)
