"""Causal depthwise convolution with carried inputs: over packed sequences, and one step.

y_t = bias + sum over k of weight[:, k] x_{t - (K - 1) + k}: torch's conv1d with groups = channels
and K - 1 steps of left padding. The padding is the state: the last K - 1 inputs before. Where asked
for, the results are silu(y).
"""

from typing import Any

import torch
from torch import Tensor

from engine.ops import library  # noqa: F401  (registers the operators)
from engine.ops.scan import spans


def conv_scan(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    cu_seqlens: Tensor,
    state: Tensor,
    slots: Tensor,
    *,
    silu: bool = False,
) -> Tensor:
    """Convolve packed sequences, each continuing from its state row.

    Args:
        x: inputs [tokens, channels], whose rows may lie apart; float32, bfloat16 or float16.
        weight: [channels, K], x's dtype; weight[:, K - 1] multiplies the current token.
        bias: [channels], x's dtype, or None.
        cu_seqlens: start of each sequence, int32 [sequences + 1], beginning with 0, non-decreasing.
            Tokens beyond the last entry are padding: their rows of the result are zero.
        state: float32 [num_slots, K - 1, channels], the last K - 1 inputs, oldest first, channels
            contiguous; **changed in place**, also by sequences shorter than K - 1.
        slots: state row of each sequence, int32 [sequences]; negative: a padding sequence, which is
            skipped; its rows of the result are zero. No row may occur twice.
        silu: return silu(y), taken of the float32 sums.

    Returns:
        y [tokens, channels] in x's dtype, summed in float32.

    Raises:
        RuntimeError: shapes, dtypes or devices do not fit; on the CPU also bad values in cu_seqlens
            and slots (on CUDA, sequences with a slot out of range are skipped).
    """
    y: Tensor = torch.ops.minserve.conv_scan(x, weight, bias, cu_seqlens, state, slots, silu)
    return y


def conv_step(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    state: Tensor,
    slots: Tensor,
    *,
    silu: bool = False,
) -> Tensor:
    """Compute one step: row r of x is the next input of state row slots[r].

    It equals conv_scan with one token per sequence.

    Args:
        x: inputs [batch, channels]; float32, bfloat16 or float16.
        weight, bias, state: as for `conv_scan`; state is **changed in place**.
        slots: int32 [batch]; negative: a padding row, which is skipped; its result is zero. No row
            may occur twice.
        silu: as for `conv_scan`.

    Returns:
        y [batch, channels] in x's dtype, summed in float32.

    Raises:
        RuntimeError: shapes, dtypes or devices do not fit; on the CPU also slots out of range (on
            CUDA those rows are skipped).
    """
    y: Tensor = torch.ops.minserve.conv_step(x, weight, bias, state, slots, silu)
    return y


def conv_scan_reference(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    cu_seqlens: Tensor,
    state: Tensor,
    slots: Tensor,
) -> tuple[Tensor, Tensor]:
    """Reference of conv_scan in float64, without side effects; returns (y, the new state)."""
    x, weight = x.double(), weight.double()
    y, new_state = torch.zeros_like(x), state.double().clone()
    taps = weight.shape[1]
    for sequence, begin, end in spans(cu_seqlens):
        slot = int(slots[sequence])
        if slot < 0:
            continue
        rows = torch.cat([new_state[slot], x[begin:end]])  # [K - 1 + length, channels]
        for t in range(end - begin):
            y[begin + t] = (rows[t : t + taps] * weight.T).sum(dim=0)
            if bias is not None:
                y[begin + t] += bias.double()
        new_state[slot] = rows[rows.shape[0] - (taps - 1) :]
    return y, new_state


def conv_step_reference(
    x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, slots: Tensor
) -> tuple[Tensor, Tensor]:
    """Reference of conv_step in float64, without side effects; returns (y, the new state)."""
    cu_seqlens = torch.arange(x.shape[0] + 1, dtype=torch.int32)
    return conv_scan_reference(x, weight, bias, cu_seqlens, state, slots)


def _fake(x: Tensor, *_: Any) -> Tensor:
    return x.new_empty(x.shape)


torch.library.register_fake("minserve::conv_scan", _fake)
torch.library.register_fake("minserve::conv_step", _fake)
