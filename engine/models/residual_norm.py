"""ResidualNorm: the norm of models whose residual stream may be wider than their weights."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional


class ResidualNorm(nn.RMSNorm):
    """RMSNorm of a residual stream that may be wider than the weights, whose type it returns."""

    def forward(self, x: Tensor) -> Tensor:
        """Norm x [..., d_model]."""
        weight = self.weight.to(x.dtype)
        y = functional.rms_norm(x, tuple(self.normalized_shape), weight, self.eps)
        return y.to(self.weight.dtype)
