"""linear_scan: h_t = a_t h_{t-1} + b_t over [batch, time, channels], differentiable.

The recurrence under minGRU and minLSTM ("Were RNNs All We Needed?", arXiv 2410.01201, section 3).
It is computed in linear space with float32 accumulation (float64 for float64). The log-space form
of Heinsen (arXiv 2311.06281), used by that paper, is kept below as a reference only: it loses
accuracy with length. On the CPU subnormal numbers count as zeros, as in all scans there.

Two layouts are computed in place, without copies: channels contiguous, and time contiguous (strides
(channels * time, 1, time), the transpose of a contiguous [batch, channels, time]). The layout of
`a` decides; results and gradients have its strides.
"""

from typing import Any

import torch
from torch import Tensor

from engine.ops import library  # noqa: F401  (registers the operators)
from engine.ops.gates import accumulation_dtype


def linear_scan(a: Tensor, b: Tensor, h0: Tensor | None = None, reverse: bool = False) -> Tensor:
    """The scan h_t = a_t * h_{t-1} + b_t along time.

    Args:
        a: coefficients [batch, time, channels]; float32, float64, bfloat16 or float16. Either
            channels or time may be contiguous; other strides are copied to the former.
        b: inputs, same shape, dtype and device as a; copied where its layout is not a's.
        h0: state before the first step [batch, channels], dtype of a or float32 (float64 with
            float64); None is zero.
        reverse: run from the last step to the first: h_t = a_t * h_{t+1} + b_t.

    Returns:
        h [batch, time, channels] in a's dtype, time contiguous where that of a is, else channels.
        Differentiable in a, b and h0.

    Raises:
        RuntimeError: shapes, dtypes or devices do not fit; the message names the argument.
    """
    h: Tensor = torch.ops.minserve.linear_scan(a, b, h0, reverse)
    return h


def reference(a: Tensor, b: Tensor, h0: Tensor | None = None, reverse: bool = False) -> Tensor:
    """The same, step by step in float64."""
    a, b = a.double(), b.double()
    h = a.new_zeros(a.shape[0], a.shape[2]) if h0 is None else h0.double()
    rows: list[Tensor] = []
    steps = list(zip(a.unbind(1), b.unbind(1), strict=True))
    for a_t, b_t in reversed(steps) if reverse else steps:
        h = a_t * h + b_t
        rows.append(h)
    if not rows:
        return torch.zeros_like(a)
    return torch.stack(rows[::-1] if reverse else rows, dim=1)


def heinsen_reference(a: Tensor, b: Tensor, h0: Tensor | None = None) -> Tensor:
    """The log-space form for a > 0, b > 0, h0 > 0, in the dtype given.

    log h_t = a*_t + logcumsumexp(log b - a*)_t with a*_t = sum of log a up to t; h0 enters as a
    first b.
    """
    log_a, log_b = a.log(), b.log()
    if h0 is not None:
        log_a = torch.nn.functional.pad(log_a, (0, 0, 1, 0))
        log_b = torch.cat([h0.log().unsqueeze(1), log_b], dim=1)
    total = log_a.cumsum(dim=1)
    h = (total + torch.logcumsumexp(log_b - total, dim=1)).exp()
    return h if h0 is None else h[:, 1:]


def _time_contiguous(a: Tensor) -> bool:
    """Whether channels lie apart by a whole row of time steps, as csrc/scan/op.cpp asks."""
    batch, time, channels = a.shape
    return (
        a.stride(1) == 1
        and a.stride(2) == time
        and time > 1
        and channels > 1
        and (batch <= 1 or a.stride(0) == time * channels)
    )


def _empty_with_layout_of(a: Tensor) -> Tensor:
    if _time_contiguous(a):
        _, time, channels = a.shape
        return a.new_empty_strided(a.shape, (channels * time, 1, time))
    return a.new_empty(a.shape)


def _fake(a: Tensor, b: Tensor, h0: Tensor | None = None, reverse: bool = False) -> Tensor:
    return _empty_with_layout_of(a)


torch.library.register_fake("minserve::linear_scan", _fake)


def _fake_backward(
    grad_h: Tensor, a: Tensor, h: Tensor, h0: Tensor | None, reverse: bool
) -> tuple[Tensor, Tensor, Tensor]:
    grad_h0 = a.new_empty((a.shape[0], a.shape[2]), dtype=accumulation_dtype(a.dtype))
    return _empty_with_layout_of(a), _empty_with_layout_of(a), grad_h0


torch.library.register_fake("minserve::linear_scan_backward", _fake_backward)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    a, _, h0, ctx.reverse = inputs
    ctx.save_for_backward(a, output, h0)


def _backward(ctx: Any, grad_h: Tensor) -> tuple[Tensor | None, ...]:
    a, h, h0 = ctx.saved_tensors
    grad_a, grad_b, grad_h0 = torch.ops.minserve.linear_scan_backward(grad_h, a, h, h0, ctx.reverse)
    return grad_a, grad_b, None if h0 is None else grad_h0.to(h0.dtype), None


torch.library.register_autograd("minserve::linear_scan", _backward, setup_context=_setup)
