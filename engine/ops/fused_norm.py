"""rms_norm, normed_gelu_ and normed_step_: the operations between matrix products, on CUDA.

RMSNorm(x) W^T is x (norm_weight * W)^T divided by the root mean square of each row of x. So the
library's product can read the residual stream x itself, with the norm's weight folded into the
matrix. The kernel that reads the product next divides it, adds the bias and then does its own work.
For the sum of squares it must read x once more, which is still in the cache.

`ahead` is the bias of the next product that the library will add to x without a bias; it is added
to x in advance.

rms_norm is the norm itself (Zhang and Sennrich, arXiv 1910.07467), for cases where no product
follows. Unlike torch's, it can start before the previous kernel has ended.
"""

import torch
from torch import Tensor
from torch.nn import functional

from engine.ops import scan


def rms_norm(x: Tensor, eps: float, weight: Tensor) -> Tensor:
    """Return x / sqrt(mean(x^2) + eps) * weight, row by row, in fp32 and then rounded once.

    Args:
        x: [rows, width], bfloat16.
        eps: added to the mean of the squares.
        weight: [width], bfloat16.

    Both are contiguous, aligned to 16 bytes and have a width that is a multiple of 8.

    Returns:
        [rows, width], bfloat16.

    Raises:
        RuntimeError: shapes, dtypes or devices do not fit; NotImplementedError on the CPU.
    """
    normed: Tensor = torch.ops.minserve.rms_norm(x, eps, weight)
    return normed


def normed_gelu_(
    x: Tensor, eps: float, y: Tensor, bias: Tensor | None = None, ahead: Tensor | None = None
) -> None:
    """Compute y = GELU(y / norm(x) + bias), exact, in place; then x += ahead.

    Args:
        x: the residual stream [rows, width], bfloat16; **changed in place** if `ahead` is given.
        eps: the norm's epsilon.
        y: W x, [rows, columns], bfloat16; **changed in place**.
        bias: [columns].
        ahead: [width].

    All are contiguous, aligned to 16 bytes and have row lengths that are multiples of 8.

    Raises:
        RuntimeError: shapes, dtypes or devices do not fit; NotImplementedError on the CPU.
    """
    torch.ops.minserve.normed_gelu_(x, eps, y, bias, ahead)


def normed_step_(
    x: Tensor,
    eps: float,
    y: Tensor,
    bias: Tensor | None,
    ahead: Tensor | None,
    state: Tensor,
    slots: Tensor,
    cell: str,
    linear_candidate: bool = False,
    normalize_gates: bool = True,
) -> Tensor:
    """Compute one step of a cell with the pre-activations y / norm(x) + bias; then x += ahead.

    Args:
        x, eps, bias, ahead: as for normed_gelu_.
        y: W x, [rows, columns], bfloat16; columns are a cell's pre-activations of all channels.
        state: float32 [num_slots, channels], rows aligned to 16 bytes; **changed in place**.
        slots: int32 [rows]; negative: a padding row, which is skipped; its h is zero. No row may
            occur twice.
        cell: "mingru" or "minlstm".
        linear_candidate: g(x) = x.
        normalize_gates: for minLSTM: f' + i' = 1.

    Returns:
        h [rows, channels], bfloat16.

    Raises:
        RuntimeError: shapes, dtypes or devices do not fit; NotImplementedError on the CPU.
    """
    h: Tensor = torch.ops.minserve.normed_step_(
        x, eps, y, bias, ahead, state, slots, cell, linear_candidate, normalize_gates
    )
    return h


def _divided(x: Tensor, eps: float, y: Tensor, bias: Tensor | None) -> Tensor:
    scale = (x.double().square().mean(1, keepdim=True) + eps).rsqrt()
    return y.double() * scale + (0 if bias is None else bias.double())


def rms_norm_reference(x: Tensor, eps: float, weight: Tensor) -> Tensor:
    """Reference of rms_norm in float64."""
    return _divided(x, eps, x, None) * weight.double()


def gelu_reference(
    x: Tensor, eps: float, y: Tensor, bias: Tensor | None = None, ahead: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Reference of normed_gelu_ in float64, without side effects; returns (new y, new x)."""
    pre = _divided(x, eps, y, bias)
    return functional.gelu(pre), x.double() + (0 if ahead is None else ahead.double())


def step_reference(
    x: Tensor,
    eps: float,
    y: Tensor,
    bias: Tensor | None,
    state: Tensor,
    slots: Tensor,
    cell: str,
    linear_candidate: bool = False,
    normalize_gates: bool = True,
) -> tuple[Tensor, Tensor]:
    """Reference of normed_step_ in float64, without side effects; returns (h, the new state)."""
    pre = _divided(x, eps, y, bias)
    flags = (linear_candidate, normalize_gates)[: scan.CELLS[cell].flags]
    return scan.step_reference(cell, pre, state, slots, *flags)


def _fake_norm(x: Tensor, eps: float, weight: Tensor) -> Tensor:
    return torch.empty_like(x)


def _fake_gelu(
    x: Tensor, eps: float, y: Tensor, bias: Tensor | None = None, ahead: Tensor | None = None
) -> None:
    return None


def _fake_step(
    x: Tensor,
    eps: float,
    y: Tensor,
    bias: Tensor | None,
    ahead: Tensor | None,
    state: Tensor,
    slots: Tensor,
    cell: str,
    linear_candidate: bool = False,
    normalize_gates: bool = True,
) -> Tensor:
    return x.new_empty((x.shape[0], state.shape[1]))


torch.library.register_fake("minserve::rms_norm", _fake_norm)
torch.library.register_fake("minserve::normed_gelu_", _fake_gelu)
torch.library.register_fake("minserve::normed_step_", _fake_step)
