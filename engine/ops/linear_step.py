"""linear_step: gate projection and one step of the recurrence in one kernel, on Hopper.

The product of a channel's gates never leaves the multiprocessor that forms it: there it is rounded
as pre-activations in memory are, and moves the channel's state on, as `linear_map` followed by
`mingru_step` or `minlstm_step` does. Those may sum a product in another order, which now and then
rounds a pre-activation the other way.
"""

import torch
from torch import Tensor

from engine.ops import library  # noqa: F401  (registers the operators)
from engine.ops.gemm import scaled_product
from engine.ops.mingru_step import reference as mingru_reference
from engine.ops.minlstm_step import reference as minlstm_reference


def linear_step(
    x: Tensor,
    squares: Tensor | None,
    eps: float,
    weight: Tensor,
    bias: Tensor | None,
    state: Tensor,
    slots: Tensor,
    linear_candidate: bool = False,
    normalize_gates: bool = True,
    fixed_order: bool = False,
) -> Tensor:
    """One step of every row of a batch.

    Args:
        x, squares, eps: as of `linear_map`.
        weight: [2 * channels, inputs] = [k | v] of minGRU or [3 * channels, inputs] = [f | i | v]
            of minLSTM; channels a multiple of 8. Read early, as of `linear_map`.
        bias: [rows of weight]. Read as early as weight.
        state: float32 [num_slots, channels], rows aligned to 16 bytes; **changed in place**.
        slots: int32 [batch]; negative: a padding row, skipped, its h is zero. No row may be named
            twice.
        fixed_order: as of `linear_map`.

    Returns:
        h [batch, channels] in x's dtype.

    Raises:
        RuntimeError: shapes, dtypes or devices do not fit (slots out of range are skipped);
            NotImplementedError on the CPU.
    """
    h: Tensor = torch.ops.minserve.linear_step(
        x, squares, eps, weight, bias, state, slots, linear_candidate, normalize_gates, fixed_order
    )
    return h


def reference(
    x: Tensor,
    squares: Tensor | None,
    eps: float,
    weight: Tensor,
    bias: Tensor | None,
    state: Tensor,
    slots: Tensor,
    linear_candidate: bool = False,
    normalize_gates: bool = True,
) -> tuple[Tensor, Tensor]:
    """The same in float64 and functional: (h, the new state). Pre-activations are not rounded."""
    pre = scaled_product(x, squares, eps, weight, bias)
    if weight.shape[0] == 2 * state.shape[1]:
        return mingru_reference(pre, state, slots, linear_candidate)
    return minlstm_reference(pre, state, slots, linear_candidate, normalize_gates)


def _fake(
    x: Tensor,
    squares: Tensor | None,
    eps: float,
    weight: Tensor,
    bias: Tensor | None,
    state: Tensor,
    slots: Tensor,
    linear_candidate: bool = False,
    normalize_gates: bool = True,
    fixed_order: bool = False,
) -> Tensor:
    return x.new_empty((x.shape[0], state.shape[1]))


torch.library.register_fake("minserve::linear_step", _fake)
