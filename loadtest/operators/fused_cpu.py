"""The serving scans on the CPU, against a copy, their arithmetic alone, and plain PyTorch.

The bar is 80 % of the lower of two rates: what a threaded copy moves, and what the operator reaches
on data that stays in the caches (the arithmetic limit).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from loadtest.operators.fused import CELLS, Cell, fused_calls, fused_error
from loadtest.operators.limits import Limits
from loadtest.operators.rows import Bar, Row, dtype_name, reported
from loadtest.operators.shapes import ScanShape
from loadtest.peers.scans import Coefficients, fused_log_space, fused_loop
from loadtest.timing import graph_seconds_per_call, last_level_cache, rotation, seconds_per_call

# Traffic per thread of the two cases behind the arithmetic limit: both fit in a core's L2 cache.
IN_CACHE = (64 * 2**10, 256 * 2**10)
CACHE_CHANNELS = 256


def measure_fused_cpu(
    shapes: tuple[ScanShape, ...], dtypes: list[torch.dtype], limits: Limits
) -> list[Row]:
    """Return one row per shape, type and cell."""
    rows = []
    for dtype in dtypes:
        in_cache = {cell.name: arithmetic_rate(cell, dtype) for cell in CELLS}
        for shape in shapes:
            for cell in CELLS:
                traffic = cell.traffic(shape, dtype)
                row = Row("fused", cell.name, shape.label, dtype_name(dtype), traffic)
                row.arithmetic = in_cache[cell.name]
                rows.append(row)
                with reported(row, limits.device):
                    _fill(row, cell, shape, dtype, limits)
    return rows


def _fill(row: Row, cell: Cell, shape: ScanShape, dtype: torch.dtype, limits: Limits) -> None:
    device = limits.device
    row.ceiling = limits.copy_rate()  # beside each row: a shared machine's memory is not constant
    row.elementwise = limits.elementwise(cell.gates, shape.elements, dtype)
    if row.bytes >= 3 * last_level_cache():
        row.bar = Bar("copy or arithmetic", 0.80)
    else:
        row.note = "no bar: not out of cache"
    calls = fused_calls(cell, shape, dtype, device, rotation(row.bytes, device))
    row.error = fused_error(cell, calls[0], shape)
    row.timing = graph_seconds_per_call(calls, device)
    if row.arithmetic is not None and row.rate is not None and row.arithmetic < row.rate:
        row.arithmetic = None  # no limit: more was reached
        row.note = "in-cache rate lost in noise"
    if shape.packed:
        return
    pre = calls[0].args[0].view(*shape.uniform[:2], -1)
    peers: dict[str, Callable[[Tensor, Coefficients], Tensor]] = {
        "log-space": fused_log_space,
        "loop": fused_loop,
    }
    for name, peer in peers.items():
        seconds = _seconds_within(partial(peer, pre, cell.coefficients), budget=2.0)
        row.times[name] = seconds / row.timing.seconds


def _seconds_within(call: Callable[[], object], budget: float) -> float:
    """Return the median seconds of as many calls as the budget allows.

    The first call does not count, unless the budget allows only one.
    """
    start = time.perf_counter()
    call()
    first = time.perf_counter() - start
    if first > budget / 2:
        return first
    repeat = max(1, min(20, int(budget / first)))
    return seconds_per_call([call], torch.device("cpu"), repeat=repeat, warm=0)


def arithmetic_rate(cell: Cell, dtype: torch.dtype) -> float | None:
    """Return the ideal bytes per second on data that stays in each core's L2 cache.

    It is computed from the difference between two sizes, so that the fixed cost of a call does not
    count. The fastest of many runs counts, since noise must not lower a limit. None if the
    difference is lost in noise.
    """
    threads = torch.get_num_threads()
    found = []
    for per_thread in IN_CACHE:
        per_step = (cell.gates + 1) * CACHE_CHANNELS * dtype.itemsize
        lengths = (max(1, per_thread // per_step),) * threads
        shape = ScanShape("", lengths, CACHE_CHANNELS, packed=False)
        (call,) = fused_calls(cell, shape, dtype, torch.device("cpu"), sets=1)
        found.append((cell.traffic(shape, dtype), _fastest(call)))
    (less, short), (more, long) = found
    return (more - less) / (long - short) if long > short else None


def _fastest(call: Callable[[], object]) -> float:
    """Return the seconds of the fastest of 1,000 calls, or of as many as fit in a second."""
    best = float("inf")
    end = time.perf_counter() + 1
    for _ in range(1000):
        start = time.perf_counter()
        call()
        now = time.perf_counter()
        best = min(best, now - start)
        if now > end:
            break
    return best
