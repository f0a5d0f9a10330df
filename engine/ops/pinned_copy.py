"""copy_words_: words between a device's memory and the host's, by a kernel that reaches there.

A copy by the copy engine between two kernels keeps the multiprocessors waiting before and after it,
up to 13 us longer than a kernel that reads or writes pinned memory itself. (Measured with a few
thousand words on an H100; csrc/sampling/README.md.)
"""

import torch
from torch import Tensor

from engine.ops import library  # noqa: F401  (registers the operators)


def copy_words_(to: Tensor, source: Tensor, first_zero: int = 0, zeros: int = 0) -> None:
    """to = source; then source[first_zero : first_zero + zeros] = 0.

    Args:
        to: [count], of source's dtype, contiguous; **changed in place**.
        source: [count], int32 or int64, contiguous; **changed in place** where there are `zeros`.
        first_zero, zeros: within the source.

    Both are on the CPU, or on one device, or one of them is pinned memory of the host: whoever owns
    that keeps it until the device has done what it was given so far, for torch's allocator, unlike
    with `copy_`, does not know of this use. They share no memory.

    Raises:
        RuntimeError: shapes, dtypes or devices do not fit, or memory of the host is not pinned.
    """
    torch.ops.minserve.copy_words_(to, source, first_zero, zeros)


def reference(source: Tensor, first_zero: int = 0, zeros: int = 0) -> tuple[Tensor, Tensor]:
    """copy_words_ in plain torch and functional: (to, the new source)."""
    left = source.clone()
    left[first_zero : first_zero + zeros] = 0
    return source.clone(), left


def _fake(to: Tensor, source: Tensor, first_zero: int = 0, zeros: int = 0) -> None:
    return None


torch.library.register_fake("minserve::copy_words_", _fake)
