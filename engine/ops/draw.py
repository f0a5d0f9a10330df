"""draw_: one token for every row of a decode batch, and the rows moved on, all on the device.

Temperature, top_k, top_p and min_p apply in this order. The vocabulary is not sorted: each filter
keeps the first tokens in the order of (logit, lowest id), so one cut in that order does for all
three. Weights are fixed-point numbers (the most likely token's is 2**38), whose sums have no
rounding and so no order, and a draw inverts the cumulative distribution with one uniform number:
Gumbel noise would do without the sums, but needs a hash and two logarithms per token. Top-p is due
to Holtzman et al. (arXiv 1904.09751), min-p to Nguyen et al. (arXiv 2407.01082).
"""

import math

import torch
from torch import Tensor

from engine.ops import library  # noqa: F401  (registers the operators)

_LEAST_TEMPERATURE = 1e-30
_LOG2_E = 1.44269504
_WEIGHT_ONE = 2.0**38
_UINT64 = 2**64


def draw_(
    logits: Tensor,
    tokens: Tensor,
    slots: Tensor,
    positions: Tensor,
    remaining: Tensor,
    cursor: Tensor,
    out: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    streams: Tensor,
    stop_ids: Tensor,
) -> None:
    """Draws a token for each row whose slot is not negative.

    The token goes to tokens[r] and out[cursor[r], r]; positions[r] and cursor[r] go up by one,
    remaining[r] down by one. The row ends, slots[r] = -1, when remaining[r] is 0 or the token is
    one of its stop ids. Where the best logit is NaN or infinite nothing is drawn: -1 goes to out,
    the cursor moves and the row ends.

    Nothing waits for the device, and a row's result does not depend on the others. On CUDA powers
    of two are those of torch; on the CPU they are others, within 1.1 ulp, and alike for every
    instruction set.

    Args:
        logits: float32 [rows, vocab]; vocab below 2**24.
        tokens: int32 [rows]; **changed in place**, as all up to `out`.
        slots: int32 [rows]; rows with a negative one are left as they are.
        positions: int64 [rows]: how many tokens the row has drawn before.
        remaining: int32 [rows]: how many it may still draw.
        cursor: int32 [rows]: the row of `out` that comes next.
        out: int32 [steps, rows].
        temperature: float32 [rows]; 0: the best token, of equal ones the lowest id.
        top_k: int32 [rows]; 0: all.
        top_p: float64 [rows]; 1: all.
        min_p: float32 [rows]; 0: none is dropped.
        streams: int64 [rows]: engine.distribution.stream_ids.
        stop_ids: int32 [rows, stop ids], padded with -1.

    Raises:
        RuntimeError: shapes, dtypes or devices do not fit; on the CPU also a cursor outside of
            `out` (on CUDA those rows are skipped).
    """
    torch.ops.minserve.draw_(
        logits, tokens, slots, positions, remaining, cursor, out,
        temperature, top_k, top_p, min_p, streams, stop_ids,
    )  # fmt: skip


def reference(
    logits: Tensor,
    tokens: Tensor,
    slots: Tensor,
    positions: Tensor,
    remaining: Tensor,
    cursor: Tensor,
    out: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    streams: Tensor,
    stop_ids: Tensor,
) -> None:
    """The same, row by row with torch's exp2 and a sort; changes the same tensors in place."""
    for r in range(len(logits)):
        if slots[r] < 0:
            continue
        token = -1
        if logits[r].max().isfinite():
            token = _draw_one(
                logits[r],
                float(temperature[r]),
                int(top_k[r]),
                float(top_p[r]),
                min_p[r],
                _uniform(int(streams[r]), int(positions[r])),
            )
            tokens[r] = token
            positions[r] += 1
            remaining[r] -= 1
        out[cursor[r], r] = token
        cursor[r] += 1
        if token < 0 or remaining[r] <= 0 or token in stop_ids[r].tolist():
            slots[r] = -1


def _draw_one(
    logits: Tensor, temperature: float, top_k: int, top_p: float, min_p: Tensor, number: float
) -> int:
    best, vocab = logits.max(), len(logits)
    if not temperature > 0:
        return int((logits == best).nonzero()[0])
    log2_e, divisor = torch.tensor([_LOG2_E, max(temperature, _LEAST_TEMPERATURE)])
    distances = (best - logits) * float(log2_e / divisor)  # octaves
    weights = ((-distances).exp2() * _WEIGHT_ONE).long()
    order = distances.sort(stable=True).indices
    if 0 < top_k < vocab or top_p < 1:
        kept = order[:top_k] if top_k > 0 else order
        before = weights[kept].cumsum(0) - weights[kept]
        nucleus = before.double() < top_p * weights[kept].sum().double()
        nucleus[0] = True
        dropped = torch.ones(vocab, dtype=torch.bool, device=logits.device)
        dropped[kept[nucleus]] = False
        weights = weights.masked_fill(dropped, 0)
    weights = weights.masked_fill(-distances < min_p.log2(), 0)
    cumulative = weights.cumsum(0)
    target = min(int(number * float(cumulative[-1])), int(cumulative[-1]) - 1)
    return int((cumulative > target).nonzero()[0])


def _uniform(stream: int, position: int) -> float:
    """splitmix64 (Steele, Lea, Flood, 2014): number `position` of the stream, in [0, 1)."""
    x = (stream + (position + 1) * 0x9E3779B97F4A7C15) % _UINT64
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % _UINT64
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB % _UINT64
    return math.ldexp((x ^ (x >> 31)) >> 11, -53)


def _fake(
    logits: Tensor,
    tokens: Tensor,
    slots: Tensor,
    positions: Tensor,
    remaining: Tensor,
    cursor: Tensor,
    out: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    streams: Tensor,
    stop_ids: Tensor,
) -> None:
    """Returns nothing; what it changes keeps its shape."""


torch.library.register_fake("minserve::draw_", _fake)
