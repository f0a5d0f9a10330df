"""A Mamba model in plain PyTorch operators with the same weights, one token at a time.

There is no prompt reader: the states of all tokens are 16 times as large as the activations, and a
plain loop over time is no peer. The package mamba_ssm reads prompts (mamba_ssm.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor
from torch.nn import functional

from engine.models.mamba.lm import Layer, MambaLM
from loadtest.lm_models import head_matrix
from loadtest.peers.decoder import Mode, PlainDecoder


class Decoder(PlainDecoder):
    """Decodes Mamba with fp32 states; see PlainDecoder.

    Raises ValueError for Falcon-Mamba, whose selection is normalised.
    """

    def __init__(self, model: MambaLM, batch: int, mode: Mode) -> None:
        config = model.config
        if config.selection_norm_eps is not None:
            raise ValueError("the peer knows Mamba without norms of dt, B and C only")
        device, dtype = model.device, model.activations
        self._model = model
        self._A = model.channel_parameters()
        windows = (batch, config.inner, config.conv_kernel)
        states = (batch, config.inner, config.state_size)
        count = range(config.n_layers)
        self._windows = [torch.empty(windows, device=device, dtype=dtype) for _ in count]
        self._states = [torch.empty(states, device=device) for _ in count]
        super().__init__(batch, mode, device)

    @torch.no_grad()
    def reset(self) -> None:
        """Reset every sequence to its beginning, about to read token 0."""
        self.tokens.zero_()
        for tensor in (*self._windows, *self._states):
            tensor.zero_()

    @torch.no_grad()
    def logits(self, tokens: Tensor) -> Tensor:
        """Read tokens [batch]; return logits [batch, vocab] fp32, always eagerly."""
        model = self._model
        x = functional.embedding(tokens, model.embedding.weight)
        if model.config.residual_in_fp32:
            x = x.float()
        layers = cast("Sequence[Layer]", model.layers)
        for layer, window, state, a in zip(
            layers, self._windows, self._states, self._A, strict=True
        ):
            assert a is not None
            u, z = layer.in_proj(layer.norm(x)).chunk(2, dim=-1)
            window.copy_(torch.cat([window[..., 1:], u.unsqueeze(-1)], dim=-1))
            convolved = (window * layer.conv).sum(-1)
            u = functional.silu(
                convolved if layer.conv_bias is None else convolved + layer.conv_bias
            )
            low, b, c = layer.x_proj(u).split(layer.selection, dim=-1)
            dt = functional.softplus(layer.dt_proj(low).float()).unsqueeze(-1)
            inputs = dt * u.float().unsqueeze(-1) * b.float().unsqueeze(1)
            state.copy_(torch.exp(dt * a) * state + inputs)
            y = (state * c.float().unsqueeze(1)).sum(-1) + layer.D.float() * u.float()
            x = x + layer.out_proj((y * functional.silu(z.float())).to(u.dtype))
        return functional.linear(model.last_norm(x), head_matrix(model)).float()
