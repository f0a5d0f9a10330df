"""ClusterDecode: a small LM's decode step of up to about a hundred sequences in one kernel
(engine/ops/cluster_decode.py)."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable
from contextlib import suppress
from typing import Self, cast

import torch
from torch import Tensor, nn

from engine.config import ModelConfig
from engine.models.backends.autotune import works
from engine.models.backends.dispatch import FEW_ROWS, ExecutionPath, Workload
from engine.models.backends.kernel_support import lacks_hopper_kernels
from engine.models.backends.lm_head import SMALL_VOCABULARY, SeparateHead
from engine.models.minrnn.lm import LM, Layer
from engine.models.state import ModelState
from engine.ops.cluster_decode import ClusterLayer, ClusterProgram, refusal

# Every cluster of blocks reads all weights of the layers. They need not stay in the cache from step
# to step: what one cluster asks for, others have just had. Up to so many were measured.
_MOST_WEIGHTS = 67_000_000

NAME = "cluster_decode"
#: More rows have clusters take turns on some GPUs.
ROWS_AT_ONCE = 96


def takes(config: ModelConfig) -> bool:
    """Whether the kernel has been built for such widths, and its weights are few. What
    `lacks_hopper_kernels` asks is taken as given."""
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


def supports(model: LM, device: torch.device) -> str | None:
    """Why ClusterDecode does not run `model`, whose weights are on `device`; None: it does."""
    reason = lacks_hopper_kernels(model, device)
    if reason is None and not takes(model.config):
        return "not a small model of the widths that its kernels have"
    return reason


class ClusterDecode:
    """Steps of `model`, which `supports` takes, with a packed copy of its weights as they are
    now, norms' included."""

    @classmethod
    def of(cls, model: LM) -> Self | None:
        """None on GPUs, or parts of one, without room for a cluster, or for a copy of the
        weights."""
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
        """As ModelBackend.step, or with hidden states [batch, d_model] instead."""
        return self._program.run(tokens, slots, state.cell, state.conv)


def paths(model: LM, head: SeparateHead) -> list[ExecutionPath]:
    """The path by clusters of `model`, which `supports` takes; none where the device has no room.
    Where steps end before the head, `head` follows."""
    clusters = ClusterDecode.of(model)
    if clusters is None:
        return []
    steps = range(1, sys.maxsize)  # of which those that have no room at once take turns
    unmeasured: dict[Workload, range] = {"step": range(1, ROWS_AT_ONCE + 1)}
    if not clusters.ends_with_hidden:
        return [
            ExecutionPath(
                name=NAME,
                sizes={"step": steps},
                unmeasured=unmeasured,
                at_once=ROWS_AT_ONCE,
                step=clusters.step,
            )
        ]

    def tune(workload: Workload, sizes: Collection[int]) -> None:
        head.tune(sizes)

    return [
        ExecutionPath(
            name=NAME,
            sizes={"step": steps, "argmax": range(FEW_ROWS + 1, sys.maxsize)},
            unmeasured=unmeasured,
            at_once=ROWS_AT_ONCE,
            step=head.behind(clusters.step),
            step_to_bests=head.bests_behind(clusters.step),
            tune=tune,
        )
    ]


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
