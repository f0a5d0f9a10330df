"""What measurements of whole layers share: precision, peak memory, rows that may fail."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

Figures = dict[str, Any]  # one row: what was measured, or "failed" and the reason


@dataclass(frozen=True)
class Precision:
    """Type of weights and activations, and whether float32 products may round to TF32."""

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
    """Set TF32 alike for cuBLAS and cuDNN, whose defaults differ, and restore it at the end."""
    matmul, cudnn = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision("high" if precision.tf32 else "highest")
    torch.backends.cudnn.allow_tf32 = precision.tf32
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(matmul)
        torch.backends.cudnn.allow_tf32 = cudnn


def peak_bytes(call: Callable[[], object], device: torch.device) -> int | None:
    """Return the most device memory that a call allocates at a time; None on the CPU."""
    if device.type != "cuda":
        return None
    torch.cuda.synchronize(device)
    base = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    call()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - base


def reported(measure: Callable[[], Figures], device: torch.device) -> Figures:
    """Return what `measure` returns, or {"failed": reason}, so that no row ends a run."""
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
