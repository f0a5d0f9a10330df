"""Blocks: a model's program in the form that fused kernels compute.

A block is a layer of these stages, where those in brackets may be missing:

    [x += mix(conv(x))]
    x += out([gated norm](recurrence([short convolutions](gates(norm(x))))))
    [x += down(activation(up(norm(x))))]

or, in Mamba, a selective block, and in Mamba-2 an SSD block:

    x += out(selective recurrence(conv(in(norm(x)))))
    x += out(SSD recurrence(conv(in(norm(x)))))

Layers of GRU or LSTM are none, for they have neither norms nor a residual stream:

    x = gated recurrence(input(x))

A backend compiles a model's program to blocks, or such layers, and names what its kernels lack.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor, nn

from engine.config import ModelConfig
from engine.models.language_model import LanguageModel
from engine.models.program import (
    Activation,
    Conv,
    Elementwise,
    GatedNorm,
    GatedRecurrence,
    LayerProgram,
    Linear,
    ModelProgram,
    Norm,
    Recurrence,
    Replace,
    Residual,
    SelectiveRecurrence,
    SsdRecurrence,
    Stage,
)
from engine.models.quantized import QuantLinear
from engine.models.recurrence import CELLS, CellOperators


@dataclass(frozen=True, slots=True)
class Mixer:
    """The convolution before a block's first norm, which is no token mixer: x += mix(conv(x))."""

    conv: Conv
    mix: nn.Linear | QuantLinear

    @property
    def taps(self) -> int:
        """Taps of the convolution."""
        return self.conv.weight.shape[1]


@dataclass(frozen=True, slots=True)
class Mlp:
    """The second half of a block: x += down(activation(up(norm(x))))."""

    norm: nn.RMSNorm
    up: nn.Linear | QuantLinear
    activation: Activation
    down: nn.Linear | QuantLinear

    @property
    def hidden(self) -> int:
        """Channels after the activation."""
        return self.down.weight.shape[1]


@dataclass(frozen=True, slots=True)
class Block:
    """One layer; the parts are the model's own modules."""

    norm: nn.RMSNorm
    gates: nn.Linear | QuantLinear
    recurrence: Recurrence
    mixer: Mixer | None = None
    short_convs: tuple[Conv, ...] = ()
    gated_norm: nn.RMSNorm | None = None
    out: nn.Linear | QuantLinear | None = None
    mlp: Mlp | None = None

    @property
    def operators(self) -> CellOperators:
        """The operators of the block's cell."""
        return CELLS[self.recurrence.cell]

    @property
    def inner(self) -> int:
        """Channels of the recurrence."""
        return self.gates.weight.shape[0] // self.operators.gates

    @property
    def norms(self) -> list[nn.RMSNorm]:
        """The block's norms, in order."""
        mlp_norm = None if self.mlp is None else self.mlp.norm
        return [norm for norm in (self.norm, self.gated_norm, mlp_norm) if norm is not None]


@dataclass(frozen=True, slots=True)
class SelectiveBlock:
    """One layer of Mamba; the parts are the model's own modules."""

    norm: nn.RMSNorm
    inputs: nn.Linear | QuantLinear  # to x | z
    conv: Conv  # of x
    recurrence: SelectiveRecurrence
    out: nn.Linear | QuantLinear

    @property
    def inner(self) -> int:
        """Channels of the recurrence."""
        return self.out.weight.shape[1]


@dataclass(frozen=True, slots=True)
class SsdBlock:
    """One layer of Mamba-2; the parts are the model's own modules."""

    norm: nn.RMSNorm
    inputs: nn.Linear | QuantLinear  # to z | x | B | C | dt
    conv: Conv  # of x, B and C
    recurrence: SsdRecurrence
    out: nn.Linear | QuantLinear

    @property
    def inner(self) -> int:
        """Channels of the recurrence."""
        return self.out.weight.shape[1]

    @property
    def heads(self) -> int:
        """Heads of the recurrence."""
        return self.recurrence.A.shape[0]

    @property
    def states(self) -> int:
        """States of each channel."""
        shared = self.conv.weight.shape[0] - self.inner  # B and C of all groups
        return shared // (2 * self.recurrence.groups)


