"""ClusterDecode: a small model's decode step of up to about a hundred sequences in one kernel.

The kernel is engine/ops/cluster_decode.py.
"""

from __future__ import annotations

import sys
from collections.abc import Collection
from contextlib import suppress
from typing import Self, cast

import torch
from torch import Tensor, nn

from engine.models.backends.autotune import works
from engine.models.backends.blocks import Block, BlockModel, Support, compile_blocks, last_norm
from engine.models.backends.dispatch import FEW_ROWS, ExecutionPath, Workload
from engine.models.backends.kernel_support import lacks_hopper_kernels
from engine.models.backends.lm_head import SMALL_VOCABULARY, SeparateHead
from engine.models.language_model import LanguageModel
from engine.models.state import ModelState
from engine.ops.cluster_decode import ClusterLayer, ClusterProgram, refusal

# The largest measured size. Every cluster of blocks reads all weights of the layers; they need not
# stay in the cache between steps, since what one cluster requests, others have just read.
_MOST_WEIGHTS = 67_000_000

NAME = "cluster_decode"
SUPPORT = Support(cells=("mingru", "minlstm"))
# With more rows, clusters take turns on some GPUs.
ROWS_AT_ONCE = 96


def takes(model: BlockModel) -> bool:
    """Return whether the kernel was built for these widths and the model is small enough.

    The conditions of `lacks_hopper_kernels` are assumed.
    """
    config = model.config
    layer = config.d_model * (
        (model.gates + 1) * model.inner + 2 * model.hidden + (config.d_model if model.taps else 0)
    )
    return (
        config.quantization is None
        and not refusal(
            layers=config.n_layers,
            width=config.d_model,
            inner=model.inner,
            hidden=model.hidden,
            taps=model.taps,
        )
        and config.n_layers * layer <= _MOST_WEIGHTS
    )


def supports(model: LanguageModel, device: torch.device) -> str | None:
    """Return why ClusterDecode cannot run `model`, whose weights are on `device`; None: it can."""
    reason = lacks_hopper_kernels(model, device, SUPPORT)
    if reason is None and not takes(compile_blocks(model)):
        return "not a small model of the widths for which its kernels were built"
    return reason


class ClusterDecode:
    """Decode steps of `model`, which must pass `supports`.

    It has a packed copy of the weights as they are now, with the norms' weights folded in.
    """

    @classmethod
    def of(cls, model: LanguageModel) -> Self | None:
        """Create it; None if the GPU, or part of one, has no room for a cluster or for the copy."""
        with suppress(torch.OutOfMemoryError):
            step, state = cls(model), model.new_state(1)
            padding = torch.full((1,), -1, dtype=torch.int32, device=model.device)
            if works(lambda: step.step(padding, state, padding)):
                return step
        return None

    @torch.no_grad()
    def __init__(self, model: LanguageModel) -> None:
        config, blocks = model.config, compile_blocks(model)
        self._cell, self._conv = blocks.recurrence.state, blocks.conv_state
        # Whether steps end before the head, and return hidden states.
        self.ends_with_hidden = config.vocab_size > SMALL_VOCABULARY
        last = last_norm(model)
        norm = last.weight.detach()
        head = model.embedding if model.head is None else model.head
        bias = None if self.ends_with_hidden else model.head_bias
        self._program = ClusterProgram(
            model.embedding.weight.detach(),
            [_layer(block) for block in blocks.blocks],
            None if self.ends_with_hidden else _times_norm(head.weight.detach(), last),
            None if bias is None else bias.detach().to(norm.dtype),
            norm=norm if self.ends_with_hidden else None,
            cell=blocks.recurrence.cell,
            linear_candidate=blocks.recurrence.linear_candidate,
            normalize_gates=blocks.recurrence.normalize_gates,
            eps=config.norm_eps,
        )

    def step(self, tokens: Tensor, state: ModelState, slots: Tensor) -> Tensor:
        """Run a step as ModelBackend.step does; returns hidden states if `ends_with_hidden`."""
        conv = None if self._conv is None else state[self._conv]
        return self._program.run(tokens, slots, state[self._cell], conv)


def paths(model: LanguageModel, head: SeparateHead) -> list[ExecutionPath]:
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


def _layer(block: Block) -> ClusterLayer:
    gates, out = cast("nn.Linear", block.gates), cast("nn.Linear", block.out)
    mlp = block.mlp
    conv = None if block.mixer is None else block.mixer.conv
    mix = None if block.mixer is None else cast("nn.Linear", block.mixer.mix)
    up = None if mlp is None else cast("nn.Linear", mlp.up)
    down = None if mlp is None else cast("nn.Linear", mlp.down)
    return ClusterLayer(
        gates=_times_norm(gates.weight.detach(), block.norm),
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
