"""PersistentDecode: a model's decode step of a few sequences in one kernel.

The kernel is engine/ops/persistent_decode.py; weights are bfloat16 or quantised.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import Tensor, nn

from engine.models.backends.blocks import (
    Block,
    BlockModel,
    Support,
    compile_blocks,
    lower_bounds,
)
from engine.models.backends.dispatch import ExecutionPath, Workload
from engine.models.backends.kernel_support import lacks_hopper_kernels
from engine.models.backends.lm_head import LmHead
from engine.models.language_model import LanguageModel
from engine.models.quantize import QUANTIZED_DTYPES
from engine.models.quantized import QuantLinear
from engine.models.state import ModelState
from engine.ops import persistent_decode
from engine.ops.persistent_decode import Kind, Phase, PhaseShape, Program

NAME = "persistent_decode"
NAME_8_BIT = "persistent_decode in 8 bits"
SUPPORT = Support(cells=("mingru", "minlstm", "hgrn"), activations=("gelu", "swiglu"))


def most_rows(model: BlockModel, processors: int, *, fixed_order: bool = False) -> int:
    """Return the most sequences in a step on a GPU with this many multiprocessors.

    0: the kernel does not support such a model. The conditions of `lacks_hopper_kernels` are
    assumed.
    """
    kind = model.config.quantization
    rows, _ = persistent_decode.most_rows(
        list(_shapes(model)),
        weight_type=torch.bfloat16 if kind is None else QUANTIZED_DTYPES[kind],
        cell=model.recurrence.cell,
        processors=processors,
        fixed_order=fixed_order,
    )
    return rows


def supports(
    model: LanguageModel, device: torch.device, *, fixed_order: bool = False
) -> str | None:
    """Return why PersistentDecode cannot run `model`, with weights on `device`; None: it can."""
    reason = lacks_hopper_kernels(model, device, SUPPORT)
    if reason is None and _most_rows(model, device, fixed_order) == 0:
        return "its kernel does not support the model's widths or number of layers"
    return reason


def _most_rows(model: LanguageModel, device: torch.device, fixed_order: bool) -> int:
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    return most_rows(compile_blocks(model), processors, fixed_order=fixed_order)


class PersistentDecode:
    """Decode steps of `model`, which must pass `supports`, for batches of up to `most_rows`.

    Its weights may be quantised. With `fixed_order`, for bfloat16 weights, steps are bitwise equal
    to those of a FusedGemmPath with it.
    """

    @staticmethod
    def most_rows(model: LanguageModel, *, fixed_order: bool = False) -> int:
        """Return the largest batch on the model's GPU; 0: the kernel does not support the model."""
        return _most_rows(model, model.device, fixed_order)

    def __init__(self, model: LanguageModel, head: LmHead, *, fixed_order: bool = False) -> None:
        config, blocks = model.config, compile_blocks(model)
        self.rows = self.most_rows(model, fixed_order=fixed_order)
        self.quantized = config.quantization is not None
        self._eps = config.norm_eps
        self._cell, self._conv = blocks.recurrence.state, blocks.conv_state
        self._program = Program(
            list(_phases(blocks, head)),
            cell=blocks.recurrence.cell,
            linear_candidate=blocks.recurrence.linear_candidate,
            normalize_gates=blocks.recurrence.normalize_gates,
            fixed_order=fixed_order,
        )

    def step(self, tokens: Tensor, state: ModelState, slots: Tensor) -> Tensor:
        """Run a step, as ModelBackend.step, with logits for every row of `head`."""
        conv = None if self._conv is None else state[self._conv]
        return self._program.run(tokens, slots, state[self._cell], conv, self._eps)