@dataclass(frozen=True, slots=True)
class GatedRnnLayer:
    """A layer of GRU or LSTM: x = recurrence(inputs(x)), of whatever width x was."""

    inputs: nn.Linear | QuantLinear  # rows by gates
    recurrence: GatedRecurrence

    @property
    def gates(self) -> int:
        """Gates of a unit."""
        rows, units = self.recurrence.recurrent.weight.shape
        return rows // units


@dataclass(frozen=True, slots=True)
class BlockModel:
    """A model of blocks that differ in nothing but their weights (`refusal` checks it)."""

    config: ModelConfig
    program: ModelProgram
    blocks: Sequence[Block]

    @property
    def inner(self) -> int:
        """Channels of the recurrences."""
        return self.blocks[0].inner

    @property
    def recurrence(self) -> Recurrence:
        """The cell and its options, as in every block."""
        return self.blocks[0].recurrence

    @property
    def gates(self) -> int:
        """Pre-activations per channel of a recurrence."""
        return self.blocks[0].operators.gates

    @property
    def taps(self) -> int:
        """Taps of the convolutions before the first norms; 0: there are none."""
        mixer = self.blocks[0].mixer
        return 0 if mixer is None else mixer.taps

    @property
    def conv_state(self) -> str | None:
        """Name of the state of the convolutions before the first norms; None: there are none."""
        mixer = self.blocks[0].mixer
        return None if mixer is None else mixer.conv.state

    @property
    def short_taps(self) -> int:
        """Taps of the convolutions between gates and recurrences; 0: there are none."""
        convs = self.blocks[0].short_convs
        return convs[0].weight.shape[1] if convs else 0

    @property
    def hidden(self) -> int:
        """Hidden channels of the MLPs; 0: there are none."""
        mlp = self.blocks[0].mlp
        return 0 if mlp is None else mlp.hidden

    @property
    def activation(self) -> Activation:
        """The MLPs' activation; "gelu" without MLPs."""
        mlp = self.blocks[0].mlp
        return "gelu" if mlp is None else mlp.activation


_S = TypeVar(
    "_S",
    Conv,
    Elementwise,
    GatedNorm,
    GatedRecurrence,
    Linear,
    Norm,
    Recurrence,
    Replace,
    Residual,
    SelectiveRecurrence,
    SsdRecurrence,
)


class _Reader:
    """Takes stages off the front of a layer's program."""

    def __init__(self, stages: LayerProgram) -> None:
        self.stages = list(stages)

    def next_is(self, *kinds: type[Stage]) -> bool:
        """Return whether the next stages are of these kinds, in order."""
        found = self.stages[: len(kinds)]
        return len(found) == len(kinds) and all(map(isinstance, found, kinds))

    def take(self, kind: type[_S]) -> _S:
        """Take the next stage, which must be of this kind. Raises _OtherShapeError."""
        if not self.next_is(kind):
            found = type(self.stages[0]).__name__ if self.stages else "the layer's end"
            raise _OtherShapeError(f"a layer has {found} where kernels expect {kind.__name__}")
        stage = self.stages.pop(0)
        assert isinstance(stage, kind)
        return stage


class _OtherShapeError(Exception):
    pass


def lower_bounds(blocks: Sequence[Block]) -> list[Tensor | None]:
    """Return every block's lower bounds, fp32 [inner], each in its own memory; None: it has none.

    In a program they are rows of one matrix, which need not begin where kernels can read vectors.
    """
    return [
        bound if bound is None else bound.to(torch.float32, copy=True)
        for bound in (block.recurrence.lower_bound for block in blocks)
    ]


def last_norm(model: LanguageModel) -> nn.RMSNorm:
    """Return the norm behind the last layer, which a model of blocks has (see `refusal`)."""
    assert model.norm is not None
    return model.norm


def compile_blocks(model: LanguageModel) -> BlockModel:
    """Return the model as blocks; it must be one (see `refusal`)."""
    program = model.program()
    return BlockModel(model.config, program, [_block(layer) for layer in program.layers])


