"""minlstm_scan_train: the minLSTM scan as a function, differentiable, for training.

The recurrence of minlstm_scan (arXiv 2410.01201) with explicit initial and last states. The
backward pass computes the gates again from pre instead of storing them, and takes h_{t-1} from the
saved output: with bfloat16 or float16 that is the rounded h, which saves a pass over memory and
costs one rounding.
"""

from typing import Any

import torch
from torch import Tensor

from engine.ops import library  # noqa: F401  (registers the operators)
from engine.ops.gates import accumulation_dtype, minlstm_coefficients, train_reference


def minlstm_scan_train(
    pre: Tensor,
    cu_seqlens: Tensor,
    h0: Tensor | None = None,
    linear_candidate: bool = False,
    normalize_gates: bool = True,
) -> tuple[Tensor, Tensor]:
    """The scan over packed sequences from given initial states.

    Args:
        pre: gate pre-activations [tokens, 3 * channels] = [f | i | v]; float32, float64, bfloat16
            or float16.
        cu_seqlens: where sequences start, int32 [sequences + 1], from 0, never falling; rows of h
            beyond its last entry are zero.
        h0: initial states [sequences, channels], float32 (float64 with float64 pre); None is zero.
        linear_candidate: g(x) = x.
        normalize_gates: scale the gates to f' + i' = 1.

    Returns:
        h [tokens, channels] in pre's dtype and h_last [sequences, channels] in h0's dtype.
        Differentiable in pre and h0.

    Raises:
        RuntimeError: shapes, dtypes, devices or (on the CPU) cu_seqlens do not fit.
    """
    h, h_last = torch.ops.minserve.minlstm_scan_train(
        pre, cu_seqlens, h0, linear_candidate, normalize_gates
    )
    return h, h_last


def reference(
    pre: Tensor,
    cu_seqlens: Tensor,
    h0: Tensor | None = None,
    linear_candidate: bool = False,
    normalize_gates: bool = True,
) -> tuple[Tensor, Tensor]:
    """The same, step by step in float64; autograd goes through it."""
    a, b = minlstm_coefficients(pre.double(), linear_candidate, normalize_gates)
    return train_reference(a, b, cu_seqlens, h0)


def _fake(
    pre: Tensor,
    cu_seqlens: Tensor,
    h0: Tensor | None = None,
    linear_candidate: bool = False,
    normalize_gates: bool = True,
) -> tuple[Tensor, Tensor]:
    channels = pre.shape[1] // 3
    last_shape = (cu_seqlens.shape[0] - 1, channels)
    h_last = pre.new_empty(last_shape, dtype=accumulation_dtype(pre.dtype))
    return pre.new_empty((pre.shape[0], channels)), h_last


torch.library.register_fake("minserve::minlstm_scan_train", _fake)


def _fake_backward(
    grad_h: Tensor,
    grad_h_last: Tensor | None,
    pre: Tensor,
    h: Tensor,
    cu_seqlens: Tensor,
    h0: Tensor | None,
    linear_candidate: bool,
    normalize_gates: bool,
) -> tuple[Tensor, Tensor]:
    last_shape = (cu_seqlens.shape[0] - 1, h.shape[1])
    grad_h0 = pre.new_empty(last_shape, dtype=accumulation_dtype(pre.dtype))
    return pre.new_empty(pre.shape), grad_h0


torch.library.register_fake("minserve::minlstm_scan_train_backward", _fake_backward)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    pre, cu_seqlens, h0, *ctx.flags = inputs
    ctx.save_for_backward(pre, output[0], cu_seqlens, h0)


def _backward(ctx: Any, grad_h: Tensor, grad_h_last: Tensor) -> tuple[Tensor | None, ...]:
    pre, h, cu_seqlens, h0 = ctx.saved_tensors
    grad_pre, grad_h0 = torch.ops.minserve.minlstm_scan_train_backward(
        grad_h, grad_h_last, pre, h, cu_seqlens, h0, *ctx.flags
    )
    return grad_pre, None, None if h0 is None else grad_h0, *(None for _ in ctx.flags)


torch.library.register_autograd("minserve::minlstm_scan_train", _backward, setup_context=_setup)
