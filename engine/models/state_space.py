"""What Mamba and Mamba-2 share: the A of their layers, a residual stream wider than the weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from engine.config import ModelConfig
from engine.models.language_model import LanguageModel, RecurrentLayer


class WideResidualConfig(Protocol):
    """What a config has beside a ModelConfig's fields."""

    residual_in_fp32: bool


class ResidualNorm(nn.RMSNorm):
    """RMSNorm of a residual stream that may be wider than the weights, whose type it returns."""

    def forward(self, x: Tensor) -> Tensor:
        """Norm x [..., d_model]."""
        weight = self.weight.to(x.dtype)
        y = functional.rms_norm(x, tuple(self.normalized_shape), weight, self.eps)
        return y.to(self.weight.dtype)


class StateSpaceLayer(Protocol):
    """A layer whose states decay by exp(dt A), A = -exp(A_log)."""

    A_log: Tensor


class StateSpaceLM(LanguageModel):
    """A model of StateSpaceLayers; the residual stream is fp32 with `residual_in_fp32`."""

    def __init__(self, config: ModelConfig, layer: Callable[[int], RecurrentLayer]) -> None:
        super().__init__(config, layer)
        self.norm = ResidualNorm(config.d_model, eps=config.norm_eps)
        if config.quantization is not None:
            self.requires_grad_(False)

    def embed(self, tokens: Tensor) -> Tensor:
        x = super().embed(tokens)
        if not cast("WideResidualConfig", self.config).residual_in_fp32:
            return x
        return x.to(torch.promote_types(x.dtype, torch.float32))

    def channel_parameters(self) -> Sequence[Tensor | None]:
        """Return each layer's A, of A_log's shape, fp32 (fp64 of fp64)."""
        dtype = torch.promote_types(self.activations, torch.float32)
        layers = cast("Sequence[StateSpaceLayer]", self.layers)
        return [-layer.A_log.to(dtype).exp() for layer in layers]
