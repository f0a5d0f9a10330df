"""Gated functions of layers: RMSNorm with an output gate, and SwiGLU.

In serving on a GPU they are one kernel each, except for widths that the kernels do not take.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from engine.ops import fused_norm

_MULTIPLE = 8  # channels of the kernels


class GatedRMSNorm(nn.RMSNorm):
    """RMSNorm(h) * weight * silu(gate), computed in fp32 and rounded once."""

    def forward(self, h: Tensor, gate: Tensor) -> Tensor:  # type: ignore[override]
        """Norm h [..., channels], gated by `gate` of the same shape; differentiable."""
        if _takes_kernels(h, h.shape[-1]) and self.weight.dtype == h.dtype:
            assert self.eps is not None
            return fused_norm.gated_rms_norm(h, gate, self.weight, self.eps)
        dtype = torch.float64 if h.dtype == torch.float64 else torch.float32
        normed = functional.rms_norm(
            h.to(dtype), tuple(self.normalized_shape), self.weight.to(dtype), self.eps
        )
        return (normed * functional.silu(gate.to(dtype))).to(h.dtype)


def swiglu(y: Tensor) -> Tensor:
    """Return silu(gate) * up of y [..., 2 * hidden] = [gate | up]; differentiable."""
    if _takes_kernels(y, y.shape[-1] // 2):
        return fused_norm.swiglu(y)
    gate, up = y.chunk(2, dim=-1)
    return functional.silu(gate) * up


def _takes_kernels(x: Tensor, channels: int) -> bool:
    return (
        x.is_cuda
        and x.dtype != torch.float64
        and not torch.is_grad_enabled()  # the kernels have no gradients
        and channels % _MULTIPLE == 0
    )
