"""ClusterDecode: a small LM's decode step of up to about a hundred sequences in one kernel.

The kernel is engine/ops/cluster_decode.py.
"""

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

# The largest measured size. Every cluster of blocks reads all weights of the layers; they need not
# stay in the cache between steps, since what one cluster requests, others have just read.
_MOST_WEIGHTS = 67_000_000

NAME = "cluster_decode"
# With more rows, clusters take turns on some GPUs.
ROWS_AT_ONCE = 96


def takes(config: ModelConfig) -> bool:
    """Return whether the kernel was built for these widths and the model is small enough.

    The conditions of `lacks_hopper_kernels` are assumed.
    """
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
    """Return why ClusterDecode cannot run `model`, whose weights are on `device`; None: it can."""
    reason = lacks_hopper_kernels(model, device)
    if reason is None and not takes(model.config):
        return "not a small model of the widths for which its kernels were built"
    return reason


class ClusterDecode:
    """Decode steps of `model`, which must pass `supports`.

    It has a packed copy of the weights as they are now, with the norms' weights folded in.
    """

    @classmethod
    def of(cls, model: LM) -> Self | None:
        """Create it; None if the GPU, or part of one, has no room for a cluster or for the copy."""
        with suppress(torch.OutOfMemoryError):
            step, state = cls(model), model.new_state(1)
            padding = torch.full((1,), -1, dtype=torch.int32, device=state.cell.device)
            if works(lambda: step.step(padding, state, padding)):
                return step
        return None

    @torch.no_grad()
    def __init__(self, model: LM) -> None:
        config = model.config
        # Whether steps end before the head, and return hidden states.
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
        """Run a step as ModelBackend.step does; returns hidden states if `ends_with_hidden`."""
        return self._program.run(tokens, slots, state.cell, state.conv)


def paths(model: LM, head: SeparateHead) -> list[ExecutionPath]:
    """Return the execution path by clusters; none if the device has no room.

    If steps end before the head, `head` is applied to their hidden states.
    """
    clusters = ClusterDecode.of(model)
    if clusters is None:
        return []
    steps = range(1, sys.maxsize)  # rows beyond one pass take turns
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
    """Fold a norm into the weight: RMSNorm(x) W^T = (x / rms) (weight * W)^T.

    This rounds once more, unless all norm weights are 1.
    """
    return weight * norm.weight.detach()
