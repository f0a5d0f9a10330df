"""whole_step: one token of a few sequences through a whole model in one kernel, on Hopper.

A step of few sequences is the reading of the weights. Every multiprocessor reads its share of all
of them in one stream, and the blocks hand each other what the next product needs through lines of
memory that say themselves whether they have been written, without a barrier between two products.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from engine.ops import library  # noqa: F401  (registers the operators)
from engine.ops.gemm import SQUARE_ROWS

Kind = Literal["embed", "residual", "gates", "gelu", "logits"]

_KINDS: tuple[Kind, ...] = ("embed", "residual", "gates", "gelu", "logits")
_WEIGHT_TYPES = (torch.bfloat16, torch.int8, torch.float8_e4m3fn)
_MAP_BYTES = 128
_LINE_BYTES = 16  # of a channel's values of EIGHT tokens

#: What the kernel takes: rows of a batch, products, channels for each multiprocessor, taps of a
#: convolution; what the inputs of products divide by, in bytes of a row of weights.
MOST_ROWS = 16
EIGHT = 8  # rows whose columns are multiplied together; the most in a fixed order, or in 8 bits
MOST_PHASES = 224
MOST_CHANNELS_EACH = 24
MOST_TAPS = 4
BLOCK_BYTES = 128
MOST_SQUARES = 64  # of SQUARE_ROWS channels each, in a fixed order

#: Bytes of all rows' inputs to one product, in bfloat16; and what lets inputs come in pieces of as
#: many: no norm, so few channels for each multiprocessor, and in a fixed order a multiple of inputs
#: and no more than so many pieces.
MOST_INPUT_BYTES = 64 * 1024
FEW_INPUT_BYTES = 32 * 1024  # of three gates and more than EIGHT rows
MOST_DIVIDED_CHANNELS_EACH = 16
DIVIDED_INPUTS = 512
MOST_PIECES = 4
MOST_SPLIT = 2  # rows whose inputs do not come in pieces, of 8-bit weights


# The copy engine keeps what it has read of a map, by its address. So memory that has once held maps
# holds these for ever: some kilobytes for each model that is loaded.
_MAPS: list[Tensor] = []


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """A product and what is made of its results, all on one GPU and, but for quantised weights and
    their scales, bfloat16.

    `embed` (the first phase) looks rows of `weight` [ids, d_model] up; `residual` adds to what it
    found; `gates` moves the recurrence on; `gelu`; `logits` (the last) is float32.
    """

    kind: Kind
    # [channels, inputs], of gates [gates * channels, inputs]; contiguous; bfloat16, int8 or
    # float8_e4m3fn, the same for all products
    weight: Tensor
    scale: Tensor | None = None  # float32 [rows of weight], of 8-bit weights
    bias: Tensor | None = None  # [rows of weight]
    norm: Tensor | None = None  # [inputs]: the inputs are RMS-normalised first
    taps: Tensor | None = None  # [d_model, K]: a convolution reads the residual stream next
    taps_bias: Tensor | None = None  # [d_model]
    layer: int = 0  # of the state rows that move on: the recurrence's, or the convolution's


class Program:
    """A model's phases in their order, ready to run. Keeps their tensors; these must stay where
    they are. Steps of a program must follow each other on one stream, those of two programs too:
    each takes the whole GPU. Weights are read before the kernel ahead on the stream has ended, so
    none may write them.

    With `fixed_order` sums have the order of linear_map, linear_step and linear_residual_ with
    theirs, and logits and states the same bits as by a chain of these. For weights in bfloat16.

    Raises RuntimeError: shapes, dtypes, alignments or devices of the phases do not fit each other.
    """

    def __init__(
        self,
        phases: Sequence[Phase],
        *,
        gates: int,
        linear_candidate: bool,
        normalize_gates: bool,
        fixed_order: bool = False,
    ) -> None:
        self._phases = tuple(phases)
        self._gates = gates
        self._fixed_order = fixed_order
        self._linear_candidate, self._normalize_gates = linear_candidate, normalize_gates
        device = phases[0].weight.device
        for n, phase in enumerate(phases):
            _check(n, phase, phases, gates)
        if fixed_order:
            _check_order(phases)
        self._weight_type = _WEIGHT_TYPES.index(phases[-1].weight.dtype)
        maps = torch.zeros(len(phases), _MAP_BYTES, dtype=torch.uint8, device="cpu")
        for row, phase in zip(maps[1:], phases[1:], strict=True):
            torch.ops.minserve.whole_step_map(phase.weight, row)
        self._maps = maps.to(device)
        _MAPS.append(self._maps)
        self._plan = torch.tensor(
            [self._numbers(n, phase) for n, phase in enumerate(phases)],
            dtype=torch.int64,
            device="cpu",
        )
        sets = 2 * _LINE_BYTES * sum(self._channels(phase) for phase in phases[:-1])
        narrow = phases[-1].weight.dtype != torch.bfloat16
        most_rows = EIGHT if fixed_order or narrow else MOST_ROWS
        # By eights of a batch: what a step leaves to the next one is for its like.
        self._exchanges = [
            (
                torch.full((eights * sets,), 255, dtype=torch.uint8, device=device),
                torch.zeros(1, dtype=torch.int64, device=device),
            )
            for eights in range(1, 1 + most_rows // EIGHT)
        ]

    def run(
        self, tokens: Tensor, slots: Tensor, cell: Tensor, conv: Tensor | None, eps: float
    ) -> Tensor:
        """One token of every row.

        Args:
            tokens: int32 [batch], up to EIGHT, and for weights in bfloat16 without a fixed order
                up to MOST_ROWS. Inputs that may not come in pieces must have room for all rows in
                MOST_INPUT_BYTES; with more than EIGHT rows for MOST_ROWS, of three gates in
                FEW_INPUT_BYTES. An id out of range is a row of zeros.
            slots: int32 [batch]; negative: a padding row, whose logits mean nothing. No row may
                be named twice.
            cell: float32 [layers, num_slots, inner]; **changed in place**.
            conv: float32 [layers, num_slots, K - 1, d_model], **changed in place**; None without
                convolutions.
            eps: of the norms.

        Returns:
            logits, float32 [batch, rows of the last weight].

        Raises:
            RuntimeError: shapes, dtypes or devices do not fit, or the GPU is not a Hopper.
        """
        eights = min(max(len(tokens) - 1, 0) // EIGHT, len(self._exchanges) - 1)
        exchange, ended = self._exchanges[eights]
        logits: Tensor = torch.ops.minserve.whole_step(
            tokens,
            slots,
            self._plan,
            cell,
            conv,
            exchange,
            ended,
            self._weight_type,
            self._gates,
            eps,
            self._linear_candidate,
            self._normalize_gates,
            self._fixed_order,
        )
        return logits

    def _channels(self, phase: Phase) -> int:
        if phase.kind == "embed":
            return phase.weight.shape[1]
        return phase.weight.shape[0] // (self._gates if phase.kind == "gates" else 1)

    def _numbers(self, n: int, phase: Phase) -> list[int]:
        """A row of the plan, as csrc/persistent_decode/op.cpp reads it."""
        rows, columns = phase.weight.shape
        embed = phase.kind == "embed"
        optional = (phase.scale, phase.bias, phase.norm, phase.taps, phase.taps_bias)
        return [
            _KINDS.index(phase.kind),
            phase.layer,
            self._channels(phase),
            rows if embed else columns,
            phase.weight.data_ptr() if embed else self._maps[n].data_ptr(),
            *(0 if tensor is None else tensor.data_ptr() for tensor in optional),
        ]


def _check(n: int, phase: Phase, phases: Sequence[Phase], gates: int) -> None:
    """RuntimeError where a phase does not fit itself or the others; the kernel checks widths."""

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
    require(
        phase.kind != "gates" or weight.shape[0] % gates == 0, f"weight must have {gates} gates"
    )
    require(
        (phase.scale is not None) == (weight.dtype != torch.bfloat16),
        "8-bit weights have a scale, bfloat16 has none",
    )
    require(weight.device == phases[0].weight.device, "weights must be on one device")
    rows, inputs, taps = weight.shape[0], weight.shape[1], phase.taps
    for name, tensor, shape, dtype, alignment in (
        ("scale", phase.scale, (rows,), torch.float32, 8),
        ("bias", phase.bias, (rows,), torch.bfloat16, 4),
        ("norm", phase.norm, (inputs,), torch.bfloat16, 16),
        ("taps", taps, (width, 0 if taps is None else taps.shape[-1]), torch.bfloat16, 2),
        ("taps_bias", phase.taps_bias, (width,), torch.bfloat16, 4),
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
    numbers_of_taps = {other.taps.shape[-1] for other in phases if other.taps is not None}
    require(len(numbers_of_taps) <= 1, "all convolutions must have the same number of taps")


def _check_order(phases: Sequence[Phase]) -> None:
    """RuntimeError where the order of sums cannot be fixed."""
    dtype, width = phases[-1].weight.dtype, phases[0].weight.shape[1]
    if dtype != torch.bfloat16:
        raise RuntimeError(f"minserve::whole_step: fixed_order needs bfloat16 weights, got {dtype}")
    if width % SQUARE_ROWS or width > MOST_SQUARES * SQUARE_ROWS:
        raise RuntimeError(
            f"minserve::whole_step: fixed_order needs a residual stream of a multiple of "
            f"{SQUARE_ROWS} and at most {MOST_SQUARES * SQUARE_ROWS} channels, got {width}"
        )


def _fake(
    tokens: Tensor,
    slots: Tensor,
    plan: Tensor,
    cell: Tensor,
    conv: Tensor | None,
    exchange: Tensor,
    ended: Tensor,
    weight_type: int,
    gates: int,
    eps: float,
    linear_candidate: bool = False,
    normalize_gates: bool = True,
    fixed_order: bool = False,
) -> Tensor:
    vocabulary = torch.library.get_ctx().new_dynamic_size()
    return cell.new_empty((tokens.shape[0], vocabulary))


torch.library.register_fake("minserve::whole_step", _fake)
torch.library.register_fake("minserve::whole_step_map", lambda weight, map: None)
