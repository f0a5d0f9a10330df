"""linear_scan forward and backward in both layouts, and the backward of the differentiable scans.

Channel-contiguous tensors are [batch, time, channels]; time-contiguous ones are stored as
[batch, channels, time] and passed transposed.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from engine.device import available_memory
from engine.ops import linear_scan, scan
from loadtest.operators.exact import (
    channel_sample,
    exact_scan,
    exact_scan_backward,
    relative_error,
    unpack,
)
from loadtest.operators.fused import CELLS, Cell, pre_activations
from loadtest.operators.limits import ELEMENTWISE, Limits
from loadtest.operators.rows import Bar, Row, dtype_name, reported
from loadtest.operators.shapes import ScanShape
from loadtest.timing import graph_seconds_per_call, rotation

Scan = Callable[[Tensor, Tensor], Tensor]
LAYOUTS = ["channels", "time"]


def random_tensor(
    shape: ScanShape, dtype: torch.dtype, device: torch.device, layout: str = "channels"
) -> Tensor:
    """Return numbers uniform in (0.01, 1) [batch, time, channels], contiguous as `layout` says."""
    batch, time, channels = shape.uniform
    stored = (batch, time, channels) if layout == "channels" else (batch, channels, time)
    values = torch.empty(stored, dtype=dtype, device=device).uniform_(0.01, 1)
    return values if layout == "channels" else values.transpose(1, 2)


def random_pair(
    shape: ScanShape, dtype: torch.dtype, device: torch.device, layout: str = "channels"
) -> tuple[Tensor, Tensor]:
    """Return (a, b) for a scan: b is uniform, a is pushed towards 1 in the first channels.

    Those remember some hundred tokens, and the last channels a few, so that the state carried
    between chunks affects the error. Both are positive, for scans in log space.
    """
    a, b = (random_tensor(shape, dtype, device, layout) for _ in range(2))
    power = torch.linspace(0.02, 1, shape.channels, device=device, dtype=dtype)
    return a.pow_(power), b


def scan_error(scan: Scan, a: Tensor, b: Tensor) -> float:
    """Return the error of `scan(a, b)` [batch, time, channels] from h = 0."""
    sample = channel_sample(a.shape[2], a.device)
    found = scan(a, b)[..., sample]
    return relative_error(found, exact_scan(a[..., sample].double(), b[..., sample].double()))


def measure_linear(
    shapes: tuple[ScanShape, ...],
    time_shapes: tuple[ScanShape, ...],
    dtypes: list[torch.dtype],
    limits: Limits,
) -> list[Row]:
    """Return rows of linear_scan forward: two reads, one write.

    `time_shapes` are measured with time contiguous, in float32 only. Only a GPU has a bar.
    """
    cases = [(s, d, layout) for d in dtypes for s in shapes for layout in LAYOUTS if not s.packed]
    if torch.float32 in dtypes:
        cases += [(shape, torch.float32, "time") for shape in time_shapes]
    rows = []
    for shape, dtype, layout in cases:
        traffic = 3 * shape.elements * dtype.itemsize
        on_gpu = limits.device.type == "cuda"
        bar = Bar("element-wise", 0.95 if traffic >= 600e6 else 0.85) if on_gpu else None
        name = dtype_name(dtype)
        rows.append(Row("linear", "linear_scan", shape.label, name, traffic, layout, bar))
        with reported(rows[-1], limits.device):
            _fill_linear(rows[-1], shape, dtype, limits)
    return rows


def _fill_linear(row: Row, shape: ScanShape, dtype: torch.dtype, limits: Limits) -> None:
    device = limits.device
    row.ceiling = limits.ceiling
    if available_memory(device) < 2 * row.bytes:  # the tensors, and copies where a layout needs one
        row.note = f"skipped: needs {2 * row.bytes / 1e9:.0f} GB of free memory"
        return
    row.elementwise = limits.elementwise(2, shape.elements, dtype)
    if row.elementwise is None:
        row.note = f"no memory for {ELEMENTWISE[2]}"
    pairs = [
        random_pair(shape, dtype, device, row.layout) for _ in range(rotation(row.bytes, device))
    ]
    row.error = scan_error(linear_scan, *pairs[0])
    row.timing = graph_seconds_per_call([partial(linear_scan, *pair) for pair in pairs], device)


def measure_backward(
    shapes: tuple[ScanShape, ...], dtypes: list[torch.dtype], limits: Limits
) -> list[Row]:
    """Return rows of the backward of linear_scan, mingru_scan_train and minlstm_scan_train.

    linear_scan's reads a, h, grad_h and writes grad_a, grad_b; the others read pre, h, grad_h and
    write grad_pre. Only the first has a bar, on a GPU. Shapes with trailing rows are left out,
    because training has none.
    """
    rows: list[Row] = []
    bar = Bar("copy", 0.85) if limits.device.type == "cuda" else None
    for dtype in dtypes:
        name, size = dtype_name(dtype), dtype.itemsize
        for shape in shapes:
            for layout in LAYOUTS if not shape.packed else []:
                traffic = 5 * shape.elements * size
                operator = "linear_scan backward"
                rows.append(Row("backward", operator, shape.label, name, traffic, layout, bar))
                with reported(rows[-1], limits.device):
                    _fill_linear_backward(rows[-1], shape, dtype, limits)
            for cell in CELLS if not shape.behind else []:
                operator = f"{cell.name}_train backward"
                traffic = (2 * cell.gates + 2) * shape.elements * size
                rows.append(Row("backward", operator, shape.label, name, traffic))
                with reported(rows[-1], limits.device):
                    _fill_train_backward(rows[-1], cell, shape, dtype, limits)
    return rows


def _fill_linear_backward(row: Row, shape: ScanShape, dtype: torch.dtype, limits: Limits) -> None:
    device = limits.device
    row.ceiling = limits.ceiling
    backward = torch.ops.minserve.linear_scan_backward
    calls = []
    for _ in range(rotation(row.bytes, device)):
        a, h = random_pair(shape, dtype, device, row.layout)  # h may be anything to the backward
        grad_h = random_tensor(shape, dtype, device, row.layout)
        calls.append(partial(backward, grad_h, a, h, None, False))
    sample = channel_sample(shape.channels, device)
    grad_h, a, h = calls[0].args[:3]
    found = backward(grad_h, a, h, None, False)[:2]
    wanted = exact_scan_backward(*(x[..., sample].double() for x in (a, h, grad_h)))
    row.error = max(
        relative_error(given[..., sample], exact)
        for given, exact in zip(found, wanted, strict=True)
    )
    del found
    row.timing = graph_seconds_per_call(calls, device)


def _fill_train_backward(
    row: Row, cell: Cell, shape: ScanShape, dtype: torch.dtype, limits: Limits
) -> None:
    device = limits.device
    row.ceiling = limits.ceiling
    backward = getattr(torch.ops.minserve, f"{cell.name}_train_backward")
    # linear_candidate, normalize_gates
    flags = (False, True)[: scan.CELLS[cell.name.removesuffix("_scan")].flags]
    cu_seqlens = shape.cu_seqlens(device)
    calls = []
    for _ in range(rotation(row.bytes, device)):
        pre = pre_activations(shape.tokens, shape.channels, cell.gates, dtype, device)
        h, grad_h = torch.rand(2, shape.tokens, shape.channels, device=device, dtype=dtype).unbind()
        calls.append(partial(backward, grad_h, None, pre, h, cu_seqlens, None, *flags))
    row.error = _train_backward_error(cell, calls[0], shape)
    row.timing = graph_seconds_per_call(calls, device)


def _train_backward_error(cell: Cell, call: partial[tuple[Tensor, ...]], shape: ScanShape) -> float:
    """Return the error of grad_pre.

    The reference is the exact gradients of a and b, passed through float64 autograd of the gates.
    """
    grad_h, _, pre, h = call.args[:4]
    sample = channel_sample(shape.channels, pre.device)
    columns = torch.cat([sample + gate * shape.channels for gate in range(cell.gates)])
    found = call()[0][:, columns]
    with torch.enable_grad():
        gates = pre[:, columns].double().requires_grad_()
        a, b = (unpack(x, shape) for x in cell.coefficients(gates))
        pieces = (unpack(x[:, sample].double(), shape) for x in (h, grad_h))
        grads = exact_scan_backward(a.detach(), *pieces)
        (exact,) = torch.autograd.grad((a, b), gates, grads)
    return relative_error(found[None], exact[None])
