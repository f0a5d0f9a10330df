"""HgrnLM: the language model of HGRN (arXiv 2311.04823), as flash-linear-attention builds it.

An embedding; n layers of

    i, f, g = gates(RMSNorm(x))      if conv_kernel, i = conv(i) and f = conv(f)
    f = lb + (1 - lb) sigmoid(f)     lb: the layer's lower bounds, or 0
    h = f h + (1 - f) silu(i)
    x + out(RMSNorm(h) * silu(g))
    x + down(silu(gate) * up)        gate, up = up(RMSNorm(x))

then RMSNorm and the head (the embedding's matrix if tied). LanguageModel says what its methods do.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from engine.models import program
from engine.models.gated import GatedRMSNorm, swiglu
from engine.models.hgrn.config import HgrnConfig
from engine.models.language_model import LanguageModel, RecurrentLayer
from engine.models.program import LayerProgram, Recurrence, Stage
from engine.models.quantized import linear
from engine.models.recurrence import CELLS, lower_bounds_of
from engine.ops import conv_scan, conv_step


class MLP(nn.Module):
    """x [..., d_model] -> SwiGLU of mlp_hidden channels -> d_model; rows of `up`: gate | up."""

    def __init__(self, config: HgrnConfig) -> None:
        super().__init__()
        self.up = linear(config, config.d_model, 2 * config.mlp_hidden, bias=False)
        self.down = linear(config, config.mlp_hidden, config.d_model, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Compute the MLP for x [..., d_model]."""
        y: Tensor = self.down(swiglu(self.up(x)))
        return y


def _taps(config: HgrnConfig) -> nn.Parameter | None:
    """Return weights [inner, taps], the oldest input's tap first; initialized like conv1d's."""
    if not config.conv_kernel:
        return None
    bound = 1 / math.sqrt(config.conv_kernel)
    return nn.Parameter(torch.empty(config.inner, config.conv_kernel).uniform_(-bound, bound))


def _convolve(x: Tensor, weight: Tensor) -> Tensor:
    """Convolve x [batch, time, channels], differentiably, every sequence from its beginning."""
    channels, kernel = weight.shape
    padded = functional.pad(x.transpose(1, 2), (kernel - 1, 0))  # [batch, channels, time]
    return functional.conv1d(padded, weight.unsqueeze(1), groups=channels).transpose(1, 2)


class Layer(RecurrentLayer):
    """One residual layer; `scan`, `step` and `forward` compute the same function.

    The rows of `gates` are i | f | g. `i_conv` and `f_conv` are the taps of the convolutions.
    """

    def __init__(self, config: HgrnConfig) -> None:
        super().__init__()
        self.inner = config.inner
        self.recurrence = Recurrence("hgrn", "hidden")
        self.operators = CELLS["hgrn"]
        self.norm = nn.RMSNorm(config.d_model, eps=config.norm_eps)
        self.gates = linear(config, config.d_model, self.operators.gates * config.inner, bias=False)
        self.i_conv, self.f_conv = _taps(config), _taps(config)
        self.gated_norm = GatedRMSNorm(config.inner, eps=config.norm_eps)
        self.out = linear(config, config.inner, config.d_model, bias=False)
        self.mlp_norm = nn.RMSNorm(config.d_model, eps=config.norm_eps)
        self.mlp = MLP(config)

    def _convolutions(self) -> Sequence[tuple[str, slice, nn.Parameter]]:
        """Return state, columns of the pre-activations and taps of each convolution."""
        if self.i_conv is None or self.f_conv is None:
            return ()
        inner = self.inner
        return (
            ("i_conv", slice(0, inner), self.i_conv),
            ("f_conv", slice(inner, 2 * inner), self.f_conv),
        )

    def _close(self, x: Tensor, pre: Tensor, h: Tensor) -> Tensor:
        """Gate and project h [..., inner], then the MLP; return the residual stream."""
        x = x + self.out(self.gated_norm(h, pre[..., 2 * self.inner :]))
        y: Tensor = x + self.mlp(self.mlp_norm(x))
        return y

    def scan(
        self,
        x: Tensor,
        state: Mapping[str, Tensor],
        cu_seqlens: Tensor,
        slots: Tensor,
        per_channel: Tensor | None,
    ) -> Tensor:
        """Read packed x [tokens, d_model]; updates hidden [rows, inner] and both windows."""
        pre = self.gates(self.norm(x))
        for name, columns, taps in self._convolutions():
            inputs = pre[:, columns].contiguous()
            pre[:, columns] = conv_scan(inputs, taps, None, cu_seqlens, state[name], slots)
        h = self.operators.scan(
            self.recurrence, pre, state["hidden"], cu_seqlens, slots, per_channel
        )
        return self._close(x, pre, h)

    def step(
        self, x: Tensor, state: Mapping[str, Tensor], slots: Tensor, per_channel: Tensor | None
    ) -> Tensor:
        """Read one token each, x [batch, d_model]; updates the state as `scan` does."""
        pre = self.gates(self.norm(x))
        for name, columns, taps in self._convolutions():
            inputs = pre[:, columns].contiguous()
            pre[:, columns] = conv_step(inputs, taps, None, state[name], slots)
        h = self.operators.step(self.recurrence, pre, state["hidden"], slots, per_channel)
        return self._close(x, pre, h)

    def forward(self, x: Tensor, per_channel: Tensor | None) -> Tensor:
        """Read x [batch, time, d_model], differentiably, from the initial state."""
        batch, time, _ = x.shape
        pre = self.gates(self.norm(x))  # [batch, time, 3 * inner]
        convolutions = self._convolutions()
        if convolutions:
            convolved = [_convolve(pre[..., columns], taps) for _, columns, taps in convolutions]
            pre = torch.cat([*convolved, pre[..., 2 * self.inner :]], dim=-1)
        cu_seqlens = torch.arange(batch + 1, dtype=torch.int32, device=x.device) * time
        h, _ = self.operators.train(
            self.recurrence, pre.flatten(0, 1), cu_seqlens, None, per_channel
        )
        return self._close(x, pre, h.view(batch, time, -1))

    def program(self, per_channel: Tensor | None) -> LayerProgram:
        """Return the layer's stages."""
        stages: list[Stage] = [program.Norm(self.norm), program.Linear(self.gates)]
        stages += [
            program.Conv(taps, None, name, columns.start)
            for name, columns, taps in self._convolutions()
        ]
        return (
            *stages,
            Recurrence("hgrn", "hidden", lower_bound=per_channel),
            program.GatedNorm(self.gated_norm),
            program.Linear(self.out),
            program.Residual(),
            program.Norm(self.mlp_norm),
            program.Linear(self.mlp.up),
            program.Elementwise("swiglu"),
            program.Linear(self.mlp.down),
            program.Residual(),
        )


class HgrnLM(LanguageModel):
    """The language model that an HgrnConfig describes; `lower_bounds` [layers, inner] are raw."""

    config: HgrnConfig
    vectors_of_layers = frozenset({"lower_bounds"})

    def __init__(self, config: HgrnConfig) -> None:
        super().__init__(config, lambda _: Layer(config))
        self.lower_bounds: nn.Parameter | None = None
        if config.lower_bounds:
            self.lower_bounds = nn.Parameter(torch.zeros(config.n_layers, config.inner))
        if config.quantization is not None:
            self.requires_grad_(False)

    def channel_parameters(self) -> Sequence[Tensor | None]:
        """Return each layer's lower bounds of the forget gate, fp32 [inner]; None: it has none."""
        return lower_bounds_of(self.lower_bounds, self.config.n_layers)
