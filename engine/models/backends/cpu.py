"""CpuBackend: a model with weights packed for the CPU, and one operator call per step.

All weights are in one block of memory, in the order in which a step reads them.
csrc/cpu_model/plan.h draws the layout of a matrix; engine/ops/cpu_model.py describes what is
computed.

Sums are fp32, and every output is summed in one order whatever else is in the batch. So a row's
logits have the same bits at every batch size, slot and number of threads, and reading a prompt
differs from decoding it token by token only by the rounding of the scan's carries.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Callable, Collection, Sequence
from typing import cast

import torch
from torch import Tensor, nn

from engine.backend_info import BackendInfo, PathInfo
from engine.config import ModelConfig
from engine.models.backends.blocks import (
    Block,
    BlockModel,
    GatedRnnLayer,
    SelectiveBlock,
    SsdBlock,
    Support,
    compile_blocks,
    compile_gated_rnn,
    compile_selective,
    compile_ssd,
    is_gated_rnn,
    is_selective,
    is_ssd,
    refusal,
)
from engine.models.language_model import LanguageModel
from engine.models.program import Activation, Conv
from engine.models.state import ModelState, new_state
from engine.ops import library
from engine.ops.cpu_model import lm_logits, lm_prefill, lm_step

SUPPORT = Support(  # csrc/cpu_model
    cells=("mingru", "minlstm", "hgrn", "mamba", "mamba2", "gru", "lstm"),
    activations=("gelu", "swiglu"),
    no_out=True,
    short_convs=True,
)
_MOST_GATE_TAPS = 8  # of a convolution between gates, or Mamba's x, and recurrence
_MOST_SSD_STATES = 1024  # kMostSsdStates in csrc/ssd/args.h

BACKEND = "cpu"
INFO = BackendInfo(BACKEND, (PathInfo(BACKEND, True),))
_VERSION = 6
_RNN_LAYERS = -1  # where other models have their number of states
_PANEL = 16  # outputs in a panel
_GROUP = 4  # panels side by side; three if three gates alternate
_LINE = 64  # bytes of a cache line, to which every tensor is aligned
_ACTIVATIONS: dict[Activation, int] = {"gelu": 0, "swiglu": 1}
_KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2}


def supports(model: LanguageModel) -> str | None:
    """Return why `model` cannot be packed; None: it can.

    It can if it is on the CPU and its weights are float32 or bfloat16 throughout, except for int8
    matrices with a scale per row. A model on the meta device is judged as if it were on the CPU.
    """
    if any(weight.device.type not in ("cpu", "meta") for weight in model.parameters()):
        return "not on a CPU"
    kinds = {
        weight.dtype
        for name, weight in model.named_parameters()
        if not name.endswith(model.float32_parameters)
    } - {torch.int8}
    if len(kinds) != 1 or not kinds <= {torch.float32, torch.bfloat16}:
        return f"weights are {' and '.join(sorted(map(str, kinds))) or 'int8 throughout'}"
    return refusal(model, SUPPORT) or _other_gates(model)


def _other_gates(model: LanguageModel) -> str | None:
    """Return what lies between gates and out projection that the operators do not compute."""
    program = model.program()
    if is_gated_rnn(program):
        return None
    if is_selective(program):
        return _long_taps(compile_selective(program)[0].conv)
    if is_ssd(program):
        block = compile_ssd(program)[0]
        if block.states > _MOST_SSD_STATES:
            return f"more than {_MOST_SSD_STATES:,} states"
        return _long_taps(block.conv)
    blocks = compile_blocks(model)
    convs, inner, taps = blocks.blocks[0].short_convs, blocks.inner, blocks.short_taps
    if not convs:
        return None
    found = [(conv.first, tuple(conv.weight.shape)) for conv in convs]
    if found != [(0, (inner, taps)), (inner, (inner, taps))]:
        return "convolutions between gates and recurrence that are not of HGRN's i and f"
    if taps > _MOST_GATE_TAPS:
        return f"convolutions between gates and recurrence of more than {_MOST_GATE_TAPS} taps"
    return None


def _long_taps(conv: Conv) -> str | None:
    too_many = conv.weight.shape[1] > _MOST_GATE_TAPS
    return f"convolutions of more than {_MOST_GATE_TAPS} taps" if too_many else None


def _panels(weight: Tensor, gates: int) -> Tensor:
    """Cut weight [gates * outputs, inputs] into [panels, 16, inputs], alternating between gates."""
    outputs = weight.shape[0] // gates
    count = -(-outputs // _PANEL)
    padded = weight.view(gates, outputs, *weight.shape[1:])
    if outputs % _PANEL:
        padded = weight.new_zeros(gates, count * _PANEL, *weight.shape[1:])
        padded[:, :outputs] = weight.view(gates, outputs, *weight.shape[1:])
    by_panel = padded.view(gates, count, _PANEL, *weight.shape[1:]).transpose(0, 1)
    return by_panel.reshape(gates * count, _PANEL, *weight.shape[1:])


def pack_matrix(weight: Tensor, gates: int = 1) -> Tensor:
    """Pack weight [gates * outputs, inputs], float32, bfloat16 or int8 (csrc/cpu_model/plan.h).

    Returns the same numbers in another order, flat.
    """
    panels = _panels(weight, gates)  # [panels, 16, inputs]
    per_step = 1 if weight.dtype == torch.float32 else 2
    if panels.shape[2] % per_step:
        panels = nn.functional.pad(panels, (0, 1))
    steps = panels.unflatten(2, (-1, per_step))  # [panels, 16, steps, inputs of a step]
    # bfloat16 has the inputs of one output side by side, int8 the outputs of one input.
    order = (2, 0, 3, 1) if weight.dtype == torch.int8 else (2, 0, 1, 3)
    size = 3 if gates == 3 else _GROUP
    whole = len(steps) // size * size  # panels of full groups, which are packed in one copy
    groups = steps[:whole].unflatten(0, (-1, size)).permute(0, *(1 + axis for axis in order))
    packed: Tensor = groups.flatten()
    if whole == len(steps):
        return packed
    return torch.cat([packed, steps[whole:].permute(order).flatten()])


def _in_whole_panels(tensor: Tensor, parts: Sequence[int]) -> Tensor:
    """Return a matrix or vector whose parts, of so many outputs, each end with a whole panel."""
    if all(part % _PANEL == 0 for part in parts):
        return tensor
    return torch.cat([_panels(part, 1).flatten(0, 1) for part in tensor.split(list(parts))])


def _packed_numel(weight: Tensor, gates: int = 1, parts: Sequence[int] = ()) -> int:
    """Return the number of elements that `pack_matrix` or `pack_vector` returns, padding included.

    Packing on the meta device would tell it too, but that makes PyTorch import its compiler.
    """
    each = parts or [weight.shape[0] // gates]
    outputs = gates * sum(-(-part // _PANEL) * _PANEL for part in each)
    if weight.dim() == 1:
        return outputs
    per_step = 1 if weight.dtype == torch.float32 else 2
    return outputs * -(-weight.shape[1] // per_step) * per_step


def pack_vector(vector: Tensor, gates: int = 1) -> Tensor:
    """Pack vector [gates * outputs] as fp32 [panels * 16], in the order of the packed outputs."""
    return _panels(vector.detach().float(), gates).flatten()


def _packed_checked(weight: Tensor, gates: int) -> Tensor:
    """Pack a matrix. Raises ValueError for int8 values that the operators do not take."""
    if weight.dtype == torch.int8 and int(weight.min()) == -128:
        raise ValueError("an int8 matrix contains -128; allowed: -127 to 127")
    return pack_matrix(weight, gates)


class _Block:
    """Memory for packed tensors, one after the other; without a size it only counts bytes."""

    def __init__(self, size: int | None = None) -> None:
        self.used = 0
        self.memory: Tensor | None = None
        if size is not None:
            pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            if hasattr(mmap, "MADV_HUGEPAGE"):
                # A step reads all of it, which would need too many TLB entries with 4 KB pages.
                pages.madvise(mmap.MADV_HUGEPAGE)
            self.memory = torch.frombuffer(pages, dtype=torch.uint8)

    def place(self, size: int, packed: Callable[[], Tensor]) -> int:
        """Copy a tensor of `size` bytes in, and return its offset in bytes.

        `packed` returns the tensor; it is not called where bytes are only counted.
        """
        offset = self.used
        self.used += -(-size // _LINE) * _LINE
        if self.memory is not None:
            flat = packed().contiguous().flatten().view(torch.uint8)
            if len(flat) != size:
                raise ValueError(f"a packed tensor has {len(flat)} bytes, not {size}")
            self.memory[offset : offset + size] = flat
        return offset


class _Writer:
    """Writes a model into a block; `plan` has the numbers that csrc/cpu_model/plan_check.cpp reads.

    With `take`, each weight is removed from the model once it is packed, so that the model is never
    in memory twice.
    """

    def __init__(self, block: _Block, take: bool) -> None:
        self.block = block
        self.take = take
        self.plan: list[int] = []

    def numbers(self, *values: int) -> None:
        """Append numbers to the plan."""
        self.plan.extend(values)

    def _done(self, *tensors: Tensor | None) -> None:
        if self.take and self.block.memory is not None:
            for tensor in tensors:
                if tensor is not None:
                    tensor.data = tensor.new_empty(0)

    def vector(self, vector: Tensor | None, gates: int = 1, parts: Sequence[int] = ()) -> None:
        """Write a vector as fp32, or that there is none; `parts` as for `matrix`."""
        self.numbers(-1 if vector is None else self._place_vector(vector, gates, parts))
        self._done(vector)

    def _place_vector(self, vector: Tensor, gates: int, parts: Sequence[int]) -> int:
        size = 4 * _packed_numel(vector, gates, parts)
        return self.block.place(
            size, lambda: pack_vector(_in_whole_panels(vector.detach(), parts), gates)
        )

    def matrix(
        self,
        module: nn.Module | None,
        half: bool,
        gates: int = 1,
        bias: Tensor | None = None,
        parts: Sequence[int] = (),
    ) -> None:
        """Write type, weights, scale and bias of a linear map, or that there is none.

        `parts`: outputs of parts that are to end with whole panels.
        """
        if module is None:
            self.numbers(int(half), -1, -1, -1)
            return
        weight = cast("Tensor", module.weight)
        scale = None
        if weight.dtype == torch.int8:
            scale = cast("Tensor", module.scale)
        if bias is None:
            bias = cast("Tensor | None", getattr(module, "bias", None))
        size = weight.element_size() * _packed_numel(weight, gates, parts)
        offset = self.block.place(
            size, lambda: _packed_checked(_in_whole_panels(weight.detach(), parts), gates)
        )
        self.numbers(_KINDS[weight.dtype], offset)
        self.vector(scale, gates, parts)
        self.vector(bias, gates, parts)
        self._done(weight)

    def table(self, module: nn.Module, half: bool, tied: bool) -> None:
        """Write the embedding by rows; nothing if it is tied to the head."""
        weight = cast("Tensor", module.weight)
        if tied:
            self.numbers(int(half), -1, -1)
            return
        size = weight.element_size() * weight.numel()
        self.numbers(_KINDS[weight.dtype], self.block.place(size, weight.detach))
        self.vector(cast("Tensor", module.scale) if weight.dtype == torch.int8 else None)
        self._done(weight)

    def convolution(self, conv: Conv | None) -> None:
        """Write a convolution's taps and bias, or that there are none."""
        if conv is None:
            self.numbers(-1, -1)
            return
        weight = conv.weight  # [channels, taps]
        padding = -weight.shape[0] % _PANEL
        size = 4 * (weight.shape[0] + padding) * weight.shape[1]

        def by_tap() -> Tensor:
            return nn.functional.pad(weight.detach().float().t(), (0, padding))

        self.numbers(self.block.place(size, by_tap))
        self.vector(conv.bias)
        self._done(conv.weight)

    def model(self, model: LanguageModel, half: bool) -> None:
        """Write the whole model; `half`: its weights are bfloat16."""
        program = model.program()
        if is_gated_rnn(program):
            layers = compile_gated_rnn(program)
            self._gated_rnn_shape(model, layers[0], half)
            self._ends(model, half)
            for gated in layers:
                self.matrix(gated.inputs, half, gated.gates)
                self.matrix(gated.recurrence.recurrent, half, gated.gates)
        elif is_selective(program):
            selective = compile_selective(program)
            self._selective_shape(model.config, selective[0], half)
            self._ends(model, half)
            for layer in selective:
                self._selective_block(layer, half)
        elif is_ssd(program):
            ssd = compile_ssd(program)
            self._ssd_shape(model.config, ssd[0], half)
            self._ends(model, half)
            for ssd_layer in ssd:
                self._ssd_block(ssd_layer, half)
        else:
            compiled = compile_blocks(model)
            self._shape(compiled, half)
            self._ends(model, half)
            for block in compiled.blocks:
                self._block(block, half)
        self._done(*model.parameters())

    def _shape(self, blocks: BlockModel, half: bool) -> None:
        config, how = blocks.config, blocks.recurrence
        self.numbers(
            _VERSION,
            0,  # states: layers have a cell
            library.cell_number(how.cell),
            int(how.linear_candidate),
            int(how.normalize_gates),
            int(half),
            _bits(config.norm_eps),
            config.n_layers,
            config.d_model,
            blocks.inner,
            blocks.hidden,
            config.vocab_size,
            blocks.taps,
            _ACTIVATIONS[blocks.activation],
            blocks.short_taps,
        )

    def _gated_rnn_shape(self, model: LanguageModel, layer: GatedRnnLayer, half: bool) -> None:
        config, units = model.config, layer.recurrence.recurrent.weight.shape[1]
        self.numbers(
            _VERSION,
            _RNN_LAYERS,
            layer.gates,
            int(half),
            _bits(0.0),  # there are no norms
            config.n_layers,
            config.d_model,
            units,
            layer.inputs.weight.shape[1],  # width of the embedding
            *(0, config.vocab_size, 0, 0, 0),  # no MLP, no convolutions
        )

    def _selective_shape(self, config: ModelConfig, block: SelectiveBlock, half: bool) -> None:
        how = block.recurrence
        self.numbers(
            _VERSION,
            how.A.shape[1],
            0,  # heads: these are layers of Mamba
            how.dt.weight.shape[1],
            _bits(how.norm_eps or 0.0),
            int(half),
            _bits(config.norm_eps),
            config.n_layers,
            config.d_model,
            block.inner,
            *(0, config.vocab_size, 0, 0),  # no MLP, no convolution before the norm
            block.conv.weight.shape[1],
        )

    def _ssd_shape(self, config: ModelConfig, block: SsdBlock, half: bool) -> None:
        how, heads = block.recurrence, block.heads
        self.numbers(
            _VERSION,
            block.states,
            heads,
            block.inner // heads,
            how.groups,
            *map(_bits, how.dt_limit),
            int(half),
            _bits(config.norm_eps),
            config.n_layers,
            config.d_model,
            block.inner,
            *(0, config.vocab_size, 0, 0),  # no MLP, no convolution before the norm
            block.conv.weight.shape[1],
        )

    def _ends(self, model: LanguageModel, half: bool) -> None:
        self.table(model.embedding, half, tied=model.head is None)
        if model.norm is not None:  # all have one but GRU's and LSTM's
            self.vector(model.norm.weight)
        head: nn.Module = model.embedding if model.head is None else model.head
        self.matrix(head, half, bias=model.head_bias)

    def _block(self, block: Block, half: bool) -> None:
        gates = block.operators.gates
        self.convolution(block.mixer.conv if block.mixer else None)
        self.matrix(block.mixer.mix if block.mixer else None, half)
        self.vector(block.norm.weight)
        self.matrix(block.gates, half, gates)
        if block.gated_norm is not None:
            for conv in block.short_convs or (None, None):
                self.convolution(conv)
            self.vector(block.gated_norm.weight)
        if block.operators.bounded:
            bound = block.recurrence.lower_bound
            self.vector(torch.zeros(block.inner) if bound is None else bound)
        self.matrix(block.out, half)
        up_gates = 2 if block.mlp and block.mlp.activation == "swiglu" else 1  # gate | up
        self.vector(block.mlp.norm.weight if block.mlp else None)
        self.matrix(block.mlp.up if block.mlp else None, half, up_gates)
        self.matrix(block.mlp.down if block.mlp else None, half)

    def _selective_block(self, block: SelectiveBlock, half: bool) -> None:
        how = block.recurrence
        self.vector(block.norm.weight)
        self.matrix(block.inputs, half, gates=2)  # x | z
        self.convolution(block.conv)
        self.matrix(how.select, half)
        self.matrix(how.dt, half)
        self.vector(how.A.flatten())
        self.vector(how.D)
        self.matrix(block.out, half)

    def _ssd_block(self, block: SsdBlock, half: bool) -> None:
        how = block.recurrence
        self.vector(block.norm.weight)
        parts = (block.inner, block.conv.weight.shape[0], block.heads)  # z, x B C, dt
        self.matrix(block.inputs, half, parts=parts)
        self.convolution(block.conv)
        self.vector(how.A)
        self.vector(how.D)
        self.vector(how.dt_bias)
        self.vector(how.norm_weight)
        self.matrix(block.out, half)


