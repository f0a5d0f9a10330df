"""Mamba-2's recurrence, ssd_scan and ssd_step with 128 states of each channel.

A row's limit is a copy of as many bytes: inputs and outputs once, states once in each direction.
The same function composed of torch's matrix products stands beside, as a multiple of our time.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor

from engine.ops import ssd_scan, ssd_step
from engine.ops.ssd import composed_scan, composed_step
from loadtest.operators.exact import relative_error
from loadtest.operators.limits import Limits
from loadtest.operators.recurrences import measure_recurrence
from loadtest.operators.rows import Row
from loadtest.operators.shapes import ScanShape
from loadtest.timing import graph_seconds_per_call, rotation, seconds_per_call

STATES, HEAD_DIM = 128, 64
NO_LIMIT = (0.0, math.inf)  # of time steps
LAUNCHES = 50  # of a step, in one graph

Call = partial[Tensor]


def head_dim(channels: int) -> int:
    """Return the channels of a head: HEAD_DIM, or all where that divides them not."""
    return channels if channels % HEAD_DIM else HEAD_DIM


def inputs(tokens: int, channels: int, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """Return x, dt, A, B, C, D and dt_bias of a model's usual sizes, with one group.

    x, B and C are columns of one convolution's outputs; dt of the in projection's.
    """
    heads = channels // head_dim(channels)
    convolved = torch.randn(tokens, channels + 2 * STATES, device=device, dtype=dtype)
    x, b, c = convolved.split([channels, STATES, STATES], dim=1)
    projected = torch.randn(tokens, heads + 8, device=device, dtype=dtype)
    return [
        x.unflatten(1, (heads, -1)),
        projected[:, 8:],
        -torch.linspace(1.0, 16.0, heads, device=device),
        b.unflatten(1, (1, STATES)),
        c.unflatten(1, (1, STATES)),
        torch.randn(heads, device=device),
        torch.randn(heads, device=device) - 4,  # time steps of some hundredths: states remember
    ]


def traffic(tokens: int, sequences: int, channels: int, size: int) -> int:
    """Return the ideal bytes of a call; `size`: bytes of a number of x."""
    heads = channels // head_dim(channels)
    streams = tokens * (2 * channels + heads + 2 * STATES) * size  # x, y; dt; B, C
    return streams + sequences * channels * STATES * 4 * 2 + heads * 3 * 4


def measure_ssd(
    scans: tuple[ScanShape, ...],
    steps: tuple[tuple[int, int], ...],
    dtypes: list[torch.dtype],
    limits: Limits,
) -> list[Row]:
    """Return one row per type and shape, scans before steps."""
    return measure_recurrence(
        *("ssd", scans, steps, dtypes, limits),
        traffic=traffic,
        fill_scan=_fill_scan,
        fill_step=_fill_step,
    )


def _fill_scan(row: Row, shape: ScanShape, dtype: torch.dtype, limits: Limits) -> None:
    device, tokens = limits.device, shape.tokens + shape.behind
    row.ceiling = limits.ceiling
    cu_seqlens = shape.cu_seqlens(device)
    slots = torch.arange(len(shape.lengths), device=device, dtype=torch.int32)
    calls, composed = [], []
    for _ in range(rotation(row.bytes, device)):
        given = inputs(tokens, shape.channels, dtype, device)
        state = _states(len(slots), given[0])
        arguments: list[Any] = [*given, NO_LIMIT, cu_seqlens, state, slots]
        calls.append(partial(ssd_scan, *arguments))
        composed.append(partial(composed_scan, *arguments))
    row.error = _scan_error(calls[0])
    row.timing = graph_seconds_per_call(calls, device)
    seconds = seconds_per_call(composed, device, repeat=3, warm=1)
    row.times["composed"] = seconds / row.timing.seconds


def _fill_step(row: Row, shape: tuple[int, int], dtype: torch.dtype, limits: Limits) -> None:
    device, (batch, channels) = limits.device, shape
    row.copy_seconds = limits.copy_seconds(row.bytes, LAUNCHES)
    calls, composed = [], []
    for _ in range(rotation(row.bytes, device, most=LAUNCHES)):
        given = inputs(batch, channels, dtype, device)
        state, slots = _states(batch, given[0]), torch.randperm(batch, device=device).int()
        arguments: list[Any] = [*given, NO_LIMIT, state, slots]
        calls.append(partial(ssd_step, *arguments))
        composed.append(partial(composed_step, *arguments))
    row.error = _step_error(calls[0])
    row.timing = graph_seconds_per_call(calls, device, launches=LAUNCHES)
    seconds = seconds_per_call(composed, device, repeat=3, warm=1)
    row.times["composed"] = seconds / row.timing.seconds


def _states(rows: int, x: Tensor) -> Tensor:
    return torch.zeros(rows, *x.shape[1:], STATES, device=x.device)


def _some_heads(given: list[Any], state: Tensor) -> tuple[list[Any], Tensor, list[int]]:
    """Return the inputs and states of the first and the last head in float64, and the heads."""
    x, dt, a, b, c, skip, bias = (one.double() for one in given)
    heads = sorted({0, x.shape[1] - 1})
    part = [x[:, heads], dt[:, heads], a[heads], b, c, skip[heads], bias[heads]]
    return part, state[:, heads].double(), heads


def _scan_error(call: Call) -> float:
    """Return the error of y over all tokens of two heads, from states of zeros."""
    given: list[Any] = list(call.args[:7])
    limit, cu_seqlens, state, slots = call.args[7:]
    part, start, heads = _some_heads(given, torch.zeros_like(state))
    found = ssd_scan(*[*given, limit, cu_seqlens, torch.zeros_like(state), slots])
    exact = composed_scan(*[*part, limit, cu_seqlens, start, slots])
    return relative_error(found[:, heads].flatten(1)[None], exact.flatten(1)[None])


def _step_error(call: Call) -> float:
    given: list[Any] = list(call.args[:7])
    limit, _, slots = call.args[7:]
    state = torch.randn_like(call.args[8])
    part, start, heads = _some_heads(given, state)
    exact = composed_step(*[*part, limit, start, slots])
    found = ssd_step(*[*given, limit, state, slots])[:, heads]
    return float((found.double() - exact).norm() / exact.norm())
