"""The selective state space recurrence of Mamba: over packed sequences, one step, and training.

Per channel i with N states (Gu and Dao 2023, arXiv 2312.00752, algorithm 2; A is diagonal):

    dt = softplus(dt + dt_bias)
    h_t = exp(dt_t A_i) h_{t-1} + dt_t x_t B_t      h, A_i, B_t [N]
    y_t = (C_t h_t + D_i x_t) silu(z_t)             B and C are shared by all channels

Everything between inputs and results is float32 (float64 for float64).

The operators of the library (csrc/selective) go from token to token, with the states of some
channels in cache or registers. For float64, for more states than a GPU's kernels take, and with a
library that lacks them, `composed_scan` and `composed_step` do the same by torch's operators and
`linear_scan`. There the states of all tokens, which are N times as large as x, pass through memory,
in pieces of a bounded number of tokens, which depends only on shapes. Nothing waits for the device.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from engine.ops import library  # noqa: F401  (registers the operators)
from engine.ops.scan import linear_scan, spans

_IN_LIBRARY = hasattr(torch.ops.minserve, "selective_scan")
_MOST_STATES_ON_GPU = 256  # kMostStatesOnGpu in csrc/selective/scan.cuh

# Bytes of the states and coefficients of a piece of a prompt: three tensors [tokens, channels, N].
# Larger ones are slower on a CPU, which maps new memory for each.
_MOST_PIECE_BYTES = {"cpu": 2**24, "cuda": 2**28}


def selective_scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    dt_bias: Tensor,
    z: Tensor | None,
    cu_seqlens: Tensor,
    state: Tensor,
    slots: Tensor,
) -> Tensor:
    """Read packed sequences, each from its state row, which then has the last h.

    A sequence's result is bitwise the same whatever the rest of the batch and the number of threads
    and, with a float32 state, wherever it was split (composed: equal to rounding).

    Args:
        x: inputs [tokens, channels]; float32, float64, bfloat16 or float16. Rows of this and of the
            other tensors with a row for each token may lie apart.
        dt: time steps before bias and softplus, as x.
        A: float32 (float64 with float64 x) [channels, N], negative; N is at most 4,096.
        B, C: [tokens, N], x's dtype.
        D, dt_bias: [channels], x's dtype or float32.
        z: gate before silu, as x; None: no gate.
        cu_seqlens: start of each sequence, int32 [sequences + 1], beginning with 0, non-decreasing.
            Tokens beyond the last entry are padding: their rows of y are zero.
        state: float32 or bfloat16 (float64 with float64 x) [num_slots, channels, N], each row
            contiguous; **changed in place**. A bfloat16 row is rounded once, at the end.
        slots: state row of each sequence, int32 [sequences]; negative: a padding sequence, which is
            skipped; its rows of y are zero. No row may occur twice.

    Returns:
        y [tokens, channels] in x's dtype.

    Raises:
        RuntimeError: shapes, dtypes or devices do not fit; on the CPU also bad values in cu_seqlens
            and slots (on CUDA and composed, sequences with a slot out of range are skipped).
    """
    if _is_composed(x, A):
        return composed_scan(x, dt, A, B, C, D, dt_bias, z, cu_seqlens, state, slots)
    y: Tensor = torch.ops.minserve.selective_scan(
        x, dt, A, B, C, D, dt_bias, z, cu_seqlens, state, slots
    )
    return y


def selective_step(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    dt_bias: Tensor,
    z: Tensor | None,
    state: Tensor,
    slots: Tensor,
) -> Tensor:
    """Read one token of every sequence: row r of x updates state row slots[r].

    Bitwise equal to a scan of length 1 (composed: to rounding).

    Args:
        x, dt, A, B, C, D, dt_bias, z: as for `selective_scan`, with one row for each sequence.
        state: as for `selective_scan`; **changed in place**.
        slots: int32 [batch]; negative: a padding row, which is skipped; its y is zero. No row may
            occur twice.

    Returns:
        y [batch, channels] in x's dtype.

    Raises:
        RuntimeError: as for `selective_scan`.
    """
    if _is_composed(x, A):
        return composed_step(x, dt, A, B, C, D, dt_bias, z, state, slots)
    y: Tensor = torch.ops.minserve.selective_step(x, dt, A, B, C, D, dt_bias, z, state, slots)
    return y


def selective_scan_train(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    dt_bias: Tensor,
    z: Tensor | None,
) -> Tensor:
    """Read a batch of sequences from states of zeros, differentiably.

    The states of all tokens are kept for the backward pass.

    Args:
        x: inputs [batch, time, channels]; float32, float64, bfloat16 or float16.
        dt, z: as x.
        B, C: [batch, time, N].
        A, D, dt_bias: as for `selective_scan`.

    Returns:
        y [batch, time, channels] in x's dtype. Differentiable in all arguments.
    """
    wide, B, C = x.to(A.dtype), B.to(A.dtype), C.to(A.dtype)
    a, b = _coefficients(wide, _softplus(dt, dt_bias, A.dtype), A, B)
    h = linear_scan(a.flatten(2), b.flatten(2)).view_as(a)  # [batch, time, channels, N]
    y = torch.matmul(h, C.unsqueeze(-1)).squeeze(-1)
    return _output(y, wide, D, z).to(x.dtype)


def selected_step(
    x: Tensor,
    selection: Tensor,
    dt_weight: Tensor,
    A: Tensor,
    D: Tensor,
    dt_bias: Tensor,
    z: Tensor | None,
    state: Tensor,
    slots: Tensor,
    norm_eps: float | None = None,
) -> Tensor:
    """Compute `selective_step` with dt = dt_weight r, from the selection r | B | C of each row.

    Between the product that selects and the out projection it is the only kernel. CUDA alone. A
    row's bits depend on that row only. dt_weight, A, D and dt_bias are read before the previous
    kernel on the stream has ended, so no kernel may be writing them.

    Args:
        x: inputs [batch, channels], bfloat16; its rows, and those of z, may lie apart.
        selection: [batch, rank + 2 * N], bfloat16; rank a multiple of 8, N = 16; rows begin at
            multiples of 16 bytes.
        dt_weight: the result of `pack_dt_weight`, bfloat16 [rank / 8, channels, 8].
        A: float32 [channels, N], contiguous.
        D, dt_bias: [channels], bfloat16 or float32, contiguous.
        z: gate before silu, as x; None: no gate.
        state, slots: as for `selective_step`; state is **changed in place**.
        norm_eps: r, B and C are each divided by their root mean square, with this epsilon; None:
            they are not.

    Returns:
        y [batch, channels], bfloat16.

    Raises:
        RuntimeError: shapes, dtypes, alignments or devices do not fit; NotImplementedError on the
            CPU.
    """
    y: Tensor = torch.ops.minserve.selected_step(
        x, selection, dt_weight, A, D, dt_bias, z, state, slots, norm_eps
    )
    return y


def pack_dt_weight(weight: Tensor) -> Tensor:
    """Return weight [channels, rank] as [rank / 8, channels, 8], for `selected_step`."""
    channels, rank = weight.shape
    return weight.view(channels, rank // 8, 8).transpose(0, 1).contiguous()


def _is_composed(x: Tensor, A: Tensor) -> bool:
    if x.dtype == torch.float64 or not _IN_LIBRARY:
        return True
    return x.is_cuda and A.dim() == 2 and A.shape[1] > _MOST_STATES_ON_GPU


def composed_scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    dt_bias: Tensor,
    z: Tensor | None,
    cu_seqlens: Tensor,
    state: Tensor,
    slots: Tensor,
) -> Tensor:
    """Compute `selective_scan` by torch's operators and `linear_scan`."""
    tokens, sequences = len(x), len(slots)
    if not tokens or not sequences:
        return torch.zeros_like(x)
    step = _softplus(dt, dt_bias, A.dtype)  # [tokens, channels]
    wide, B, C = x.to(A.dtype), B.to(A.dtype), C.to(A.dtype)
    rows, valid = _rows(state, slots)
    begins, ends = cu_seqlens[:-1], cu_seqlens[1:]
    at = torch.arange(tokens, dtype=torch.int32, device=x.device)
    sequence = torch.searchsorted(ends.contiguous(), at, right=True)
    live = sequence < sequences
    sequence = sequence.clamp(max=sequences - 1)
    live &= valid[sequence]
    first, row = (at == begins[sequence]).view(-1, 1, 1), rows[sequence]
    token_bytes = 6 * A.numel() * A.element_size()
    most = max(1, _MOST_PIECE_BYTES[x.device.type] // token_bytes)
    parts: list[Tensor] = []
    carry: Tensor | None = None
    broken_before: Tensor | None = None
    for start in range(0, tokens, most):
        piece = slice(start, min(start + most, tokens))
        a, b = _coefficients(wide[piece], step[piece], A, B[piece])
        # The sequences follow each other in one scan: at its first token each forgets what comes
        # before and adds its own state. A product with 0 does not forget what is not finite, so
        # such values are left out, and another scan finds the states that they would reach.
        b += (state.index_select(0, row[piece]) * a).masked_fill_(~first[piece], 0)
        broken = ~(a.isfinite() & b.isfinite())
        a.masked_fill_(first[piece] | broken, 0)
        h = _scan(a, b.masked_fill_(broken, 0), carry)  # [piece, channels, N]
        since = _scan((~first[piece]).to(a.dtype).expand_as(a), broken.to(a.dtype), broken_before)
        carry, broken_before = h[-1:].clone(), since[-1:]
        h.masked_fill_(since > 0, torch.nan)
        parts.append(torch.bmm(h, C[piece].unsqueeze(2)).squeeze(2))
        last = ends.long() - 1 - start
        written = valid & (begins < ends) & (last >= 0) & (last < len(h))
        _write(state, rows, written, h, last.clamp(0, len(h) - 1))
    y = _output(torch.cat(parts), wide, D, z).masked_fill(~live.unsqueeze(1), 0)
    return y.to(x.dtype)


def composed_step(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    dt_bias: Tensor,
    z: Tensor | None,
    state: Tensor,
    slots: Tensor,
) -> Tensor:
    """Compute `selective_step` by torch's operators."""
    if not slots.shape[0]:
        return torch.zeros_like(x)
    wide = x.to(A.dtype)
    rows, valid = _rows(state, slots)
    a, b = _coefficients(wide, _softplus(dt, dt_bias, A.dtype), A, B.to(A.dtype))
    h = b.add_(a.mul_(state.index_select(0, rows)))  # [batch, channels, N]
    y = torch.bmm(h, C.to(A.dtype).unsqueeze(2)).squeeze(2)
    _write(state, rows, valid, h, torch.arange(len(h), device=x.device))
    return _output(y, wide, D, z).masked_fill(~valid.unsqueeze(1), 0).to(x.dtype)


def _scan(a: Tensor, b: Tensor, before: Tensor | None) -> Tensor:
    """Return h [tokens, channels, N] of one sequence; before: h of the token before it, or None."""
    carry = None if before is None else before.flatten(1)
    return linear_scan(a.flatten(1)[None], b.flatten(1)[None], carry)[0].view_as(b)


def _softplus(dt: Tensor, dt_bias: Tensor, dtype: torch.dtype) -> Tensor:
    return functional.softplus(dt.to(dtype) + dt_bias.to(dtype))


def _coefficients(x: Tensor, dt: Tensor, A: Tensor, B: Tensor) -> tuple[Tensor, Tensor]:
    """Return (a, b) of h_t = a_t h_{t-1} + b_t, [..., channels, N]."""
    return (dt.unsqueeze(-1) * A).exp_(), (dt * x).unsqueeze(-1) * B.unsqueeze(-2)


def _output(y: Tensor, x: Tensor, D: Tensor, z: Tensor | None) -> Tensor:
    y = y + D.to(x.dtype) * x
    return y if z is None else y * functional.silu(z.to(x.dtype))


def _rows(state: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
    """Return a row that exists for every slot, int64, and whether it is the slot's."""
    rows = slots.long().clamp(0, state.shape[0] - 1)
    return rows, rows == slots


def _write(state: Tensor, rows: Tensor, written: Tensor, h: Tensor, at: Tensor) -> None:
    """Set state[rows[s]] = h[at[s]] for the sequences s in `written`.

    The host does not know how many these are. The others repeat one of them, so that no two
    different values are written to one row; if there is none, a row is written as it is.
    """
    every = torch.arange(len(rows), device=rows.device)
    source = torch.where(written, every, written.int().argmax())
    rows, written = rows[source], written[source].view(-1, 1, 1)
    new = h.index_select(0, at[source]).to(state.dtype)
    values = torch.where(written, new, state.index_select(0, rows))
    state.index_copy_(0, rows, values)


# Reference, step by step in plain torch.


def selective_scan_reference(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    dt_bias: Tensor,
    z: Tensor | None,
    cu_seqlens: Tensor,
    state: Tensor,
    slots: Tensor,
) -> tuple[Tensor, Tensor]:
    """Reference of selective_scan in float64, without side effects; returns (y, the new state)."""
    x, dt, A, B, C, D, dt_bias = (tensor.double() for tensor in (x, dt, A, B, C, D, dt_bias))
    y, new_state = torch.zeros_like(x), state.double().clone()
    step = torch.log1p(torch.exp(dt + dt_bias))
    gate = torch.ones_like(x) if z is None else z.double() * torch.sigmoid(z.double())
    for sequence, begin, end in spans(cu_seqlens):
        slot = int(slots[sequence])
        if not 0 <= slot < len(state):
            continue
        h = new_state[slot]
        for t in range(begin, end):
            h = torch.exp(step[t, :, None] * A) * h + (step[t] * x[t])[:, None] * B[t]
            y[t] = (h @ C[t] + D * x[t]) * gate[t]
        new_state[slot] = h
    return y, new_state


def selected_step_reference(
    x: Tensor,
    selection: Tensor,
    dt_weight: Tensor,
    A: Tensor,
    D: Tensor,
    dt_bias: Tensor,
    z: Tensor | None,
    state: Tensor,
    slots: Tensor,
    norm_eps: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Reference of selected_step in float64, without side effects; returns (y, the new state)."""
    states = A.shape[1]
    rank = selection.shape[1] - 2 * states
    parts = [part.double() for part in selection.split([rank, states, states], dim=1)]
    if norm_eps is not None:
        parts = [functional.rms_norm(part, (part.shape[1],), None, norm_eps) for part in parts]
    weight = dt_weight.double().transpose(0, 1).flatten(1)  # [channels, rank]
    bounds = torch.arange(len(slots) + 1, dtype=torch.int32)
    return selective_scan_reference(
        *(x, parts[0] @ weight.T, A, parts[1], parts[2], D, dt_bias, z, bounds, state, slots)
    )


def _fake(x: Tensor, *_: Any) -> Tensor:
    return x.new_empty(x.shape)


if _IN_LIBRARY:
    torch.library.register_fake("minserve::selective_scan", _fake)
    torch.library.register_fake("minserve::selective_step", _fake)
if hasattr(torch.ops.minserve, "selected_step"):
    torch.library.register_fake("minserve::selected_step", _fake)