def _bits(number: float) -> int:
    bits: int = struct.unpack("<q", struct.pack("<d", number))[0]
    return bits


def _states(model: LanguageModel) -> tuple[str | None, ...]:
    """Return the names of the state tensors that the operators take, in their order.

    Those of the recurrence, of the inputs that convolutions carry on (three), of an LSTM's memory.
    """
    program = model.program()
    if is_gated_rnn(program):
        how = compile_gated_rnn(program)[0].recurrence
        return how.hidden, None, None, None, how.memory
    if is_selective(program):
        selective = compile_selective(program)[0]
        return selective.recurrence.state, selective.conv.state, None, None, None
    if is_ssd(program):
        ssd = compile_ssd(program)[0]
        return ssd.recurrence.state, ssd.conv.state, None, None, None
    blocks = compile_blocks(model)
    i_conv, f_conv = [conv.state for conv in blocks.blocks[0].short_convs] or (None, None)
    return blocks.recurrence.state, blocks.conv_state, i_conv, f_conv, None


class CpuBackend:
    """A ModelBackend of `model`, packed for the CPU.

    `model` must pass `supports`. With `take` its weights are moved, and it is empty afterwards.
    Raises ValueError for a model that cannot be packed, or an int8 matrix with -128 in it.
    """

    def __init__(self, model: LanguageModel, *, take: bool = False) -> None:
        reason = supports(model)
        if reason is not None:
            raise ValueError(
                f"only float32, bfloat16 or int8 models on the CPU can be packed: {reason}"
            )
        self.config: ModelConfig = model.config
        self.info = INFO
        self.parameters_count = sum(weight.numel() for weight in model.parameters())
        half = any(weight.dtype == torch.bfloat16 for weight in model.parameters())
        self._states = _states(model)  # which tensors of the state the operators take, in order
        self._initial = {name: tensor.float() for name, tensor in model.initial_state().items()}
        counted = _Block()
        _Writer(counted, take=False).model(model, half)
        block = _Block(counted.used)
        writer = _Writer(block, take)
        writer.model(model, half)
        assert block.memory is not None
        self._weights = block.memory
        self._plan = torch.tensor(writer.plan, dtype=torch.int64)

    @property
    def hidden_dtype(self) -> torch.dtype:
        """Type of the result of `prefill`."""
        return torch.float32

    @property
    def weight_bytes(self) -> int:
        """Bytes of the packed weights; a step reads all of them except an untied embedding."""
        return self._weights.numel()

    def prepare(
        self, steps: Collection[int], prompts: Collection[int], logits: Collection[int]
    ) -> None:
        """Do nothing, because there are no kernels to choose; see ModelBackend.prepare."""

    def prefill(
        self, tokens: Tensor, cu_seqlens: Tensor, state: ModelState, slots: Tensor
    ) -> Tensor:
        """Read packed prompts, as LanguageModel.prefill does.

        The hidden states [tokens, d_model] are fp32.

        Raises RuntimeError for tokens, slots or sequence bounds out of range.
        """
        return lm_prefill(
            tokens, cu_seqlens, slots, self._weights, self._plan, *self._tensors(state)
        )

    def step(self, tokens: Tensor, state: ModelState, slots: Tensor) -> Tensor:
        """Read one token of every sequence.

        tokens [batch], slots [batch] int32 (negative: the row is skipped, its logits are undefined)
        -> logits fp32 [batch, vocab_size]. Raises RuntimeError for tokens or slots out of range.
        """
        return lm_step(tokens, slots, self._weights, self._plan, *self._tensors(state))

    def _tensors(self, state: ModelState) -> tuple[Tensor, *tuple[Tensor | None, ...]]:
        cell, *others = self._states
        assert cell is not None
        return state[cell], *(None if name is None else state.get(name) for name in others)

    def step_to_bests(self, rows: int) -> None:
        """Return None, because a step computes all logits; see ModelBackend.step_to_bests."""
        return None

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits fp32 [n, vocab_size] of hidden fp32 [n, d_model]."""
        return lm_logits(hidden, self._weights, self._plan)

    def initial_state(self) -> dict[str, Tensor]:
        """Return the state tensors [layers, *shape] that do not begin as zeros, by name."""
        return self._initial

    def new_state(self, rows: int) -> ModelState:
        """Return the state of `rows` sequences that have read nothing."""
        return new_state(self.config.state, rows, self._initial)
