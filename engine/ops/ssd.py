"""The state space recurrence of Mamba-2: over packed sequences, one step, and training.

Per head h with states [head_dim, N] (Dao and Gu 2024, arXiv 2405.21060; A is a number per head):

    dt = clamp(softplus(dt + dt_bias), *dt_limit)
    S_t = exp(dt_t A_h) S_{t-1} + dt_t x_t B_t^T        x_t [head_dim], B_t and C_t [N]
    y_t = S_t C_t + D_h x_t

The heads of a group, which follow each other, share B and C. Everything between inputs and results
is float32 (float64 for float64).

A prompt is read in chunks: what the tokens of a chunk do to each other are products of matrices,
and one state passes from a chunk to the next. Chunks begin where the call begins to read a
sequence.

The operators of the library (csrc/ssd) do so on a CPU, 16 tokens at a time, and on CUDA, for
bfloat16 with usual sizes, 128 tokens at a time; there other inputs are read token by token. For
float64, for more than 1,024 states and with a library that lacks the operators, `composed_scan` and
`composed_step` do the same by torch's operators. There results of chunks of up to 128 tokens pass
through memory, in pieces of a bounded number of chunks, which depends only on shapes. Nothing waits
for the device.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from engine.config import SCAN_CHUNK
from engine.ops import library  # noqa: F401  (registers the operators)
from engine.ops.scan import spans
from engine.ops.state_rows import rows_of, written_sources

_IN_LIBRARY = hasattr(torch.ops.minserve, "ssd_scan")
_MOST_STATES = 1024  # kMostSsdStates in csrc/ssd/args.h

# Tokens of a chunk: the power of two at or above the mean length of the call's sequences, within
# these. So short sequences are not padded to long chunks: a chunk costs as much for its state as
# for many tokens.
_LEAST_CHUNK, _MOST_CHUNK = 16, SCAN_CHUNK

# Bytes of what a piece's chunks keep in memory at once. Larger pieces are slower on a CPU, which
# maps new memory for each.
_MOST_PIECE_BYTES = {"cpu": 2**25, "cuda": 2**29}


def ssd_scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    dt_bias: Tensor,
    dt_limit: tuple[float, float],
    cu_seqlens: Tensor,
    state: Tensor,
    slots: Tensor,
) -> Tensor:
    """Read packed sequences, each from its state row, which then has the last S.

    A sequence's result is bitwise the same whatever the rest of the batch and the number of threads
    and, with a float32 state, wherever it was split at multiples of 128 tokens (on a CPU, of 16;
    composed: equal to rounding; so are other splits). On CUDA, 128 tokens of bfloat16 are read with
    factors of products rounded to bfloat16, as by mamba_ssm.

    Args:
        x: inputs [tokens, heads, head_dim]; float32, float64, bfloat16 or float16. Rows of this and
            of the other tensors with a row for each token may lie apart.
        dt: time steps before bias, softplus and limits [tokens, heads], x's dtype.
        A: float32 (float64 with float64 x) [heads], negative.
        B: [tokens, groups, N], x's dtype; groups divide heads.
        C: [tokens, groups, N], x's dtype.
        D, dt_bias: [heads], x's dtype or float32.
        dt_limit: least and largest time step; the latter may be infinite.
        cu_seqlens: start of each sequence, int32 [sequences + 1], beginning with 0, non-decreasing.
            Tokens beyond the last entry are padding: their rows of y are zero.
        state: float32 or bfloat16 (float64 with float64 x) [num_slots, heads, head_dim, N], each
            row contiguous; **changed in place**. A bfloat16 row is rounded once, at the end
            (composed: after each piece; on CUDA also before a last token behind whole chunks).
        slots: state row of each sequence, int32 [sequences]; negative: a padding sequence, which is
            skipped; its rows of y are zero. No row may occur twice.

    Returns:
        y [tokens, heads, head_dim] in x's dtype.

    Raises:
        RuntimeError: of the library: shapes, dtypes or devices do not fit, or values in cu_seqlens
            or slots are bad (composed, sequences with a slot out of range are skipped).
    """
    if _is_composed(x, B):
        return composed_scan(x, dt, A, B, C, D, dt_bias, dt_limit, cu_seqlens, state, slots)
    y: Tensor = torch.ops.minserve.ssd_scan(
        x, dt, A, B, C, D, dt_bias, dt_limit, cu_seqlens, state, slots
    )
    return y


def ssd_step(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    dt_bias: Tensor,
    dt_limit: tuple[float, float],
    state: Tensor,
    slots: Tensor,
) -> Tensor:
    """Read one token of every sequence: row r of x updates state row slots[r].

    Bitwise equal to a scan of length 1 (composed: to rounding).

    Args:
        x, dt, A, B, C, D, dt_bias, dt_limit: as for `ssd_scan`, with one row for each sequence.
        state: as for `ssd_scan`; **changed in place**.
        slots: int32 [batch]; negative: a padding row, which is skipped; its y is zero. No row may
            occur twice.

    Returns:
        y [batch, heads, head_dim] in x's dtype.

    Raises:
        RuntimeError: as for `ssd_scan`.
    """
    if _is_composed(x, B):
        return composed_step(x, dt, A, B, C, D, dt_bias, dt_limit, state, slots)
    y: Tensor = torch.ops.minserve.ssd_step(x, dt, A, B, C, D, dt_bias, dt_limit, state, slots)
    return y


def _is_composed(x: Tensor, B: Tensor) -> bool:
    if x.dtype == torch.float64 or not _IN_LIBRARY:
        return True
    return B.dim() == 3 and B.shape[2] > _MOST_STATES


def composed_scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    dt_bias: Tensor,
    dt_limit: tuple[float, float],
    cu_seqlens: Tensor,
    state: Tensor,
    slots: Tensor,
) -> Tensor:
    """Compute `ssd_scan` by torch's operators."""
    tokens, sequences, dtype = len(x), len(slots), A.dtype
    if not tokens or not sequences:
        return torch.zeros_like(x)
    rows, valid = rows_of(state, slots)
    length = _chunk_length(tokens, sequences)
    sequence, at, inside = _chunks_of(cu_seqlens, valid, tokens, length)
    row = rows[sequence.clamp(max=sequences - 1)]  # state row of each chunk
    steps, factors = _time_steps(dt, dt_bias, dt_limit, dtype), D.to(dtype).unsqueeze(1)
    y = x.new_zeros(tokens + 1, *x.shape[1:])  # the last row takes what lies beyond sequences
    chunk_bytes = A.element_size() * (
        6 * state[0].numel() + 4 * x.shape[1] * length * (length + x.shape[2])
    )
    most = max(1, _MOST_PIECE_BYTES[x.device.type] // chunk_bytes)
    for start in range(0, len(sequence), most):
        piece = slice(start, start + most)
        which, tokens_of, live = sequence[piece], at[piece], inside[piece]
        # Tokens beyond a sequence change nothing, whatever their values are.
        beyond = ~live.unsqueeze(2)
        given = _gathered(x, tokens_of, dtype)
        dts = _gathered(steps, tokens_of, dtype).masked_fill_(beyond, 0)
        added = (given * dts.unsqueeze(3)).masked_fill_(beyond.unsqueeze(3), 0)
        keys = _gathered(B, tokens_of, dtype).masked_fill_(beyond.unsqueeze(3), 0)
        begun = state.index_select(0, row[piece]).to(dtype)
        follows = torch.zeros_like(which, dtype=torch.bool)
        follows[1:] = which[1:] == which[:-1]
        outputs, ends = _read_chunks(
            *(added[None], (dts * A)[None], keys[None], _gathered(C, tokens_of, dtype)[None]),
            *(begun[None], follows),
        )
        outputs = outputs[0].addcmul_(factors, given).to(x.dtype)
        y.index_copy_(0, torch.where(live, tokens_of, tokens).flatten(), outputs.flatten(0, 1))
        # The last chunk that a sequence has in this piece leaves its state.
        last = live[:, 0].clone()
        last[:-1] &= ~follows[1:]
        source = written_sources(last)
        left = torch.where(last[source].view(-1, 1, 1, 1), ends[0, source], begun[source])
        state.index_copy_(0, row[piece][source], left.to(state.dtype))
    return y[:tokens]


def composed_step(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    dt_bias: Tensor,
    dt_limit: tuple[float, float],
    state: Tensor,
    slots: Tensor,
) -> Tensor:
    """Compute `ssd_step` by torch's operators."""
    batch, heads, head_dim = x.shape
    if not batch:
        return torch.zeros_like(x)
    dtype, groups = A.dtype, B.shape[1]
    rows, valid = rows_of(state, slots)
    # A padding row repeats a sequence, and so writes what that one does. If there are only padding
    # rows, row 0 is written as it is.
    source = written_sources(valid)
    idle = ~valid.any()
    rows = rows[source]
    wide = x[source].to(dtype)
    steps = _time_steps(dt[source], dt_bias, dt_limit, dtype).masked_fill_(idle, 0)
    keys = B[source].to(dtype).masked_fill_(idle, 0)
    added = (steps.unsqueeze(-1) * wide).masked_fill_(idle, 0)  # [batch, heads, head_dim]
    s = state.index_select(0, rows).to(dtype).mul_((steps * A).exp_()[..., None, None])
    grouped = s.view(
        batch, groups, -1, s.shape[-1]
    )  # [batch, groups, heads / groups * head_dim, N]
    grouped.addcmul_(added.view(batch, groups, -1, 1), keys.unsqueeze(2))
    y = torch.matmul(grouped, C[source].to(dtype).unsqueeze(-1)).view(batch, heads, head_dim)
    state.index_copy_(0, rows, s.to(state.dtype))
    y = y.addcmul_(D.to(dtype).unsqueeze(1), wide)
    return y.masked_fill_(~valid.view(-1, 1, 1), 0).to(x.dtype)


def ssd_scan_train(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    dt_bias: Tensor,
    dt_limit: tuple[float, float],
) -> Tensor:
    """Read a batch of sequences from states of zeros, differentiably.

    The products of all chunks are kept for the backward pass.

    Args:
        x: inputs [batch, time, heads, head_dim]; float32, float64, bfloat16 or float16.
        dt: [batch, time, heads].
        B, C: [batch, time, groups, N].
        A, D, dt_bias, dt_limit: as for `ssd_scan`.

    Returns:
        y [batch, time, heads, head_dim] in x's dtype. Differentiable in all tensors.
    """
    if not x.numel():
        return torch.zeros_like(x)
    time, dtype = x.shape[1], A.dtype
    length = _chunk_length(time, 1)
    missing = -time % length

    def chunked(tensor: Tensor) -> Tensor:
        padding = (0, 0) * (tensor.dim() - 2) + (0, missing)
        padded: Tensor = functional.pad(tensor.to(dtype), padding)
        return padded.reshape(len(padded), -1, length, *padded.shape[2:])

    with torch.autocast(x.device.type, enabled=False):
        steps = _time_steps(dt, dt_bias, dt_limit, dtype)
        wide = x.to(dtype)
        added = chunked(steps.unsqueeze(-1) * wide)
        chunks = added.shape[1]
        follows = torch.ones(chunks, dtype=torch.bool, device=x.device)
        follows[:1] = False
        begun = added.new_zeros(len(x), 1, *x.shape[2:], B.shape[-1]).expand(-1, chunks, -1, -1, -1)
        y, _ = _read_chunks(added, chunked(steps * A), chunked(B), chunked(C), begun, follows)
        y = y.flatten(1, 2)[:, :time] + D.to(dtype).unsqueeze(1) * wide
    return y.to(x.dtype)


def _chunk_length(tokens: int, sequences: int) -> int:
    mean = -(-tokens // sequences)
    return min(max(1 << (mean - 1).bit_length(), _LEAST_CHUNK), _MOST_CHUNK)


def _time_steps(
    dt: Tensor, dt_bias: Tensor, dt_limit: tuple[float, float], dtype: torch.dtype
) -> Tensor:
    return functional.softplus(dt.to(dtype) + dt_bias.to(dtype)).clamp(*dt_limit)


def _chunks_of(
    cu_seqlens: Tensor, valid: Tensor, tokens: int, length: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the chunks of packed sequences, as many as there can be.

    Returns:
        The sequence of each, int64 [chunks], which is the number of sequences for chunks that do
        not exist; the indices of their tokens, int64 [chunks, length], all of which are in range;
        and which of these are tokens of the sequence and it has a state row, bool.
    """
    sequences, device = len(valid), cu_seqlens.device
    most = min(sequences, tokens)  # sequences that have tokens
    chunks = (tokens - most) // length + most
    begins, ends = cu_seqlens[:-1].long(), cu_seqlens[1:].long()
    counts = (ends - begins + length - 1) // length
    after = counts.cumsum(0)
    chunk = torch.arange(chunks, device=device)
    sequence = torch.searchsorted(after, chunk, right=True)
    known = sequence.clamp(max=sequences - 1)
    start = begins[known] + (chunk - (after - counts)[known]) * length
    at = start.unsqueeze(1) + torch.arange(length, device=device)
    live = (sequence < sequences) & valid[known]
    inside = live.unsqueeze(1) & (at < ends[known].unsqueeze(1))
    return sequence, at.clamp_(max=tokens - 1), inside


def _gathered(tensor: Tensor, at: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.index_select(0, at.flatten()).view(*at.shape, *tensor.shape[1:]).to(dtype)


def _read_chunks(
    added: Tensor, log: Tensor, B: Tensor, C: Tensor, begun: Tensor, follows: Tensor
) -> tuple[Tensor, Tensor]:
    """Read chunks of equal length, differentiably.

    Args:
        added: dt x [batch, chunks, length, heads, head_dim].
        log: dt A, the logarithm of what each token leaves of the state before it [batch, chunks,
            length, heads].
        B, C: [batch, chunks, length, groups, N].
        begun: states [batch, chunks, heads, head_dim, N] from which chunks begin.
        follows: which chunks begin from the last state of the chunk before instead, bool [chunks];
            the first one does not.

    Returns:
        The outputs without D [batch, chunks, length, heads, head_dim], and the last states of all
        chunks [batch, chunks, heads, head_dim, N].
    """
    dtype, (batch, chunks, length, heads, head_dim) = added.dtype, added.shape
    groups = (B.shape[3], -1)
    B, C = B.transpose(2, 3), C.transpose(2, 3)  # [batch, chunks, groups, length, N]
    # Sums in float64: differences of two sums that are large have to be exact.
    log = log.double().cumsum(2).transpose(2, 3)  # [batch, chunks, heads, length]
    future = torch.full((length, length), -torch.inf, dtype=dtype, device=log.device).triu(1)
    kept = ((log.unsqueeze(-1) - log.unsqueeze(-2)).to(dtype) + future).exp()
    weights = kept.unflatten(2, groups) * torch.matmul(C, B.mT).unsqueeze(3)
    inner = torch.matmul(weights, added.unflatten(3, groups).permute(0, 1, 3, 4, 2, 5))

    to_end = (log[..., -1:] - log).to(dtype).exp().transpose(2, 3).unsqueeze(-1)
    grouped = (added * to_end).unflatten(3, groups).flatten(4)  # [batch, chunks, length, groups, :]
    brought = torch.matmul(grouped.permute(0, 1, 3, 4, 2), B)
    brought = brought.view(batch, chunks, heads, head_dim, -1)
    whole = log[..., -1].to(dtype).exp()[..., None, None]  # [batch, chunks, heads, 1, 1]
    starts, ends = [begun[:, 0]], [torch.addcmul(brought[:, 0], whole[:, 0], begun[:, 0])]
    for index in range(1, chunks):
        # A selection, not a product with 0: a state that is not finite stays its sequence's own.
        starts.append(torch.where(follows[index], ends[-1], begun[:, index]))
        ends.append(torch.addcmul(brought[:, index], whole[:, index], starts[-1]))

    before = torch.stack(starts, 1).unflatten(2, groups).flatten(3, 4)
    outer = torch.matmul(C, before.mT).unflatten(4, (-1, head_dim)).transpose(3, 4)
    outer = outer * log.to(dtype).exp().unflatten(2, groups).unsqueeze(-1)
    y = (inner + outer).flatten(2, 3).transpose(2, 3)  # [batch, chunks, length, heads, head_dim]
    return y, torch.stack(ends, 1)


# Reference, step by step in plain torch.


def ssd_scan_reference(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    dt_bias: Tensor,
    dt_limit: tuple[float, float],
    cu_seqlens: Tensor,
    state: Tensor,
    slots: Tensor,
) -> tuple[Tensor, Tensor]:
    """Reference of ssd_scan in float64, without side effects; returns (y, the new state)."""
    x, dt, A, B, C, D, dt_bias = (tensor.double() for tensor in (x, dt, A, B, C, D, dt_bias))
    y, new_state = torch.zeros_like(x), state.double().clone()
    step = torch.log1p(torch.exp(dt + dt_bias)).clamp(*dt_limit)
    heads_of_group = x.shape[1] // B.shape[1]
    B, C = B.repeat_interleave(heads_of_group, 1), C.repeat_interleave(heads_of_group, 1)
    for sequence, begin, end in spans(cu_seqlens):
        slot = int(slots[sequence])
        if not 0 <= slot < len(state):
            continue
        s = new_state[slot]  # [heads, head_dim, N]
        for t in range(begin, end):
            kept, added = torch.exp(step[t] * A), step[t, :, None] * x[t]
            s = kept[:, None, None] * s + added[:, :, None] * B[t, :, None, :]
            y[t] = (s * C[t, :, None, :]).sum(-1) + D[:, None] * x[t]
        new_state[slot] = s
    return y, new_state


def _fake(x: Tensor, *_: Any) -> Tensor:
    return x.new_empty(x.shape)


if _IN_LIBRARY:
    torch.library.register_fake("minserve::ssd_scan", _fake)
    torch.library.register_fake("minserve::ssd_step", _fake)
