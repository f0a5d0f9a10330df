"""mingru_scan_train: the minGRU scan as a function, differentiable, for training.

The recurrence of mingru_scan (arXiv 2410.01201) with explicit initial and last states. The backward
pass computes the gates again from pre instead of storing them, and takes h_{t-1} from the saved
output: with bfloat16 or float16 that is the rounded h, which saves a pass over memory and costs one
rounding.
"""

import torch
from torch import Tensor

from engine.ops.gates import mingru_coefficients, train_reference
from engine.ops.scan_train import register_scan


def mingru_scan_train(
    pre: Tensor,
    cu_seqlens: Tensor,
    h0: Tensor | None = None,
    linear_candidate: bool = False,
) -> tuple[Tensor, Tensor]:
    """The scan over packed sequences from given initial states.

    Args:
        pre: gate pre-activations [tokens, 2 * channels] = [k | v]; float32, float64, bfloat16 or
            float16.
        cu_seqlens: where sequences start, int32 [sequences + 1], from 0, never falling; rows of h
            beyond its last entry are zero.
        h0: initial states [sequences, channels], float32 (float64 with float64 pre); None is zero.
        linear_candidate: g(x) = x.

    Returns:
        h [tokens, channels] in pre's dtype and h_last [sequences, channels] in h0's dtype.
        Differentiable in pre and h0.

    Raises:
        RuntimeError: shapes, dtypes, devices or (on the CPU) cu_seqlens do not fit.
    """
    h, h_last = torch.ops.minserve.mingru_scan_train(pre, cu_seqlens, h0, linear_candidate)
    return h, h_last


def reference(
    pre: Tensor,
    cu_seqlens: Tensor,
    h0: Tensor | None = None,
    linear_candidate: bool = False,
) -> tuple[Tensor, Tensor]:
    """The same, step by step in float64; autograd goes through it."""
    a, b = mingru_coefficients(pre.double(), linear_candidate)
    return train_reference(a, b, cu_seqlens, h0)


register_scan("mingru_scan_train", gates=2)