def _block(layer: LayerProgram) -> Block:
    reader, mixer = _Reader(layer), None
    if reader.next_is(Conv):
        mixer = Mixer(reader.take(Conv), reader.take(Linear).module)
        reader.take(Residual)
    norm, gates, short_convs = reader.take(Norm).module, reader.take(Linear).module, []
    while reader.next_is(Conv):
        short_convs.append(reader.take(Conv))
    recurrence = reader.take(Recurrence)
    gated_norm = reader.take(GatedNorm).module if reader.next_is(GatedNorm) else None
    out = reader.take(Linear).module if reader.next_is(Linear) else None
    reader.take(Residual)
    mlp = None
    if reader.next_is(Norm):
        mlp = Mlp(
            reader.take(Norm).module,
            reader.take(Linear).module,
            reader.take(Elementwise).activation,
            reader.take(Linear).module,
        )
        reader.take(Residual)
    if reader.stages:
        raise _OtherShapeError(f"a layer goes on with {type(reader.stages[0]).__name__}")
    return Block(norm, gates, recurrence, mixer, tuple(short_convs), gated_norm, out, mlp)


def is_selective(program: ModelProgram) -> bool:
    """Return whether the layers are selective blocks."""
    return any(isinstance(stage, SelectiveRecurrence) for stage in program.layers[0])


def compile_selective(program: ModelProgram) -> list[SelectiveBlock]:
    """Return the model's layers as selective blocks; they must be such (see `refusal`)."""
    return [
        SelectiveBlock(*_state_space_parts(layer, SelectiveRecurrence)) for layer in program.layers
    ]


def is_ssd(program: ModelProgram) -> bool:
    """Return whether the layers are SSD blocks."""
    return any(isinstance(stage, SsdRecurrence) for stage in program.layers[0])


def compile_ssd(program: ModelProgram) -> list[SsdBlock]:
    """Return the model's layers as SSD blocks; they must be such (see `refusal`)."""
    return [SsdBlock(*_state_space_parts(layer, SsdRecurrence)) for layer in program.layers]


def is_gated_rnn(program: ModelProgram) -> bool:
    """Return whether the layers are GRU's or LSTM's."""
    return any(isinstance(stage, GatedRecurrence) for stage in program.layers[0])


def compile_gated_rnn(program: ModelProgram) -> list[GatedRnnLayer]:
    """Return the model's layers of GRU or LSTM; they must be such (see `refusal`)."""
    layers = []
    for stages in program.layers:
        reader = _Reader(stages)
        layers.append(GatedRnnLayer(reader.take(Linear).module, reader.take(GatedRecurrence)))
        reader.take(Replace)
        if reader.stages:
            raise _OtherShapeError(f"a layer goes on with {type(reader.stages[0]).__name__}")
    return layers


def _state_space_parts(
    layer: LayerProgram, recurrence: type[_S]
) -> tuple[nn.RMSNorm, nn.Linear | QuantLinear, Conv, _S, nn.Linear | QuantLinear]:
    """Return the parts of a layer of Mamba or Mamba-2 with such a recurrence."""
    reader = _Reader(layer)
    parts = (
        reader.take(Norm).module,
        reader.take(Linear).module,
        reader.take(Conv),
        reader.take(recurrence),
        reader.take(Linear).module,
    )
    reader.take(Residual)
    if reader.stages:
        raise _OtherShapeError(f"a layer goes on with {type(reader.stages[0]).__name__}")
    return parts


@dataclass(frozen=True, slots=True, kw_only=True)
class Support:
    """What the kernels of a backend compute, beside the stages that every block has."""

    cells: tuple[str, ...]
    activations: tuple[Activation, ...] = ("gelu",)
    no_out: bool = False  # blocks without an out projection
    short_convs: bool = False


def _shape(block: Block) -> dict[str, object]:
    """Return what kernels take from the first block for all, by what it is."""
    mixer, out, mlp = block.mixer, block.out, block.mlp
    return {
        "the recurrence": block.recurrence,  # compared without its lower bound
        "the recurrence's channels": block.inner,
        "the convolution before the norm": None if mixer is None else _shape_of_conv(mixer.conv),
        "the convolutions behind the gates": [_shape_of_conv(conv) for conv in block.short_convs],
        "the gated norm": block.gated_norm is None,
        "the out projection": None if out is None else out.weight.shape,
        "the MLP": None if mlp is None else (mlp.activation, mlp.up.weight.shape, mlp.hidden),
        "biases": [
            one is None or one.bias is None
            for one in (
                block.gates,
                None if mixer is None else mixer.mix,
                out,
                None if mlp is None else mlp.up,
                None if mlp is None else mlp.down,
            )
        ],
    }


