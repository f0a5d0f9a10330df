"""An HGRN model in plain PyTorch operators with the same weights, one token at a time.

There is no prompt reader: its state may be negative, so there is no scan in log space, and a plain
loop over time is no peer. The package flash-linear-attention reads prompts (fla_hgrn.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor
from torch.nn import functional

from engine.models.hgrn.lm import HgrnLM, Layer
from loadtest.lm_models import head_matrix
from loadtest.peers.decoder import Mode, PlainDecoder


class Decoder(PlainDecoder):
    """Decodes HGRN; see PlainDecoder. Raises ValueError for models with short convolutions."""

    def __init__(self, model: HgrnLM, batch: int, mode: Mode) -> None:
        if model.config.conv_kernel:
            raise ValueError("the peer knows HGRN without short convolutions only")
        device, layers = model.device, model.config.n_layers
        self._model = model
        self._bounds = [0.0 if one is None else one for one in model.channel_parameters()]
        self._hidden = [
            torch.empty(batch, model.config.inner, device=device) for _ in range(layers)
        ]
        super().__init__(batch, mode, device)

    @torch.no_grad()
    def reset(self) -> None:
        """Reset every sequence to its beginning, about to read token 0."""
        self.tokens.zero_()
        for hidden in self._hidden:
            hidden.zero_()

    @torch.no_grad()
    def logits(self, tokens: Tensor) -> Tensor:
        """Read tokens [batch]; return logits [batch, vocab] fp32, always eagerly."""
        model = self._model
        x = functional.embedding(tokens, model.embedding.weight)
        layers = cast("Sequence[Layer]", model.layers)
        for layer, hidden, bound in zip(layers, self._hidden, self._bounds, strict=True):
            i, f, g = layer.gates(layer.norm(x)).float().chunk(3, dim=-1)
            forget = bound + (1 - bound) * f.sigmoid()
            hidden.copy_(forget * hidden + (1 - forget) * functional.silu(i))
            norm = layer.gated_norm
            normed = functional.rms_norm(hidden, (hidden.shape[1],), norm.weight.float(), norm.eps)
            x = x + layer.out((normed * functional.silu(g)).to(x.dtype))
            gate, up = layer.mlp.up(layer.mlp_norm(x)).chunk(2, dim=-1)
            x = x + layer.mlp.down(functional.silu(gate) * up)
        return functional.linear(model.last_norm(x), head_matrix(model)).float()
