"""whole_step: one token of a few sequences through a whole model in one kernel, on Hopper.

A step of few sequences is bound by reading the weights. Every multiprocessor reads its share of all
weights as one stream. Blocks pass each other the inputs of the next product through lines of memory
that show by themselves whether they have been written, so there is no barrier between two products.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from engine.ops.library import preactivations_of

Kind = Literal["embed", "residual", "gates", "gelu", "logits", "swiglu"]

_KINDS: tuple[Kind, ...] = ("embed", "residual", "gates", "gelu", "logits", "swiglu")
_WEIGHT_TYPES = (torch.bfloat16, torch.int8, torch.float8_e4m3fn)
_MAP_BYTES = 128

# Rows of a column tile, whose columns are multiplied together; the most rows of a batch-invariant
# program, or of one with 8-bit weights.
EIGHT = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseShape:
    """The properties of a phase that decide whether the kernel supports it."""

    kind: Kind
    channels: int  # number of results
    inputs: int  # for `embed`, the number of ids
    taps: int = 0  # taps of a convolution that reads the residual stream next; 0: none
    layer: int = 0  # layer of the state rows to update: the recurrence's or the convolution's
    normed: bool = False


def most_rows(
    shapes: Sequence[PhaseShape],
    *,
    weight_type: torch.dtype,
    cell: str,
    processors: int,
    fixed_order: bool = False,
) -> tuple[int, str]:
    """Return the largest batch for a model of these phases; the same in any build of the library.

    Args:
        shapes: a model's phases, in order.
        weight_type: of all products: bfloat16, int8 or float8_e4m3fn.
        cell: name of the recurrence.
        processors: the GPU's multiprocessors.
        fixed_order: for a batch-invariant program.

    Returns:
        The number of rows, and "". If the kernel does not support such phases: 0, and the reason.
    """
    scaled = weight_type != torch.bfloat16
    plan = [
        [
            *(_KINDS.index(shape.kind), shape.layer, shape.channels, shape.inputs, shape.taps),
            *(0, 0 if scaled else -1, -1, 0 if shape.normed else -1, 0 if shape.taps else -1, -1),
            *(-1, -1),
        ]
        for shape in shapes
    ]
    rows, refusal, _ = _limits(
        torch.tensor(plan, dtype=torch.int64, device="cpu"),
        *(_WEIGHT_TYPES.index(weight_type), cell, fixed_order, processors),
    )
    return rows, refusal


def _limits(
    plan: Tensor, weight_type: int, cell: str, fixed_order: bool, processors: int
) -> tuple[int, str, int]:
    """Return the rows, why there are none, and the bytes of the exchange for EIGHT rows."""
    found: tuple[int, str, int] = torch.ops.minserve.whole_step_most_rows(
        plan, weight_type, cell, fixed_order, processors
    )
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """A product and the operation on its results.

    All tensors are on one GPU and, except for quantised weights and their scales, bfloat16. `embed`
    (the first phase) looks up rows of `weight` [ids, d_model]; `residual` adds to the residual
    stream; `gates` updates the recurrence; `gelu` applies GELU and `swiglu` SwiGLU; `logits` (the
    last) returns float32.

    A cell with an output gate has another pre-activation per channel for it. The `residual` after
    its `gates` reads RMSNorm(h) * output_norm * silu(g).
    """

    kind: Kind
    # [channels, inputs], of gates [gates * channels, inputs], of swiglu [gate | up, inputs];
    # contiguous; bfloat16, int8 or float8_e4m3fn, the same for all products
    weight: Tensor
    scale: Tensor | None = None  # float32 [rows of weight], for 8-bit weights
    bias: Tensor | None = None  # [rows of weight]
    norm: Tensor | None = None  # [inputs]: the inputs are RMS-normalised first
    taps: Tensor | None = None  # [d_model, K]: a convolution reads the residual stream next
    taps_bias: Tensor | None = None  # [d_model]
    layer: int = 0  # layer of the state rows to update: the recurrence's or the convolution's
    lower_bound: Tensor | None = None  # HGRN's gates: float32 [channels]; None: 0
    output_norm: Tensor | None = None  # [channels]: weights of the norm of h; None: 1


class Program:
    """A model's phases in order, ready to run; keeps their tensors.

    Steps of one program, and of two programs, must follow one another on one stream, since each
    takes the whole GPU. Weights are prefetched before the previous kernel on the stream has ended,
    so that kernel must not write them, and a program may be dropped only when its steps have ended.

    With `fixed_order`, for bfloat16 weights, sums have the order of linear_map, linear_step and
    linear_residual_ with their `fixed_order`, so logits and states are bitwise equal to those of a
    chain of these.

    Raises:
        RuntimeError: shapes, dtypes, alignments or devices of the phases do not fit each other, or
            the kernel.
    """

    def __init__(
        self,
        phases: Sequence[Phase],
        *,
        cell: str,
        linear_candidate: bool,
        normalize_gates: bool,
        fixed_order: bool = False,
    ) -> None:
        self._cell, self._gates = cell, preactivations_of(cell)
        self._fixed_order = fixed_order
        self._linear_candidate, self._normalize_gates = linear_candidate, normalize_gates
        device = phases[0].weight.device
        for n, phase in enumerate(phases):
            _check(n, phase, phases, self._gates)
        self._weight_type = _WEIGHT_TYPES.index(phases[-1].weight.dtype)
        maps = torch.zeros(len(phases), _MAP_BYTES, dtype=torch.uint8, device="cpu")
        for row, phase in zip(maps[1:], phases[1:], strict=True):
            torch.ops.minserve.whole_step_map(phase.weight, row)
        # The memory may have held another program's maps; the kernel reads the present ones.
        self._maps = maps.to(device)
        self._weights: list[Tensor] = []
        self._plan = torch.tensor(
            [self._numbers(phase) for phase in phases], dtype=torch.int64, device="cpu"
        )
        processors = torch.cuda.get_device_properties(device).multi_processor_count
        rows, refusal, sets = _limits(self._plan, self._weight_type, cell, fixed_order, processors)
        if rows == 0:
            raise RuntimeError(refusal)
        # One exchange buffer for each multiple of EIGHT rows, since a step leaves data only for a
        # next step of the same size.
        self._exchanges = [
            (
                torch.full((eights * sets,), 255, dtype=torch.uint8, device=device),
                torch.zeros(1, dtype=torch.int64, device=device),
            )
            for eights in range(1, 1 + -(-rows // EIGHT))
        ]

    def run(
        self, tokens: Tensor, slots: Tensor, cell: Tensor, conv: Tensor | None, eps: float
    ) -> Tensor:
        """Read one token of every row.

        Args:
            tokens: int32 [batch], at most `most_rows`. An id out of range is read as a row of
                zeros.
            slots: int32 [batch]; negative: a padding row, whose logits are undefined. No row may
                occur twice.
            cell: float32 [layers, num_slots, inner]; **changed in place**.
            conv: float32 [layers, num_slots, K - 1, d_model], **changed in place**; None without
                convolutions.
            eps: the norms' epsilon.

        Returns:
            Logits, float32 [batch, rows of the last weight].

        Raises:
            RuntimeError: shapes, dtypes or devices do not fit, or the GPU is not a Hopper.
        """
        eights = min(max(len(tokens) - 1, 0) // EIGHT, len(self._exchanges) - 1)
        exchange, ended = self._exchanges[eights]
        logits: Tensor = torch.ops.minserve.whole_step(
            tokens,
            slots,
            self._weights,
            self._maps,
            self._plan,
            cell,
            conv,
            exchange,
            ended,
            self._weight_type,
            self._cell,
            eps,
            self._linear_candidate,
            self._normalize_gates,
            self._fixed_order,
        )
        return logits

    def _channels(self, phase: Phase) -> int:
        if phase.kind == "embed":
            return phase.weight.shape[1]
        return phase.weight.shape[0] // _rows_of_channel(phase.kind, self._gates)

    def _numbers(self, phase: Phase) -> list[int]:
        """Return a row of the plan for csrc/persistent_decode/plan.h; keep the phase's tensors."""
        rows, columns = phase.weight.shape
        tensors = (
            phase.weight,
            phase.scale,
            phase.bias,
            phase.norm,
            phase.taps,
            phase.taps_bias,
            phase.lower_bound,
            phase.output_norm,
        )
        return [
            _KINDS.index(phase.kind),
            phase.layer,
            self._channels(phase),
            rows if phase.kind == "embed" else columns,
            0 if phase.taps is None else phase.taps.shape[-1],
            *(self._index_of(tensor) for tensor in tensors),
        ]

    def _index_of(self, tensor: Tensor | None) -> int:
        if tensor is None:
            return -1
        self._weights.append(tensor.detach())
        return len(self._weights) - 1


