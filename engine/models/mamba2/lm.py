"""Mamba2LM: the language model of Mamba-2 (arXiv 2405.21060).

An embedding; n layers of

    z, xBC, dt = in_proj(RMSNorm(r))               r: the residual stream
    x, B, C = silu(conv(xBC))
    y = scan(x, dt, A, B, C, D)                    engine/ops/ssd.py, A = -exp(A_log)
    r + out_proj(RMSNorm of each group(y silu(z)))

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
from engine.models.mamba2.config import Mamba2Config
from engine.models.program import LayerProgram
from engine.models.quantized import linear
from engine.models.state_space import ResidualNorm, StateSpaceLM
from engine.ops import conv_scan, conv_step, ssd_scan, ssd_scan_train, ssd_step

_LEAST_DT, _MOST_DT = 1e-3, 0.1  # time steps of an untrained model
_LEAST_A, _MOST_A = 1.0, 16.0  # -A of an untrained model


class GroupedGatedNorm(nn.Module):
    """RMSNorm of y silu(z), each of `groups` parts of the channels by itself, in fp32."""

    def __init__(self, channels: int, groups: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(channels))
        self.groups, self.eps = groups, eps

    def forward(self, y: Tensor, z: Tensor) -> Tensor:
        """Norm y [..., channels] with gates z, as y; return y's type."""
        dtype = torch.promote_types(y.dtype, torch.float32)
        gated = y.to(dtype) * functional.silu(z.to(dtype))
        parts = gated.view(*y.shape[:-1], self.groups, -1)
        normed = functional.rms_norm(parts, parts.shape[-1:], None, self.eps).flatten(-2)
        return (normed * self.weight.to(dtype)).to(y.dtype)


class Layer(RecurrentLayer):
    """One residual layer; `scan`, `step` and `forward` compute the same function.

    The rows of `in_proj` are z | x | B | C | dt. `conv` [channels of x, B and C, taps] has the
    oldest input's tap first. `per_channel` is A [heads].
    """

    def __init__(self, config: Mamba2Config) -> None:
        super().__init__()
        self.heads, self.groups, self.dt_limit = config.heads, config.groups, config.dt_limit
        self.projected = [config.inner, config.convolved, config.heads]
        shared = config.groups * config.state_size
        self.selected = [config.inner, shared, shared]
        self.norm = ResidualNorm(config.d_model, eps=config.norm_eps)
        self.in_proj = linear(config, config.d_model, sum(self.projected), bias=config.bias)
        self.conv = nn.Parameter(torch.empty(config.convolved, config.conv_kernel))
        self.conv_bias = nn.Parameter(torch.zeros(config.convolved)) if config.conv_bias else None
        self.dt_bias = nn.Parameter(torch.empty(config.heads))
        self.A_log = nn.Parameter(torch.empty(config.heads))
        self.D = nn.Parameter(torch.ones(config.heads))
        self.gated_norm = GroupedGatedNorm(config.inner, config.groups, config.norm_eps)
        self.out_proj = linear(config, config.inner, config.d_model, bias=config.bias)
        if not self.A_log.is_meta:
            self._initialize()

    @torch.no_grad()
    def _initialize(self) -> None:
        """Set the initial values of mamba_ssm: -A uniform, dt log-uniform within bounds."""
        bound = 1 / math.sqrt(self.conv.shape[1])
        self.conv.uniform_(-bound, bound)
        self.A_log.uniform_(_LEAST_A, _MOST_A).log_()
        dt = torch.empty(self.heads).uniform_(math.log(_LEAST_DT), math.log(_MOST_DT)).exp()
        self.dt_bias.copy_(dt + torch.log(-torch.expm1(-dt)))  # the inverse of softplus

    def _project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return z [..., inner], the convolution's inputs and dt [..., heads] of x."""
        z, inputs, dt = self.in_proj(self.norm(x)).split(self.projected, dim=-1)
        return z, inputs, dt

    def _select(self, convolved: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return x [..., heads, head_dim], B and C [..., groups, N]."""
        u, b, c = convolved.split(self.selected, dim=-1)
        shared = (self.groups, -1)
        return u.unflatten(-1, (self.heads, -1)), b.unflatten(-1, shared), c.unflatten(-1, shared)

    def _close(self, x: Tensor, y: Tensor, z: Tensor) -> Tensor:
        result: Tensor = x + self.out_proj(self.gated_norm(y.flatten(-2), z))
        return result

    def scan(
        self,
        x: Tensor,
        state: Mapping[str, Tensor],
        cu_seqlens: Tensor,
        slots: Tensor,
        per_channel: Tensor | None,
    ) -> Tensor:
        """Read packed x [tokens, d_model]; updates ssm [rows, heads, head_dim, N] and window."""
        assert per_channel is not None
        z, inputs, dt = self._project(x)
        convolved = conv_scan(
            *(inputs, self.conv, self.conv_bias, cu_seqlens, state["conv"], slots), silu=True
        )
        u, b, c = self._select(convolved)
        y = ssd_scan(
            *(u, dt, per_channel, b, c, self.D, self.dt_bias, self.dt_limit),
            *(cu_seqlens, state["ssm"], slots),
        )
        return self._close(x, y, z)

    def step(
        self, x: Tensor, state: Mapping[str, Tensor], slots: Tensor, per_channel: Tensor | None
    ) -> Tensor:
        """Read one token each, x [batch, d_model]; updates the state as `scan` does."""
        assert per_channel is not None
        z, inputs, dt = self._project(x)
        convolved = conv_step(inputs, self.conv, self.conv_bias, state["conv"], slots, silu=True)
        u, b, c = self._select(convolved)
        y = ssd_step(
            *(u, dt, per_channel, b, c, self.D, self.dt_bias, self.dt_limit), state["ssm"], slots
        )
        return self._close(x, y, z)

    def forward(self, x: Tensor, per_channel: Tensor | None) -> Tensor:
        """Read x [batch, time, d_model], differentiably, from the initial state."""
        assert per_channel is not None
        z, inputs, dt = self._project(x)
        channels, taps = self.conv.shape
        padded = functional.pad(inputs.transpose(1, 2), (taps - 1, 0))  # [batch, channels, time]
        convolved = functional.conv1d(
            padded, self.conv.unsqueeze(1), self.conv_bias, groups=channels
        )
        u, b, c = self._select(functional.silu(convolved).transpose(1, 2))
        y = ssd_scan_train(u, dt, per_channel, b, c, self.D, self.dt_bias, self.dt_limit)
        return self._close(x, y, z)

    def program(self, per_channel: Tensor | None) -> LayerProgram:
        """Return the layer's stages."""
        assert per_channel is not None
        return (
            program.Norm(self.norm),
            program.Linear(self.in_proj),
            program.Conv(self.conv, self.conv_bias, "conv", first=self.projected[0]),
            program.SsdRecurrence(
                A=per_channel,
                D=self.D,
                dt_bias=self.dt_bias,
                dt_limit=self.dt_limit,
                norm_weight=self.gated_norm.weight,
                norm_eps=self.gated_norm.eps,
                groups=self.groups,
                state="ssm",
            ),
            program.Linear(self.out_proj),
            program.Residual(),
        )


class Mamba2LM(StateSpaceLM):
    """The language model that a Mamba2Config describes."""

    config: Mamba2Config
    no_matrices: ClassVar[tuple[str, ...]] = (".conv",)
    # They are small, and the recurrence computes with them in float32.
    float32_parameters: ClassVar[tuple[str, ...]] = (".A_log", ".D", ".dt_bias")

    def __init__(self, config: Mamba2Config) -> None:
        super().__init__(config, lambda _: Layer(config))
