"""Causal depthwise-separable convolution: each channel sees its last k inputs, then channels mix.

When serving, the last k - 1 inputs of a sequence are part of its state, so decoding token by token
gives the same result as reading the whole sequence. Before the first token they are zero.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from engine.models.minrnn.config import MinRnnConfig
from engine.models.quantized import linear
from engine.ops import conv_scan, conv_step


class CausalConv(nn.Module):
    """The convolution as a module: x [tokens, d_model] -> [tokens, d_model].

    `weight` [d_model, k] has the tap of the oldest input first, like torch's conv1d. It is
    initialized like conv1d, too: uniform within 1 / sqrt(k).
    """

    def __init__(self, config: MinRnnConfig) -> None:
        super().__init__()
        width, kernel = config.d_model, config.conv_kernel
        bound = 1 / math.sqrt(kernel)
        self.weight = nn.Parameter(torch.empty(width, kernel).uniform_(-bound, bound))
        self.bias = (
            nn.Parameter(torch.empty(width).uniform_(-bound, bound)) if config.conv_bias else None
        )
        self.pointwise = linear(config, width, width, bias=config.conv_bias)

    def scan(self, x: Tensor, state: Tensor, cu_seqlens: Tensor, slots: Tensor) -> Tensor:
        """Read packed x [tokens, d_model]; updates `state` [rows, k - 1, d_model] in place."""
        y: Tensor = self.pointwise(conv_scan(x, self.weight, self.bias, cu_seqlens, state, slots))
        return y

    def step(self, x: Tensor, state: Tensor, slots: Tensor) -> Tensor:
        """Read one token of every sequence: x [batch, d_model]."""
        y: Tensor = self.pointwise(conv_step(x, self.weight, self.bias, state, slots))
        return y

    def forward(self, x: Tensor) -> Tensor:
        """Read x [batch, time, d_model], differentiably, every sequence from its beginning."""
        return self.read(x)[0]

    def read(
        self, x: Tensor, before: Tensor | None = None, fresh: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Read x [batch, time, d_model] like `forward`; return the same shape and the last inputs.

        Each sequence goes on from its row of `before` [batch, k - 1, d_model], or from its
        beginning if there is none or the sequence is `fresh` (bool [batch]). The last inputs have
        the shape of `before`.
        """
        width, kernel = self.weight.shape
        if before is None:
            padded = functional.pad(x, (0, 0, kernel - 1, 0))
        else:
            if fresh is not None:
                before = before.masked_fill(fresh.view(-1, 1, 1), 0)
            padded = torch.cat((before.to(x.dtype), x), dim=1)  # [batch, k - 1 + time, d_model]
        mixed = functional.conv1d(
            padded.transpose(1, 2), self.weight.unsqueeze(1), self.bias, groups=width
        )
        y: Tensor = self.pointwise(mixed.transpose(1, 2))
        return y, padded[:, padded.shape[1] - (kernel - 1) :]
