"""conv_step: one causal depthwise convolution step for each row of a decode batch.

conv_scan at one token per sequence: the state row moves on by one input.
"""

import torch
from torch import Tensor

from engine.ops.conv1d import reference as _scan_reference


def conv_step(
    x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, slots: Tensor
) -> Tensor:
    """One step: row r of x is the next input of state row slots[r].

    Args:
        x: inputs [batch, channels]; float32, bfloat16 or float16.
        weight: [channels, K], x's dtype; weight[:, K - 1] multiplies the current input.
        bias: [channels], x's dtype, or None.
        state: float32 [num_slots, K - 1, channels], oldest input first; **changed in place**.
        slots: int32 [batch]; negative: a padding row, skipped, its result is zero. No row may be
            named twice.

    Returns:
        y [batch, channels] in x's dtype, summed in float32.

    Raises:
        RuntimeError: shapes, dtypes or devices do not fit; on the CPU also slots out of range (on
            CUDA those rows are skipped).
    """
    y: Tensor = torch.ops.minserve.conv_step(x, weight, bias, state, slots)
    return y


def reference(
    x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, slots: Tensor
) -> tuple[Tensor, Tensor]:
    """The same in float64 and functional: (y, the new state)."""
    cu_seqlens = torch.arange(x.shape[0] + 1, dtype=torch.int32)
    return _scan_reference(x, weight, bias, cu_seqlens, state, slots)


def _fake(x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, slots: Tensor) -> Tensor:
    return x.new_empty(x.shape)


torch.library.register_fake("minserve::conv_step", _fake)
