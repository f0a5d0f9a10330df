"""mingru_scan: minGRU over packed sequences, in place on state rows.

minGRU ("Were RNNs All We Needed?", arXiv 2410.01201, section 3.1):
z = sigma(k), h_t = (1 - z) h_{t-1} + z g(v), with 1 - z computed as sigma(-k),
with g(x) = x + 0.5 for x >= 0 and sigma(x) otherwise (or g(x) = x: the paper's vanilla form).
"""

import torch
from torch import Tensor

from engine.ops import library  # noqa: F401  (registers the operators)
from engine.ops.gates import mingru_coefficients, serve_reference


def mingru_scan(
    pre: Tensor,
    cu_seqlens: Tensor,
    state: Tensor,
    slots: Tensor,
    linear_candidate: bool = False,
) -> Tensor:
    """Reads packed sequences, each from its state row, which then holds the last h.

    Args:
        pre: gate pre-activations [tokens, 2 * channels] = [k | v]; float32, bfloat16 or float16.
        cu_seqlens: where sequences start, int32 [sequences + 1], from 0, never falling. Tokens
            beyond the last entry are padding: their rows of h are zero.
        state: float32 [num_slots, channels], channels contiguous; **changed in place**.
        slots: state row of each sequence, int32 [sequences]; negative: a padding sequence, skipped,
            its rows of h are zero. No row may be named twice.
        linear_candidate: g(x) = x.

    Returns:
        h [tokens, channels] in pre's dtype.

    A sequence's result is the same bit for bit whatever the batch around it, the number of threads,
    and wherever it was split at multiples of SCAN_CHUNK tokens.

    Raises:
        RuntimeError: shapes, dtypes or devices do not fit; on the CPU also bad values in cu_seqlens
            and slots (on CUDA, sequences with a slot out of range are skipped: looking would stall
            the GPU).
    """
    h: Tensor = torch.ops.minserve.mingru_scan(pre, cu_seqlens, state, slots, linear_candidate)
    return h


def reference(
    pre: Tensor,
    cu_seqlens: Tensor,
    state: Tensor,
    slots: Tensor,
    linear_candidate: bool = False,
) -> tuple[Tensor, Tensor]:
    """The same, step by step in float64 and functional: (h, the new state)."""
    a, b = mingru_coefficients(pre.double(), linear_candidate)
    return serve_reference(a, b, cu_seqlens, state, slots)


def _fake(
    pre: Tensor,
    cu_seqlens: Tensor,
    state: Tensor,
    slots: Tensor,
    linear_candidate: bool = False,
) -> Tensor:
    return pre.new_empty((pre.shape[0], state.shape[1]))


torch.library.register_fake("minserve::mingru_scan", _fake)
