"""fetch_: words of a device's memory to the host, by a kernel that writes them there itself.

A copy by the copy engine between two kernels keeps the multiprocessors idle for about 20 us, most
of it before and after the copy; a kernel that writes to pinned memory is over in a few.
"""

import torch
from torch import Tensor

from engine.ops import library  # noqa: F401  (registers the operators)


def fetch_(words: Tensor, host: Tensor, first_zero: int = 0, zeros: int = 0) -> None:
    """host = words; then words[first_zero : first_zero + zeros] = 0.

    Args:
        words: int32 [count], contiguous; **changed in place** where there are `zeros`.
        host: int32 [count] on the CPU, contiguous, pinned where `words` is on a GPU; **changed in
            place**, by the time that the device has done what it was given so far.
        first_zero, zeros: within the words.

    Raises:
        RuntimeError: shapes or dtypes do not fit, or host is not pinned.
    """
    torch.ops.minserve.fetch_(words, host, first_zero, zeros)


def reference(words: Tensor, first_zero: int = 0, zeros: int = 0) -> tuple[Tensor, Tensor]:
    """fetch_ in plain torch and functional: (host, the new words)."""
    left = words.clone()
    left[first_zero : first_zero + zeros] = 0
    return words.clone().cpu(), left


def _fake(words: Tensor, host: Tensor, first_zero: int = 0, zeros: int = 0) -> None:
    return None


torch.library.register_fake("minserve::fetch_", _fake)
