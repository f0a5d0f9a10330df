"""linear_scan beside other scans at the same shapes, each with its error."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from engine.ops import linear_scan
from loadtest.operators.exact import channel_sample, exact_scan, relative_error
from loadtest.operators.limits import Limits
from loadtest.operators.linear import random_pair
from loadtest.operators.rows import Row, dtype_name, reported
from loadtest.operators.shapes import ScanShape
from loadtest.peers.scans import Peer, available
from loadtest.timing import graph_seconds_per_call, rotation

OURS = Peer("minserve linear_scan", lambda: linear_scan)


def measure_peers(
    shapes: tuple[ScanShape, ...], dtypes: list[torch.dtype], limits: Limits
) -> list[Row]:
    """Return one row per shape, type and scan, ours first.

    Packed shapes are left out, because the other scans take uniform ones only.
    """
    rows = []
    for dtype in dtypes:
        for shape in shapes:
            for peer in [OURS, *available(limits.device)] if not shape.packed else []:
                traffic = 3 * shape.elements * dtype.itemsize
                rows.append(Row("peers", peer.name, shape.label, dtype_name(dtype), traffic))
                with reported(rows[-1], limits.device):
                    _fill(rows[-1], peer, shape, dtype, limits)
    return rows


def _fill(row: Row, peer: Peer, shape: ScanShape, dtype: torch.dtype, limits: Limits) -> None:
    device = limits.device
    row.ceiling = limits.ceiling
    refusal = peer.refuses(shape.uniform)
    if refusal is not None:
        row.note = refusal
        return
    try:
        scan = peer.make()
    except ImportError as missing:
        row.note = f"not installed: {missing}"[:80]
        return
    given = [random_pair(shape, dtype, device) for _ in range(rotation(row.bytes, device))]
    a, b = given[0]
    sample = channel_sample(shape.channels, device)
    exact = exact_scan(a[..., sample].double(), b[..., sample].double())
    inputs: list[tuple[Tensor, Tensor]] = []
    while given:  # one pair at a time: both forms of all pairs may not fit
        inputs.append(peer.prepare(*given.pop(0)))
    if peer.recurrence:
        row.error = relative_error(peer.finish(scan(*inputs[0]))[..., sample], exact)
    row.timing = graph_seconds_per_call([partial(scan, *pair) for pair in inputs], device)
