"""MambaLM: the language model of Mamba (arXiv 2312.00752) and of Falcon-Mamba (arXiv 2410.05355).

An embedding; n layers of

    x, z = in_proj(RMSNorm(r))                 r: the residual stream
    x = silu(conv(x))
    dt, B, C = x_proj(x)                       Falcon-Mamba: each is divided by its RMS
    y = scan(x, dt_proj(dt), A, B, C, D, z)    engine/ops/selective.py, A = -exp(A_log)
    r + out_proj(y)

then RMSNorm and the head (the embedding's matrix if tied). LanguageModel says what its methods do.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from engine.models import program
from engine.models.language_model import RecurrentLayer
from engine.models.mamba.config import MambaConfig
from engine.models.program import LayerProgram
from engine.models.quantized import linear
from engine.models.state_space import ResidualNorm, StateSpaceLM
from engine.ops import conv_scan, conv_step, selective_scan, selective_scan_train, selective_step

_LEAST_DT, _MOST_DT = 1e-3, 0.1  # time steps of an untrained model


class Layer(RecurrentLayer):
    """One residual layer; `scan`, `step` and `forward` compute the same function.

    The rows of `in_proj` are x | z, those of `x_proj` dt | B | C. `conv` [inner, taps] has the
    oldest input's tap first. `per_channel` is A [inner, state_size].
    """

    def __init__(self, config: MambaConfig) -> None:
        super().__init__()
        self.inner, self.selection_norm_eps = config.inner, config.selection_norm_eps
        self.selection = [config.dt_rank, config.state_size, config.state_size]
        self.norm = ResidualNorm(config.d_model, eps=config.norm_eps)
        self.in_proj = linear(config, config.d_model, 2 * config.inner, bias=config.bias)
        self.conv = nn.Parameter(torch.empty(config.inner, config.conv_kernel))
        self.conv_bias = nn.Parameter(torch.zeros(config.inner)) if config.conv_bias else None
        self.x_proj = nn.Linear(config.inner, sum(self.selection), bias=False)
        self.dt_proj = nn.Linear(config.dt_rank, config.inner)
        self.A_log = nn.Parameter(torch.empty(config.inner, config.state_size))
        self.D = nn.Parameter(torch.ones(config.inner))
        self.out_proj = linear(config, config.inner, config.d_model, bias=config.bias)
        if not self.A_log.is_meta:
            self._initialize()

    @torch.no_grad()
    def _initialize(self) -> None:
        """Set the initial values of the paper: A = -1 ... -N, dt log-uniform within bounds."""
        bound = 1 / math.sqrt(self.conv.shape[1])
        self.conv.uniform_(-bound, bound)
        self.A_log.copy_(torch.arange(1, self.A_log.shape[1] + 1).log().expand_as(self.A_log))
        bound = 1 / math.sqrt(self.dt_proj.in_features)
        self.dt_proj.weight.uniform_(-bound, bound)
        dt = torch.empty(self.inner).uniform_(math.log(_LEAST_DT), math.log(_MOST_DT)).exp()
        self.dt_proj.bias.copy_(dt + torch.log(-torch.expm1(-dt)))  # the inverse of softplus

    def _select(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return dt [..., inner], without its bias, B and C [..., state_size] of x [..., inner]."""
        dt, b, c = self.x_proj(x).split(self.selection, dim=-1)
        if self.selection_norm_eps is not None:
            dt, b, c = (_normed(part, self.selection_norm_eps) for part in (dt, b, c))
        return functional.linear(dt, self.dt_proj.weight), b, c

    def _close(self, x: Tensor, y: Tensor) -> Tensor:
        result: Tensor = x + self.out_proj(y)
        return result

    def scan(
        self,
        x: Tensor,
        state: Mapping[str, Tensor],
        cu_seqlens: Tensor,
        slots: Tensor,
        per_channel: Tensor | None,
    ) -> Tensor:
        """Read packed x [tokens, d_model]; updates ssm [rows, inner, N] and the window."""
        assert per_channel is not None
        inputs, z = self.in_proj(self.norm(x)).chunk(2, dim=-1)
        u = conv_scan(
            *(inputs, self.conv, self.conv_bias, cu_seqlens, state["conv"], slots), silu=True
        )
        dt, b, c = self._select(u)
        y = selective_scan(
            *(u, dt, per_channel, b, c, self.D, self.dt_proj.bias, z),
            *(cu_seqlens, state["ssm"], slots),
        )
        return self._close(x, y)

    def step(
        self, x: Tensor, state: Mapping[str, Tensor], slots: Tensor, per_channel: Tensor | None
    ) -> Tensor:
        """Read one token each, x [batch, d_model]; updates the state as `scan` does."""
        assert per_channel is not None
        inputs, z = self.in_proj(self.norm(x)).chunk(2, dim=-1)
        u = conv_step(inputs, self.conv, self.conv_bias, state["conv"], slots, silu=True)
        dt, b, c = self._select(u)
        y = selective_step(
            *(u, dt, per_channel, b, c, self.D, self.dt_proj.bias, z), state["ssm"], slots
        )
        return self._close(x, y)

    def forward(self, x: Tensor, per_channel: Tensor | None) -> Tensor:
        """Read x [batch, time, d_model], differentiably, from the initial state."""
        assert per_channel is not None
        inputs, z = self.in_proj(self.norm(x)).chunk(2, dim=-1)
        taps = self.conv.shape[1]
        padded = functional.pad(inputs.transpose(1, 2), (taps - 1, 0))  # [batch, inner, time]
        convolved = functional.conv1d(
            padded, self.conv.unsqueeze(1), self.conv_bias, groups=self.inner
        )
        u = functional.silu(convolved).transpose(1, 2)
        dt, b, c = self._select(u)
        y = selective_scan_train(u, dt, per_channel, b, c, self.D, self.dt_proj.bias, z)
        return self._close(x, y)

    def program(self, per_channel: Tensor | None) -> LayerProgram:
        """Return the layer's stages."""
        assert per_channel is not None
        return (
            program.Norm(self.norm),
            program.Linear(self.in_proj),
            program.Conv(self.conv, self.conv_bias, "conv"),
            program.SelectiveRecurrence(
                self.x_proj,
                self.dt_proj,
                A=per_channel,
                D=self.D,
                state="ssm",
                norm_eps=self.selection_norm_eps,
            ),
            program.Linear(self.out_proj),
            program.Residual(),
        )


def _normed(x: Tensor, eps: float) -> Tensor:
    """Return x [..., n] divided by its root mean square, computed in fp32 (fp64 of fp64)."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return functional.rms_norm(wide, (x.shape[-1],), None, eps).to(x.dtype)


class MambaLM(StateSpaceLM):
    """The language model that a MambaConfig describes."""

    config: MambaConfig
    no_matrices: ClassVar[tuple[str, ...]] = (".A_log", ".conv")
    # They are small, and the recurrence computes with them in float32.
    float32_parameters: ClassVar[tuple[str, ...]] = (".A_log", ".D", ".dt_proj.bias")

    def __init__(self, config: MambaConfig) -> None:
        super().__init__(config, lambda _: Layer(config))
