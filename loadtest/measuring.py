"""What every measurement of whole layers shares: precision, timing, peak memory, rows that fail.

A call here lasts milliseconds and reads more than a GPU's L2 cache holds, so inputs need no
rotation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch

from loadtest.report import median

Figures = dict[str, Any]  # one row: what was measured, or "failed" and the reason


@dataclass(frozen=True)
class Precision:
    """Type of weights and activations; whether float32 matrix products may round to TF32."""

    dtype: torch.dtype
    tf32: bool = False


PRECISIONS = {
    "float32": Precision(torch.float32),
    "tf32": Precision(torch.float32, tf32=True),
    "bfloat16": Precision(torch.bfloat16),
    "float16": Precision(torch.float16),
}


@contextmanager
def in_force(precision: Precision) -> Iterator[None]:
    """Sets TF32 alike for cuBLAS and cuDNN, whose defaults differ, and puts back what was set."""
    matmul, cudnn = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision("high" if precision.tf32 else "highest")
    torch.backends.cudnn.allow_tf32 = precision.tf32
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(matmul)
        torch.backends.cudnn.allow_tf32 = cudnn


def seconds_of(call: Callable[[], object], device: torch.device, repeat: int = 7) -> float:
    """Median seconds of one call after three more; the GPU's events there, else the host clock."""
    for _ in range(3):
        call()
    if device.type != "cuda":
        samples = []
        for _ in range(repeat):
            start = perf_counter()
            call()
            samples.append(perf_counter() - start)
        return median(samples)
    marks = []
    for _ in range(repeat):
        begin = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        begin.record()
        call()
        end.record()
        marks.append((begin, end))
    torch.cuda.synchronize(device)
    return median([begin.elapsed_time(end) / 1000 for begin, end in marks])


def peak_bytes(call: Callable[[], object], device: torch.device) -> int | None:
    """The most device memory a call holds above what is allocated before it; None on the CPU."""
    if device.type != "cuda":
        return None
    torch.cuda.synchronize(device)
    base = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    call()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - base


def reported(measure: Callable[[], Figures], device: torch.device) -> Figures:
    """What `measure` returns, or {"failed": reason}: no row, out of memory or not, ends a run."""
    try:
        found = measure()
    except Exception as failure:
        first_line = (str(failure).splitlines() or [""])[0]
        found = {"failed": f"{type(failure).__name__}: {first_line}"[:100]}
    # Here the failure and the tensors in its frames are gone, so the next row gets all memory.
    if device.type == "cuda":
        try:
            torch.cuda.empty_cache()
        except RuntimeError as failure:  # a device in error fails each later row with its reason
            found.setdefault("failed", str(failure).splitlines()[0][:100])
    return found


def copy_rate(size: int, device: torch.device) -> float:
    """Bytes per second of a copy of `size` bytes, reads and writes both counted."""
    source = torch.randn(size // 4, device=device)
    target = torch.full_like(source, float("nan"))
    seconds = seconds_of(lambda: target.copy_(source), device)
    if not torch.equal(source, target):
        raise RuntimeError("the copy differs from its source")
    return 2 * size / seconds
