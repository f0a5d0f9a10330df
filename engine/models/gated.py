"""Gated functions of layers: RMSNorm with an output gate, and SwiGLU."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional


class GatedRMSNorm(nn.RMSNorm):
    """RMSNorm(h) * weight * silu(gate), computed in fp32 and rounded once."""

    def forward(self, h: Tensor, gate: Tensor) -> Tensor:  # type: ignore[override]
        """Norm h [..., channels], gated by `gate` of the same shape; differentiable."""
        dtype = torch.float64 if h.dtype == torch.float64 else torch.float32
        normed = functional.rms_norm(
            h.to(dtype), tuple(self.normalized_shape), self.weight.to(dtype), self.eps
        )
        return (normed * functional.silu(gate.to(dtype))).to(h.dtype)


def swiglu(y: Tensor) -> Tensor:
    """Return silu(gate) * up of y [..., 2 * hidden] = [gate | up]; differentiable."""
    gate, up = y.chunk(2, dim=-1)
    return functional.silu(gate) * up
