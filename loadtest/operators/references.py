"""linear_scan beside the textbook's scans: time, largest error, and what each scan does.

Inputs are as in the other cases. The first shape and type are also measured with inputs that some
scans cannot take, or take badly:

- signed: a and b of either sign.
- small a: of 1e-6 to 1e-3, so that sums of their logarithms grow beyond what a float resolves.
- zeros in a: one token in 32 forgets all before it, as at the edges of packed texts.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from engine.device import available_memory
from engine.ops import linear_scan
from loadtest.operators.exact import channel_sample, exact_scan, largest_error
from loadtest.operators.limits import Limits
from loadtest.operators.linear import random_pair
from loadtest.operators.rows import Row, dtype_name, reported
from loadtest.operators.shapes import ScanShape
from loadtest.peers.scans import REFERENCES, Peer, available
from loadtest.timing import graph_seconds_per_call, rotation

Inputs = Callable[[ScanShape, torch.dtype, torch.device], tuple[Tensor, Tensor]]

OURS = Peer("minserve linear_scan", lambda: linear_scan, cuda_only=False)
#: Seconds for the runs of one row; torch's scans are slow, and there are many rows.
BUDGET = 0.2
SIGNED = "signed"


def _signed(shape: ScanShape, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    a, b = random_pair(shape, dtype, device)
    return a.copysign_(torch.empty_like(a).uniform_(-1, 1)), b.normal_()


def _small(shape: ScanShape, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    a, b = random_pair(shape, dtype, device)
    return a.uniform_(1e-6, 1e-3), b


def _zeros(shape: ScanShape, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    a, b = random_pair(shape, dtype, device)
    a[:, 31::32] = 0
    return a, b


HARD: dict[str, Inputs] = {SIGNED: _signed, "small a": _small, "zeros in a": _zeros}


def measure_references(
    shapes: tuple[ScanShape, ...], dtypes: list[torch.dtype], limits: Limits
) -> list[Row]:
    """Return one row per type, shape, kind of inputs and scan, ours first; without packed shapes.

    The traffic of a row is that of a scan which reads a and b once and writes h once.
    """
    uniform = [shape for shape in shapes if not shape.packed]
    kinds: dict[str, Inputs] = {"": random_pair, **HARD}
    rows = []
    for dtype in dtypes:
        for shape in uniform:
            for kind, inputs in kinds.items():
                if kind and (dtype is not dtypes[0] or shape is not uniform[0]):
                    continue
                for peer in [OURS, *available(limits.device, REFERENCES)]:
                    rows.append(_row(peer, kind, shape, dtype))
                    with reported(rows[-1], limits.device):
                        _fill(rows[-1], peer, inputs, shape, dtype, limits)
    return rows


def _row(peer: Peer, kind: str, shape: ScanShape, dtype: torch.dtype) -> Row:
    traffic = 3 * shape.elements * dtype.itemsize
    row = Row("scans", peer.name, shape.label, dtype_name(dtype), traffic, peer.layout, inputs=kind)
    if peer.work is not None:
        row.tokens = shape.uniform[1]
        row.work = peer.work(row.tokens)
    return row


def _fill(
    row: Row, peer: Peer, inputs: Inputs, shape: ScanShape, dtype: torch.dtype, limits: Limits
) -> None:
    device = limits.device
    row.ceiling = limits.ceiling
    refusal = peer.refuses(shape.uniform)
    if refusal is None and peer.positive and row.inputs == SIGNED:
        refusal = "skipped: positive numbers only"
    if refusal is None and available_memory(device) < 2 * row.bytes:
        refusal = f"skipped: needs {2 * row.bytes / 1e9:.0f} GB of free memory"
    if refusal is not None:
        row.note = refusal
        return
    try:
        scan = peer.make()
    except ImportError as missing:
        row.note = f"not installed: {missing}"[:80]
        return
    row.elementwise = limits.elementwise(2, shape.elements, dtype)
    sample = channel_sample(shape.channels, device)
    a, b = inputs(shape, dtype, device)
    exact = exact_scan(a[..., sample].double(), b[..., sample].double())
    given = peer.prepare(a, b)
    del a, b
    calls = [partial(scan, *given)]
    for _ in range(rotation(row.bytes, device) - 1):  # the same numbers elsewhere: drawing is slow
        calls.append(partial(scan, *(x.clone() for x in given)))
    row.largest_error = largest_error(peer.finish(calls[0]())[..., sample], exact)
    if not math.isfinite(row.largest_error):
        row.note = "the result is not finite"
        return
    row.timing = graph_seconds_per_call(calls, device, budget=BUDGET)
