"""HGRN's recurrence and gates in plain torch: the Python reference of the compiled operators.

    f_t = lb + (1 - lb) sigma(f),  h_t = f_t h_{t-1} + (1 - f_t) silu(i)

Pre-activations are [tokens, 3 * channels] = [i | f | g]; g, the output gate, is not read here.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from engine.ops.scan import linear_scan, spans


def hgrn_coefficients(pre: Tensor, lower_bound: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return (a, b) of h_t = a_t h_{t-1} + b_t, in fp32 (fp64 of fp64)."""
    dtype = torch.float64 if pre.dtype == torch.float64 else torch.float32
    i, f, _ = pre.to(dtype).chunk(3, dim=-1)
    forget, keep = torch.sigmoid(f), torch.sigmoid(-f)
    if lower_bound is not None:
        forget, keep = lower_bound + (1 - lower_bound) * forget, (1 - lower_bound) * keep
    return forget, keep * functional.silu(i)


def hgrn_scan(
    pre: Tensor,
    cu_seqlens: Tensor,
    state: Tensor,
    slots: Tensor,
    lower_bound: Tensor | None = None,
) -> Tensor:
    """Read packed sequences, each from its row of state [rows, channels], updated in place."""
    a, b = hgrn_coefficients(pre, lower_bound)
    h = torch.zeros_like(a)
    for (sequence, begin, end), slot in zip(spans(cu_seqlens), slots.tolist(), strict=True):
        if slot >= 0 and end > begin:
            h0 = state[slot].to(a.dtype).unsqueeze(0)
            h[begin:end] = linear_scan(a[None, begin:end], b[None, begin:end], h0)[0]
            state[slot] = h[end - 1]
        assert sequence < len(slots)
    return h.to(pre.dtype)


def hgrn_step(
    pre: Tensor, state: Tensor, slots: Tensor, lower_bound: Tensor | None = None
) -> Tensor:
    """Read one token of every sequence; row r of pre updates state row slots[r] in place."""
    cu_seqlens = torch.arange(len(pre) + 1, dtype=torch.int32)
    return hgrn_scan(pre, cu_seqlens, state, slots, lower_bound)


def hgrn_scan_train(
    pre: Tensor,
    cu_seqlens: Tensor,
    h0: Tensor | None = None,
    lower_bound: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Read packed sequences from h0 [sequences, channels], differentiably; return (h, h_last)."""
    a, b = hgrn_coefficients(pre, lower_bound)
    pieces = []
    for sequence, begin, end in spans(cu_seqlens):
        start = None if h0 is None else h0[sequence].to(a.dtype).unsqueeze(0)
        pieces.append(linear_scan(a[None, begin:end], b[None, begin:end], start)[0])
    last = torch.stack([piece[-1] for piece in pieces])
    return torch.cat(pieces).to(pre.dtype), last
