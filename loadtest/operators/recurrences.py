"""The loop over types and shapes of a recurrence with a scan and a step."""

from __future__ import annotations

from collections.abc import Callable

import torch

from loadtest.operators.limits import Limits
from loadtest.operators.rows import Row, dtype_name, reported
from loadtest.operators.shapes import ScanShape

# tokens, sequences, channels, bytes of a number -> ideal bytes of a call
Traffic = Callable[[int, int, int, int], int]
FillScan = Callable[[Row, ScanShape, torch.dtype, Limits], None]
FillStep = Callable[[Row, tuple[int, int], torch.dtype, Limits], None]


def measure_recurrence(
    name: str,
    scans: tuple[ScanShape, ...],
    steps: tuple[tuple[int, int], ...],
    dtypes: list[torch.dtype],
    limits: Limits,
    *,
    traffic: Traffic,
    fill_scan: FillScan,
    fill_step: FillStep,
) -> list[Row]:
    """Return one row per type and shape, scans before steps; `steps`: batch, channels."""
    rows = []
    for dtype in dtypes:
        for shape in scans:
            size = traffic(shape.tokens, len(shape.lengths), shape.channels, dtype.itemsize)
            rows.append(Row(name, f"{name}_scan", shape.label, dtype_name(dtype), size))
            with reported(rows[-1], limits.device):
                fill_scan(rows[-1], shape, dtype, limits)
        for batch, width in steps:
            size = traffic(batch, batch, width, dtype.itemsize)
            rows.append(Row(name, f"{name}_step", f"{batch}x{width}", dtype_name(dtype), size))
            with reported(rows[-1], limits.device):
                fill_step(rows[-1], (batch, width), dtype, limits)
    return rows
