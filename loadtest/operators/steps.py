"""The decode steps beside a copy of the same bytes, both as many launches in one CUDA graph."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from engine.ops import conv_step, mingru_step, minlstm_step
from loadtest.operators.fused import CELLS
from loadtest.operators.limits import Limits
from loadtest.operators.rows import Bar, Row, dtype_name, reported
from loadtest.timing import graph_seconds_per_call, rotation

LAUNCHES = 50
TAPS = 4  # of the convolution
CHECKED_ROWS = 64

StepCall = partial[Tensor]


@dataclass(frozen=True)
class Step:
    """A step operator: ideal bytes, a call on random buffers, and the float64 result of a call."""

    name: str
    traffic: Callable[[int, int, int], int]  # batch, width, bytes per number -> ideal bytes
    call: Callable[[int, int, torch.dtype, torch.device], StepCall]
    exact: Callable[[StepCall], Tensor]  # of the first CHECKED_ROWS rows


def _gated(index: int, operator: Callable[..., Tensor]) -> Step:
    cell = CELLS[index]

    def traffic(batch: int, width: int, size: int) -> int:
        # the gates and h once each; the float32 state read and written; the slots
        return batch * width * ((cell.gates + 1) * size + 8) + 4 * batch

    def call(batch: int, width: int, dtype: torch.dtype, device: torch.device) -> StepCall:
        pre = torch.randn(batch, cell.gates * width, device=device, dtype=dtype)
        state = torch.rand(batch, width, device=device)
        return partial(operator, pre, state, torch.randperm(batch, device=device).int())

    def exact(made: StepCall) -> Tensor:
        pre, state, slots = made.args
        a, b = cell.coefficients(pre[:CHECKED_ROWS].double())
        h: Tensor = a * state[slots[:CHECKED_ROWS].long()].double() + b
        return h

    return Step(operator.__name__, traffic, call, exact)


def _conv() -> Step:
    def traffic(batch: int, width: int, size: int) -> int:
        # x and y; TAPS - 1 float32 inputs read and written; the weights and bias once; the slots
        return batch * width * (2 * size + 8 * (TAPS - 1)) + width * (TAPS + 1) * size + 4 * batch

    def call(batch: int, width: int, dtype: torch.dtype, device: torch.device) -> StepCall:
        x = torch.randn(batch, width, device=device, dtype=dtype)
        weight = torch.randn(width, TAPS, device=device, dtype=dtype)
        bias = torch.randn(width, device=device, dtype=dtype)
        state = torch.randn(batch, TAPS - 1, width, device=device)
        slots = torch.randperm(batch, device=device).int()
        return partial(conv_step, x, weight, bias, state, slots)

    def exact(made: StepCall) -> Tensor:
        x, weight, bias, state, slots = made.args
        seen = state[slots[:CHECKED_ROWS].long()].double()  # [rows, TAPS - 1, width]
        seen = torch.cat([seen, x[:CHECKED_ROWS, None].double()], dim=1)
        summed: Tensor = (seen * weight.double().T).sum(dim=1) + bias.double()
        return summed

    return Step("conv_step", traffic, call, exact)


STEPS = [_gated(0, mingru_step), _gated(1, minlstm_step), _conv()]


def measure_steps(
    shapes: tuple[tuple[int, int], ...], dtypes: list[torch.dtype], limits: Limits
) -> list[Row]:
    """Return one row per operator, type, width and batch.

    There are bars on a GPU only; on the CPU, calls from Python are timed.
    """
    rows = []
    bar = Bar("times copy", 1.5) if limits.device.type == "cuda" else None
    for dtype in dtypes:
        for step in STEPS:
            for batch, width in shapes:
                traffic = step.traffic(batch, width, dtype.itemsize)
                label = f"{batch}x{width}"
                rows.append(Row("steps", step.name, label, dtype_name(dtype), traffic, bar=bar))
                with reported(rows[-1], limits.device):
                    _fill(rows[-1], step, (batch, width), dtype, limits)
    return rows


def _fill(row: Row, step: Step, shape: tuple[int, int], dtype: torch.dtype, limits: Limits) -> None:
    device = limits.device
    row.copy_seconds = limits.copy_seconds(row.bytes, LAUNCHES)
    sets = rotation(row.bytes, device, most=LAUNCHES)
    calls = [step.call(*shape, dtype, device) for _ in range(sets)]
    exact = step.exact(calls[0])
    found = calls[0]()[:CHECKED_ROWS].double()
    row.error = float((found - exact).norm() / exact.norm())
    row.timing = graph_seconds_per_call(calls, device, launches=LAUNCHES)