def _shapes(model: BlockModel) -> Iterator[PhaseShape]:
    """Yield the shapes of the phases that `_phases` makes of such a model."""
    config = model.config
    width, inner = config.d_model, model.inner
    vocabulary = config.vocab_size + (-config.vocab_size % 8)  # padded as in LmHead
    taps = model.taps
    yield PhaseShape(kind="embed", channels=width, inputs=config.vocab_size, taps=taps)
    for layer, block in enumerate(model.blocks):
        if taps:
            yield PhaseShape(kind="residual", channels=width, inputs=width)
        yield PhaseShape(kind="gates", channels=inner, inputs=width, layer=layer, normed=True)
        last = inner
        if block.mlp is not None:
            yield PhaseShape(kind="residual", channels=width, inputs=inner)
            yield PhaseShape(
                kind=block.mlp.activation, channels=block.mlp.hidden, inputs=width, normed=True
            )
            last = block.mlp.hidden
        convolved_next = taps > 0 and layer + 1 < config.n_layers
        yield PhaseShape(
            kind="residual",
            channels=width,
            inputs=last,
            taps=taps if convolved_next else 0,
            layer=layer + 1 if convolved_next else 0,
        )
    yield PhaseShape(kind="logits", channels=vocabulary, inputs=width, normed=True)


def path(
    kernel: PersistentDecode, vocabulary: int, *, few: int, unmeasured_from: int = 1
) -> ExecutionPath:
    """Return the execution path by `kernel`.

    Args:
        kernel: the kernel.
        vocabulary: number of tokens; the head may have more rows.
        few: up to this many rows only the same kernel with other weights may be faster.
        unmeasured_from: rows from which it is used if nothing was timed.
    """

    def step(tokens: Tensor, state: ModelState, slots: Tensor) -> Tensor:
        return kernel.step(tokens, state, slots)[:, :vocabulary]

    few = min(few, kernel.rows)
    of_few, of_more = range(1, few + 1), range(few + 1, kernel.rows + 1)
    sizes: dict[Workload, range] = {"few": of_few, "step": of_more}
    return ExecutionPath(
        name=NAME_8_BIT if kernel.quantized else NAME,
        sizes=sizes,
        unmeasured={**sizes, "few": range(unmeasured_from, few + 1)},
        step=step,
    )


def _phases(model: BlockModel, head: LmHead) -> Iterator[Phase]:
    blocks, program, last_norm = model.blocks, model.program, model.program.norm
    assert last_norm is not None
    bounds = lower_bounds(blocks)

    def read_by(index: int) -> dict[str, Any]:
        """Return the convolution that reads the input of layer `index`."""
        mixer = blocks[index].mixer if index < len(blocks) else None
        if mixer is None:
            return {}
        conv = mixer.conv
        return {"taps": conv.weight, "taps_bias": conv.bias, "layer": index}

    table = program.embedding
    yield Phase(
        kind="embed", weight=table.weight, scale=getattr(table, "scale", None), **read_by(0)
    )
    for index, this in enumerate(blocks):
        if this.mixer is not None:
            yield _product("residual", this.mixer.mix)
        yield _product(
            "gates",
            this.gates,
            norm=this.norm.weight,
            layer=index,
            lower_bound=bounds[index],
            output_norm=_output_norm(this),
        )
        assert this.out is not None
        last = this.out
        if this.mlp is not None:
            yield _product("residual", this.out)
            yield _product(this.mlp.activation, this.mlp.up, norm=this.mlp.norm.weight)
            last = this.mlp.down
        yield _product("residual", last, **read_by(index + 1))
    yield Phase(
        kind="logits",
        weight=head.weight,
        scale=head.scale,
        bias=head.bias,
        norm=last_norm.weight,
    )


def _output_norm(block: Block) -> Tensor | None:
    """Return the weights of the norm of a cell's outputs; None where all are 1."""
    norm = block.gated_norm
    return None if norm is None or bool((norm.weight == 1).all()) else norm.weight


def _product(kind: Kind, module: nn.Module, **more: Any) -> Phase:
    linear = cast("nn.Linear | QuantLinear", module)
    scale = linear.scale if isinstance(linear, QuantLinear) else None
    return Phase(kind=kind, weight=linear.weight, scale=scale, bias=linear.bias, **more)
