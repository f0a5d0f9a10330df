"""mingru_step: one minGRU step for each row of a decode batch, in place on state rows.

The recurrence of mingru_scan (arXiv 2410.01201) at one token per sequence; the same bits as a scan
of length 1.
"""

import torch
from torch import Tensor

from engine.ops import library  # noqa: F401  (registers the operators)
from engine.ops.gates import mingru_coefficients


def mingru_step(
    pre: Tensor,
    state: Tensor,
    slots: Tensor,
    linear_candidate: bool = False,
) -> Tensor:
    """One step: row r of pre moves state row slots[r] on.

    Args:
        pre: gate pre-activations [batch, 2 * channels] = [k | v]; float32, bfloat16 or float16.
        state: float32 [num_slots, channels], channels contiguous; **changed in place**.
        slots: int32 [batch]; negative: a padding row, skipped, its h is zero. No row may be named
            twice.
        linear_candidate: g(x) = x.

    Returns:
        h [batch, channels] in pre's dtype.

    Raises:
        RuntimeError: shapes, dtypes or devices do not fit; on the CPU also slots out of range (on
            CUDA those rows are skipped).
    """
    h: Tensor = torch.ops.minserve.mingru_step(pre, state, slots, linear_candidate)
    return h


def reference(
    pre: Tensor,
    state: Tensor,
    slots: Tensor,
    linear_candidate: bool = False,
) -> tuple[Tensor, Tensor]:
    """The same in float64 and functional: (h, the new state)."""
    a, b = mingru_coefficients(pre.double(), linear_candidate)
    h, new_state = torch.zeros_like(a), state.double().clone()
    for row, slot in enumerate(slots.tolist()):
        if slot >= 0:
            h[row] = new_state[slot] = a[row] * new_state[slot] + b[row]
    return h, new_state


def _fake(
    pre: Tensor,
    state: Tensor,
    slots: Tensor,
    linear_candidate: bool = False,
) -> Tensor:
    return pre.new_empty((pre.shape[0], state.shape[1]))


torch.library.register_fake("minserve::mingru_step", _fake)
