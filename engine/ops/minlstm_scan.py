"""minlstm_scan: minLSTM over packed sequences, in place on state rows.

minLSTM ("Were RNNs All We Needed?", arXiv 2410.01201, section 3.2):
f' = sigma(log sigma(f) - log sigma(i)), i' = 1 - f', h_t = f' h_{t-1} + i' g(v)
(without normalisation f' = sigma(f), i' = sigma(i)),
with g(x) = x + 0.5 for x >= 0 and sigma(x) otherwise (or g(x) = x: the paper's vanilla form).
"""

import torch
from torch import Tensor

from engine.ops import library  # noqa: F401  (registers the operators)
from engine.ops.gates import minlstm_coefficients, serve_reference


def minlstm_scan(
    pre: Tensor,
    cu_seqlens: Tensor,
    state: Tensor,
    slots: Tensor,
    linear_candidate: bool = False,
    normalize_gates: bool = True,
) -> Tensor:
    """Reads packed sequences, each from its state row, which then holds the last h.

    Args:
        pre: gate pre-activations [tokens, 3 * channels] = [f | i | v]; float32, bfloat16 or
            float16.
        cu_seqlens: where sequences start, int32 [sequences + 1], from 0, never falling. Tokens
            beyond the last entry are padding: their rows of h are zero.
        state: float32 [num_slots, channels], channels contiguous; **changed in place**.
        slots: state row of each sequence, int32 [sequences]; negative: a padding sequence, skipped,
            its rows of h are zero. No row may be named twice.
        linear_candidate: g(x) = x.
        normalize_gates: scale the gates to f' + i' = 1.

    Returns:
        h [tokens, channels] in pre's dtype.

    A sequence's result is the same bit for bit whatever the batch around it, the number of threads,
    and wherever it was split at multiples of SCAN_CHUNK tokens.

    Raises:
        RuntimeError: shapes, dtypes or devices do not fit; on the CPU also bad values in cu_seqlens
            and slots (on CUDA, sequences with a slot out of range are skipped: looking would stall
            the GPU).
    """
    h: Tensor = torch.ops.minserve.minlstm_scan(
        pre, cu_seqlens, state, slots, linear_candidate, normalize_gates
    )
    return h


def reference(
    pre: Tensor,
    cu_seqlens: Tensor,
    state: Tensor,
    slots: Tensor,
    linear_candidate: bool = False,
    normalize_gates: bool = True,
) -> tuple[Tensor, Tensor]:
    """The same, step by step in float64 and functional: (h, the new state)."""
    a, b = minlstm_coefficients(pre.double(), linear_candidate, normalize_gates)
    return serve_reference(a, b, cu_seqlens, state, slots)


def _fake(
    pre: Tensor,
    cu_seqlens: Tensor,
    state: Tensor,
    slots: Tensor,
    linear_candidate: bool = False,
    normalize_gates: bool = True,
) -> Tensor:
    return pre.new_empty((pre.shape[0], state.shape[1]))


torch.library.register_fake("minserve::minlstm_scan", _fake)
