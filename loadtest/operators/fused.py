"""The serving scans mingru_scan and minlstm_scan, gates and recurrence in one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from engine.ops import mingru_scan, minlstm_scan
from engine.ops.scan import mingru_coefficients, minlstm_coefficients
from loadtest.operators.exact import channel_sample, exact_scan, relative_error, unpack
from loadtest.operators.limits import ELEMENTWISE, Limits
from loadtest.operators.rows import Bar, Row, dtype_name, reported
from loadtest.operators.shapes import ScanShape
from loadtest.timing import graph_seconds_per_call, rotation


@dataclass(frozen=True)
class Cell:
    """A serving scan, the number of gates in a token's pre-activations, and their meaning."""

    name: str
    scan: Callable[..., Tensor]
    gates: int
    coefficients: Callable[[Tensor], tuple[Tensor, Tensor]]  # pre -> a, b of h = a h + b

    def traffic(self, shape: ScanShape, dtype: torch.dtype) -> int:
        """Return the ideal bytes: each gate read once, h written once.

        Positions without a sequence count as zeros that are written. The state rows, at most 0.1 %
        at the default shapes, are left out.
        """
        written = shape.elements + shape.behind * shape.channels
        return (self.gates * shape.elements + written) * dtype.itemsize


CELLS = [
    Cell("mingru_scan", mingru_scan, 2, partial(mingru_coefficients, linear_candidate=False)),
    Cell(
        "minlstm_scan",
        minlstm_scan,
        3,
        partial(minlstm_coefficients, linear_candidate=False, normalize_gates=True),
    ),
]


def pre_activations(
    tokens: int, channels: int, gates: int, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Return random pre-activations [tokens, gates * channels].

    They are shifted so that the first channels remember some hundred tokens and the last ones a
    few; the state carried between chunks then affects the error.
    """
    pre = torch.randn(tokens, gates * channels, device=device, dtype=dtype)
    shift = torch.linspace(-4, 1, channels, device=device, dtype=dtype)
    written = pre.view(tokens, gates, channels)[:, gates - 2]  # minGRU's k, minLSTM's i
    written += shift
    return pre


def fused_calls(
    cell: Cell, shape: ScanShape, dtype: torch.dtype, device: torch.device, sets: int
) -> list[partial[Tensor]]:
    """Return calls of a serving scan on `sets` different inputs and states."""
    sequences = len(shape.lengths)
    cu_seqlens = shape.cu_seqlens(device)
    slots = torch.randperm(sequences, device=device).int()
    calls = []
    for _ in range(sets):
        rows = shape.tokens + shape.behind
        pre = pre_activations(rows, shape.channels, cell.gates, dtype, device)
        state = torch.zeros(sequences, shape.channels, device=device)
        calls.append(partial(cell.scan, pre, cu_seqlens, state, slots))
    return calls


def fused_error(cell: Cell, call: partial[Tensor], shape: ScanShape) -> float:
    """Return the error of h and of the final states, after one call from zero states."""
    pre, cu_seqlens, state, slots = call.args
    sample = channel_sample(shape.channels, pre.device)
    state = torch.zeros_like(state)
    found = cell.scan(pre, cu_seqlens, state, slots)[: shape.tokens, sample]
    columns = torch.cat([sample + gate * shape.channels for gate in range(cell.gates)])
    a, b = cell.coefficients(pre[: shape.tokens, columns].double())
    exact = exact_scan(unpack(a, shape), unpack(b, shape))
    last = torch.tensor(shape.lengths, device=pre.device) - 1
    rows = torch.arange(len(shape.lengths), device=pre.device)
    inside = unpack(torch.ones_like(b), shape)
    return max(
        relative_error(unpack(found, shape), exact * inside),
        relative_error(state[slots.long()][:, None, sample], exact[rows, last][:, None]),
    )


def measure_fused(
    shapes: tuple[ScanShape, ...], dtypes: list[torch.dtype], limits: Limits
) -> list[Row]:
    """Return one row per shape, type and cell, beside an element-wise kernel of as many bytes."""
    rows = []
    for dtype in dtypes:
        for shape in shapes:
            for cell in CELLS:
                traffic = cell.traffic(shape, dtype)
                bar = Bar("element-wise", 0.92 if traffic >= 250e6 else 0.80)
                rows.append(
                    Row("fused", cell.name, shape.label, dtype_name(dtype), traffic, bar=bar)
                )
                with reported(rows[-1], limits.device):
                    _fill(rows[-1], cell, shape, dtype, limits)
    return rows


def _fill(row: Row, cell: Cell, shape: ScanShape, dtype: torch.dtype, limits: Limits) -> None:
    row.ceiling = limits.ceiling
    row.elementwise = limits.elementwise(cell.gates, shape.elements, dtype)
    if row.elementwise is None:
        row.note = f"no memory for {ELEMENTWISE[cell.gates]}"
    sets = rotation(row.bytes, limits.device)
    calls = fused_calls(cell, shape, dtype, limits.device, sets)
    row.error = fused_error(cell, calls[0], shape)
    row.timing = graph_seconds_per_call(calls, limits.device)
