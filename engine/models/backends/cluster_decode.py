"""ClusterDecode: a small LM's decode step of up to about a hundred sequences in one kernel
(engine/ops/cluster_decode.py)."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from contextlib import suppress
from typing import Self, cast

import torch
from torch import Tensor, nn

from engine.config import ModelConfig
from engine.models.backends.autotune import works
from engine.models.backends.lm_head import SMALL_VOCABULARY
from engine.models.backends.persistent_decode import runs_kernels
from engine.models.minrnn.lm import LM, Layer
from engine.models.state import ModelState
from engine.ops.cluster_decode import ClusterLayer, ClusterProgram, refusal

# Every cluster of blocks reads all weights of the layers. They need not stay in the cache from step
# to step: what one cluster asks for, others have just had. Up to so many were measured.
_MOST_WEIGHTS = 67_000_000


def takes(config: ModelConfig) -> bool:
    """Whether the kernel has been built for such widths, and its weights are few. What
    `runs_kernels` asks is taken as given."""
    layer = config.d_model * (
        (config.gates + 1) * config.inner
        + 2 * config.mlp_hidden
        + (config.d_model if config.conv_kernel else 0)
    )
    return (
        config.quantization is None
        and not refusal(
            layers=config.n_layers,
            width=config.d_model,
            inner=config.inner,
            hidden=config.mlp_hidden,
            taps=config.conv_kernel,
        )
        and config.n_layers * layer <= _MOST_WEIGHTS
    )


def supports(model: LM) -> bool:
    """Whether ClusterDecode runs `model`."""
    return runs_kernels(model) and takes(model.config)


class ClusterDecode:
    """Steps of `model`, which `supports` says yes to, with a packed copy of its weights as they are
    now, norms' included."""

    #: Of a step. Those that have no room at once take turns.
    rows = sys.maxsize

    @classmethod
    def of(cls, model: LM) -> Self | None:
        """None where it does not run: also on GPUs, or parts of one, without room for a cluster, or
        for a copy of the weights."""
        if not supports(model):
            return None
        with suppress(torch.OutOfMemoryError):
            step, state = cls(model), model.new_state(1)
            padding = torch.full((1,), -1, dtype=torch.int32, device=state.cell.device)
            if works(lambda: step.step(padding, state, padding)):
                return step
        return None

    @torch.no_grad()
    def __init__(self, model: LM) -> None:
        config = model.config
        #: Whether steps end before the head, of which they give hidden states then.
        self.ends_with_hidden = config.vocab_size > SMALL_VOCABULARY
        norm = model.norm.weight.detach()
        head = model.embedding if model.head is None else model.head
        bias = None if self.ends_with_hidden else model.head_bias
        self._program = ClusterProgram(
            model.embedding.weight.detach(),
            [_layer(layer) for layer in cast("Iterable[Layer]", model.layers)],
            None if self.ends_with_hidden else _times_norm(head.weight.detach(), model.norm),
            None if bias is None else bias.detach().to(norm.dtype),
            norm=norm if self.ends_with_hidden else None,
            gates=config.gates,
            linear_candidate=config.candidate == "linear",
            normalize_gates=config.normalize_gates,
            eps=config.norm_eps,
        )

    def step(self, tokens: Tensor, state: ModelState, slots: Tensor) -> Tensor:
        """As HopperBackend.step, or with hidden states [batch, d_model] instead."""
        return self._program.run(tokens, slots, state.cell, state.conv)


def _layer(layer: Layer) -> ClusterLayer:
    gates, out = layer.cell.gates, cast("nn.Linear", layer.cell.out)
    conv, mlp = layer.conv, layer.mlp
    mix = None if conv is None else cast("nn.Linear", conv.pointwise)
    up = None if mlp is None else cast("nn.Linear", mlp.up)
    down = None if mlp is None else cast("nn.Linear", mlp.down)
    return ClusterLayer(
        gates=_times_norm(gates.weight.detach(), layer.cell_norm),
        gates_bias=gates.bias,
        out=out.weight.detach(),
        out_bias=out.bias,
        taps=None if conv is None else conv.weight.detach(),
        taps_bias=None if conv is None else conv.bias,
        mix=None if mix is None else mix.weight.detach(),
        mix_bias=None if mix is None else mix.bias,
        up=None if up is None or mlp is None else _times_norm(up.weight.detach(), mlp.norm),
        up_bias=None if up is None else up.bias,
        down=None if down is None else down.weight.detach(),
        down_bias=None if down is None else down.bias,
    )


def _times_norm(weight: Tensor, norm: nn.RMSNorm) -> Tensor:
    """RMSNorm(x) W^T = (x / rms) (weight * W)^T; rounded once more, unless all weights are ones."""
    return weight * norm.weight.detach()