def _selective_shape(block: SelectiveBlock) -> dict[str, object]:
    """Return the same of a selective block."""
    recurrence = block.recurrence
    return {
        "the recurrence": (
            *(recurrence.select.weight.shape, recurrence.A.shape),
            *(recurrence.state, recurrence.norm_eps),
        ),
        "the convolution": _shape_of_conv(block.conv),
        "the out projection": block.out.weight.shape,
        "biases": [one.bias is None for one in (block.inputs, block.out)],
    }


def _ssd_shape(block: SsdBlock) -> dict[str, object]:
    """Return the same of an SSD block."""
    recurrence = block.recurrence
    return {
        "the recurrence": (recurrence, block.heads),  # compared without its weights
        "the convolution": _shape_of_conv(block.conv),
        "the out projection": block.out.weight.shape,
        "biases": [one.bias is None for one in (block.inputs, block.out)],
    }


def _shape_of_conv(conv: Conv) -> tuple[object, ...]:
    return conv.weight.shape, conv.bias is None, conv.state, conv.first


def _unlike(
    shapes: Sequence[dict[str, object]], norms: Sequence[nn.RMSNorm], eps: float
) -> str | None:
    """Return what kernels would compute wrongly because layers or norms differ; None: nothing."""
    first, *others = shapes
    for shape in others:
        for name, value in shape.items():
            if value != first[name]:
                return f"layers differ in {name}"
    return "norms of different epsilons" if any(norm.eps != eps for norm in norms) else None


def _other_cell(cell: str, support: Support) -> str:
    *most, last = support.cells
    cells = f"{', '.join(most)} and {last}" if most else last
    return f"cell {cell!r}, but its kernels have only {cells}"


def refusal(model: LanguageModel, support: Support) -> str | None:
    """Return why kernels with this support cannot compute the model's layers; None: they can.

    The reason completes "not used: ".
    """
    if model.config.cell not in support.cells:
        return _other_cell(model.config.cell, support)
    program = model.program()
    try:
        if is_gated_rnn(program):
            return _gated_rnn_refusal(program)
        if program.norm is None:
            return "no norm behind the last layer"
        if is_ssd(program):
            return _ssd_refusal(program, program.norm, model.config.norm_eps)
        if is_selective(program):
            return _selective_refusal(program, program.norm, model.config.norm_eps)
        compiled = compile_blocks(model)
    except _OtherShapeError as error:
        return str(error)
    blocks = compiled.blocks
    for block in blocks:
        cell = block.recurrence.cell
        if cell not in support.cells:
            return _other_cell(cell, support)
        if block.operators.output_gate != (block.gated_norm is not None):
            has = "without" if block.gated_norm is None else "with"
            return f"cell {cell!r} {has} a gated norm"
        if block.mlp is not None and block.mlp.activation not in support.activations:
            return f"activation {block.mlp.activation!r} in the MLP"
        if block.out is None and not support.no_out:
            return "no out projection"
        if block.short_convs and not support.short_convs:
            return "convolutions between gates and recurrence"
    norms = [program.norm, *(norm for block in blocks for norm in block.norms)]
    return _unlike([_shape(block) for block in blocks], norms, model.config.norm_eps)


def _gated_rnn_refusal(program: ModelProgram) -> str | None:
    if program.norm is not None:
        return "a norm behind layers of GRU or LSTM"
    layers = compile_gated_rnn(program)
    first = layers[0].recurrence
    for layer in layers:
        how = layer.recurrence
        if (how.cell, how.hidden, how.memory) != (first.cell, first.hidden, first.memory):
            return "layers differ in the recurrence"
        if how.recurrent.weight.shape != first.recurrent.weight.shape:
            return "layers differ in the recurrence's channels"
    return None


def _selective_refusal(program: ModelProgram, last: nn.RMSNorm, eps: float) -> str | None:
    blocks = compile_selective(program)
    norms = [last, *(block.norm for block in blocks)]
    return _unlike([_selective_shape(block) for block in blocks], norms, eps)


def _ssd_refusal(program: ModelProgram, last: nn.RMSNorm, eps: float) -> str | None:
    blocks = compile_ssd(program)
    norms = [last, *(block.norm for block in blocks)]
    if any(block.recurrence.norm_eps != eps for block in blocks):
        return "norms of different epsilons"
    return _unlike([_ssd_shape(block) for block in blocks], norms, eps)