def _rows_of_channel(kind: Kind, gates: int) -> int:
    return gates if kind == "gates" else 2 if kind == "swiglu" else 1


def _check(n: int, phase: Phase, phases: Sequence[Phase], gates: int) -> None:
    """Raise RuntimeError if a phase does not fit itself or the others; the kernel checks widths."""

    def require(holds: bool, what: str) -> None:
        if not holds:
            raise RuntimeError(f"minserve::whole_step: phase {n} ({phase.kind}): {what}")

    weight, width = phase.weight, phases[0].weight.shape[-1]
    require(weight.dim() == 2 and weight.is_contiguous(), "weight must be a contiguous matrix")
    products = phases[-1].weight.dtype
    types = (torch.bfloat16, products) if phase.kind == "embed" else (products,)
    require(
        weight.dtype in types and weight.dtype in _WEIGHT_TYPES,
        f"weight is {weight.dtype}; allowed: bfloat16, int8 or float8_e4m3fn, the same for all",
    )
    of_channel = _rows_of_channel(phase.kind, gates)
    require(weight.shape[0] % of_channel == 0, f"weight must have {of_channel} rows per channel")
    require(
        (phase.scale is not None) == (weight.dtype != torch.bfloat16),
        "8-bit weights must have a scale, bfloat16 weights must not",
    )
    require(weight.device == phases[0].weight.device, "weights must be on one device")
    rows, inputs, taps = weight.shape[0], weight.shape[1], phase.taps
    channels = rows // of_channel
    for name, tensor, shape, dtype, alignment in (
        ("scale", phase.scale, (rows,), torch.float32, 8),
        ("bias", phase.bias, (rows,), torch.bfloat16, 4),
        ("norm", phase.norm, (inputs,), torch.bfloat16, 16),
        ("taps", taps, (width, 0 if taps is None else taps.shape[-1]), torch.bfloat16, 2),
        ("taps_bias", phase.taps_bias, (width,), torch.bfloat16, 4),
        ("lower_bound", phase.lower_bound, (channels,), torch.float32, 8),
        ("output_norm", phase.output_norm, (channels,), torch.bfloat16, 4),
    ):
        fits = tensor is None or (
            tuple(tensor.shape) == shape
            and tensor.dtype == dtype
            and tensor.is_contiguous()
            and tensor.device == weight.device
            and tensor.data_ptr() % alignment == 0
        )
        require(
            fits, f"{name} must be contiguous {dtype} {list(shape)}, aligned to {alignment} bytes"
        )


def _fake(
    tokens: Tensor,
    slots: Tensor,
    weights: Sequence[Tensor],
    maps: Tensor,
    plan: Tensor,
    cell: Tensor,
    conv: Tensor | None,
    exchange: Tensor,
    ended: Tensor,
    weight_type: int,
    kind: str,
    eps: float,
    linear_candidate: bool = False,
    normalize_gates: bool = True,
    fixed_order: bool = False,
) -> Tensor:
    vocabulary = torch.library.get_ctx().new_dynamic_size()
    return cell.new_empty((tokens.shape[0], vocabulary))


torch.library.register_fake("minserve::whole_step", _fake)
torch.library.register_fake("minserve::whole_step_map", lambda weight, map: None)
