"""Gate functions and per-sequence helpers of the float64 references, in plain torch."""

import itertools
from collections.abc import Iterator

import torch
from torch import Tensor


def candidate(v: Tensor, linear: bool) -> Tensor:
    """g(v) = v + 0.5 for v >= 0, sigma(v) otherwise; v itself if linear."""
    return v if linear else torch.where(v >= 0, v + 0.5, torch.sigmoid(v))


def mingru_coefficients(pre: Tensor, linear_candidate: bool) -> tuple[Tensor, Tensor]:
    """(a, b) of h_t = a_t h_{t-1} + b_t from [k | v]."""
    k, v = pre.chunk(2, dim=-1)
    return torch.sigmoid(-k), torch.sigmoid(k) * candidate(v, linear_candidate)


def minlstm_coefficients(
    pre: Tensor, linear_candidate: bool, normalize_gates: bool
) -> tuple[Tensor, Tensor]:
    """(a, b) of h_t = a_t h_{t-1} + b_t from [f | i | v]."""
    f, i, v = pre.chunk(3, dim=-1)
    if normalize_gates:
        log_ratio = torch.nn.functional.logsigmoid(f) - torch.nn.functional.logsigmoid(i)
        forget, keep = torch.sigmoid(log_ratio), torch.sigmoid(-log_ratio)
    else:
        forget, keep = torch.sigmoid(f), torch.sigmoid(i)
    return forget, keep * candidate(v, linear_candidate)


def recur(a: Tensor, b: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
    """Steps h = a_t h + b_t over the first dimension: all h and the last."""
    rows = []
    for a_t, b_t in zip(a, b, strict=True):
        h = a_t * h + b_t
        rows.append(h)
    return (torch.stack(rows) if rows else torch.zeros_like(a)), h


def spans(cu_seqlens: Tensor) -> Iterator[tuple[int, int, int]]:
    """(sequence, begin, end) of a packed batch."""
    edges = cu_seqlens.tolist()
    for sequence, (begin, end) in enumerate(itertools.pairwise(edges)):
        yield sequence, begin, end


def serve_reference(
    a: Tensor, b: Tensor, cu_seqlens: Tensor, state: Tensor, slots: Tensor
) -> tuple[Tensor, Tensor]:
    """Packed scan with slots, functional: (h, the new state)."""
    h, new_state = torch.zeros_like(a), state.to(a.dtype).clone()
    for sequence, begin, end in spans(cu_seqlens):
        slot = int(slots[sequence])
        if slot >= 0:
            h[begin:end], new_state[slot] = recur(a[begin:end], b[begin:end], new_state[slot])
    return h, new_state


def train_reference(
    a: Tensor, b: Tensor, cu_seqlens: Tensor, h0: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Packed scan with explicit initial states: (h, h_last)."""
    sequences = cu_seqlens.numel() - 1
    h0 = a.new_zeros(sequences, a.shape[1]) if h0 is None else h0.to(a.dtype)
    pieces, last = [], []
    for sequence, begin, end in spans(cu_seqlens):
        h, final = recur(a[begin:end], b[begin:end], h0[sequence])
        pieces.append(h)
        last.append(final)
    used = sum(piece.shape[0] for piece in pieces)
    pieces.append(a.new_zeros(a.shape[0] - used, a.shape[1]))
    return torch.cat(pieces), (torch.stack(last) if last else h0)


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32
