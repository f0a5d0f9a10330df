"""Mamba's recurrence, selective_scan and selective_step with 16 states of each channel.

Two limits stand beside each row. One is a copy of as many bytes: inputs and outputs once, states
once in each direction, weights once. The other is the time that the special-function units of an
NVIDIA GPU need at 16 results per clock and multiprocessor: for each token and channel an
exponential of each state, one of softplus, and an exponential and a reciprocal of silu. The same
function composed of torch's operators and `linear_scan` stands beside, as a multiple of our time.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from engine.ops import selective_scan, selective_step
from engine.ops.selective import composed_scan, composed_step
from loadtest.operators.exact import channel_sample, exact_scan, relative_error, unpack
from loadtest.operators.limits import Limits
from loadtest.operators.recurrences import measure_recurrence
from loadtest.operators.rows import Row
from loadtest.operators.shapes import ScanShape
from loadtest.timing import graph_seconds_per_call, rotation, seconds_per_call

STATES = 16
LAUNCHES = 50  # of a step, in one graph
_SPECIAL = STATES + 3  # results of the special-function units, of a token and channel
_PER_CLOCK = 16  # such results of a multiprocessor

Call = partial[Tensor]


def inputs(tokens: int, channels: int, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """Return x, dt, A, B, C, D, dt_bias and z of a model's usual sizes.

    dt, B, C and z are columns of wider rows, as the products of a layer leave them.
    """

    def numbers(*shape: int) -> Tensor:
        return torch.randn(shape, device=device, dtype=dtype)

    chosen = numbers(tokens, 2 * STATES + 64)
    return [
        numbers(tokens, channels),
        numbers(tokens, channels),
        -torch.arange(1.0, STATES + 1, device=device).repeat(channels, 1),
        chosen[:, 64 : 64 + STATES],
        chosen[:, 64 + STATES :],
        numbers(channels),
        numbers(channels) - 4,  # time steps of some hundredths: states remember
        numbers(tokens, 2 * channels)[:, channels:],
    ]


def traffic(tokens: int, sequences: int, channels: int, size: int) -> int:
    """Return the ideal bytes of a call; `size`: bytes of a number of x."""
    streams = tokens * (4 * channels + 2 * STATES) * size  # x, dt, z, y; B, C
    states = sequences * channels * STATES * 4 * 2
    weights = channels * (STATES * 4 + 2 * size)
    return streams + states + weights


def special_seconds(tokens: int, channels: int, device: torch.device) -> float | None:
    """Return the seconds of the special-function units at the GPU's highest clock."""
    if device.type != "cuda":
        return None
    gpu = torch.cuda.get_device_properties(device)
    per_second = _PER_CLOCK * gpu.multi_processor_count * gpu.clock_rate * 1e3  # of kHz
    return float(tokens * channels * _SPECIAL / per_second)


def measure_selective(
    scans: tuple[ScanShape, ...],
    steps: tuple[tuple[int, int], ...],
    dtypes: list[torch.dtype],
    limits: Limits,
) -> list[Row]:
    """Return one row per type and shape, scans before steps."""
    return measure_recurrence(
        *("selective", scans, steps, dtypes, limits),
        traffic=traffic,
        fill_scan=_fill_scan,
        fill_step=_fill_step,
    )


def _fill_scan(row: Row, shape: ScanShape, dtype: torch.dtype, limits: Limits) -> None:
    device, tokens = limits.device, shape.tokens + shape.behind
    row.ceiling = limits.ceiling
    row.special_seconds = special_seconds(shape.tokens, shape.channels, device)
    cu_seqlens = shape.cu_seqlens(device)
    slots = torch.arange(len(shape.lengths), device=device, dtype=torch.int32)
    calls, composed = [], []
    for _ in range(rotation(row.bytes, device)):
        state = torch.zeros(len(slots), shape.channels, STATES, device=device)
        given = [*inputs(tokens, shape.channels, dtype, device), cu_seqlens, state, slots]
        calls.append(partial(selective_scan, *given))
        composed.append(partial(composed_scan, *given))
    row.error = _error(calls[0], shape)
    row.timing = graph_seconds_per_call(calls, device)
    seconds = seconds_per_call(composed, device, repeat=3, warm=1)
    row.times["composed"] = seconds / row.timing.seconds


def _error(call: Call, shape: ScanShape) -> float:
    """Return the error of y over all tokens of some channels, from states of zeros."""
    x, dt, a, b, c, skip, bias, z, cu_seqlens, state, slots = call.args
    sample = channel_sample(shape.channels, x.device)
    found = selective_scan(
        *(x, dt, a, b, c, skip, bias, z, cu_seqlens, torch.zeros_like(state), slots)
    )[: shape.tokens, sample]
    x, dt, z = (one[: shape.tokens, sample].double() for one in (x, dt, z))
    b, c = b[: shape.tokens, None].double(), c[: shape.tokens, None].double()
    step = functional.softplus(dt + bias[sample].double())[..., None]
    keep, write = (step * a[sample].double()).exp(), step * x[..., None] * b
    h = exact_scan(unpack(keep.flatten(1), shape), unpack(write.flatten(1), shape))
    weighted = h.unflatten(2, (-1, STATES)) * unpack(c.expand_as(keep).flatten(1), shape).unflatten(
        2, (-1, STATES)
    )
    skipped, gate = unpack(skip[sample].double() * x, shape), unpack(functional.silu(z), shape)
    return relative_error(unpack(found, shape), (weighted.sum(3) + skipped) * gate)


def _fill_step(row: Row, shape: tuple[int, int], dtype: torch.dtype, limits: Limits) -> None:
    device, (batch, channels) = limits.device, shape
    row.copy_seconds = limits.copy_seconds(row.bytes, LAUNCHES)
    row.special_seconds = special_seconds(batch, channels, device)
    calls, composed = [], []
    for _ in range(rotation(row.bytes, device, most=LAUNCHES)):
        state = torch.randn(batch, channels, STATES, device=device)
        slots = torch.randperm(batch, device=device).int()
        given = [*inputs(batch, channels, dtype, device), state, slots]
        calls.append(partial(selective_step, *given))
        composed.append(partial(composed_step, *given))
    row.error = _step_error(calls[0])
    row.timing = graph_seconds_per_call(calls, device, launches=LAUNCHES)
    seconds = graph_seconds_per_call(composed, device, launches=LAUNCHES, repeat=3).seconds
    row.times["composed"] = seconds / row.timing.seconds


def _step_error(call: Call) -> float:
    x, dt, a, b, c, skip, bias, z, state, slots = call.args
    wide = [one.double() for one in (x, dt, a, b, c, skip, bias, z, state)]
    exact = composed_step(*[*wide, slots])
    found = selective_step(x, dt, a, b, c, skip, bias, z, state.clone(), slots)
    return float((found.double() - exact).norm() / exact.norm())
