"""Other ways to compute h_t = a_t h_{t-1} + b_t, for [batch, time, channels] tensors on one device.

- `torch.add`: no recurrence at all, only the same traffic; the practical ceiling.
- Heinsen's log-space scan (arXiv 2311.06281), as minGRU-pytorch computes it: positive a and b only.
- torch's `associative_scan`, where this torch has it (CUDA).
- flash-linear-attention's `chunk_hgrn`, where the package is installed.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Scan = Callable[[Tensor, Tensor], Tensor]


def add(a: Tensor, b: Tensor) -> Tensor:
    return torch.add(a, b)


def heinsen(a: Tensor, b: Tensor) -> Tensor:
    a_star = a.log().cumsum(dim=1)
    return (a_star + (b.log() - a_star).logcumsumexp(dim=1)).exp()


def _associative_scan() -> Scan | None:
    try:
        from torch._higher_order_ops.associative_scan import associative_scan
    except ImportError:
        return None

    def combine(left: tuple[Tensor, Tensor], right: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return left[0] * right[0], right[0] * left[1] + right[1]

    @torch.compile
    def scan(a: Tensor, b: Tensor) -> Tensor:
        result: Tensor = associative_scan(combine, (a, b), dim=1, combine_mode="pointwise")[1]
        return result

    return scan


def _chunk_hgrn() -> Scan | None:
    try:
        from fla.ops.hgrn import chunk_hgrn
    except ImportError:
        return None

    def scan(a: Tensor, b: Tensor) -> Tensor:
        result: Tensor = chunk_hgrn(b, a.log())[0]
        return result

    return scan


def available(device: torch.device) -> dict[str, Scan]:
    """Every peer that can run on `device` with what is installed."""
    found: dict[str, Scan] = {"torch.add": add, "Heinsen": heinsen}
    if device.type == "cuda":
        optional = {"associative_scan": _associative_scan(), "chunk_hgrn": _chunk_hgrn()}
        found.update({name: scan for name, scan in optional.items() if scan is not None})
    return found
