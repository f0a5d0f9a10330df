"""copy_words_: copies words between device and host memory by a kernel instead of the copy engine.

A copy by the copy engine between two kernels keeps the multiprocessors waiting before and after it,
up to 13 us longer than a kernel that accesses pinned memory directly. (Measured with a few thousand
words on an H100; csrc/sampling/README.md, "pinned_copy".)
"""

import torch
from torch import Tensor

from engine.ops import library  # noqa: F401  (registers the operators)


def copy_words_(to: Tensor, source: Tensor, first_zero: int = 0, zeros: int = 0) -> None:
    """Copy source to `to`; then set source[first_zero : first_zero + zeros] to 0.

    Args:
        to: [count], of source's dtype, contiguous; **changed in place**.
        source: [count], int32 or int64, contiguous; **changed in place** if `zeros` is not 0.
        first_zero, zeros: a range within the source.

    Both are on the CPU, or on one device, or one of them is pinned host memory. The owner of pinned
    memory must keep it until the device has finished the work it was given so far, because torch's
    allocator, unlike with `copy_`, does not know of this use. The two must not share memory.

    Raises:
        RuntimeError: shapes, dtypes or devices do not fit, or host memory is not pinned.
    """
    torch.ops.minserve.copy_words_(to, source, first_zero, zeros)


def reference(source: Tensor, first_zero: int = 0, zeros: int = 0) -> tuple[Tensor, Tensor]:
    """Reference of copy_words_ in plain torch, without side effects: (to, the new source)."""
    left = source.clone()
    left[first_zero : first_zero + zeros] = 0
    return source.clone(), left


def _fake(to: Tensor, source: Tensor, first_zero: int = 0, zeros: int = 0) -> None:
    return None


torch.library.register_fake("minserve::copy_words_", _fake)
