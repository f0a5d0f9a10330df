"""Sampling: one token for every row of a decode batch, and the update of the rows, on the device.

Temperature, top_k, top_p and min_p are applied in this order. The vocabulary is not sorted: each
filter keeps the first tokens in the order of (logit, lowest id), so one cut in that order serves
for all three. Weights are fixed-point numbers (the most likely token's is 2**38), whose sums have
no rounding and therefore no order. A uniform number samples by inverting the cumulative
distribution; Gumbel noise would not need the sums, but a hash and two logarithms per token. Top-p
is by Holtzman et al. (arXiv 1904.09751), min-p by Nguyen et al. (arXiv 2407.01082).

Rows of 1,025 to 262,144 tokens without top_k use rejection sampling first: up to `TRIES` tokens are
sampled from the unfiltered distribution, each with its own random number, until the filters keep
one. This preserves the odds among kept tokens. These candidates are found in two levels. A number
selects a section of `SECTION` tokens by the section's weight relative to the row's best token. The
remainder selects the token by its weight relative to the section's best token, which is 2**38
there. So a token's probability is off by up to 2**-38 of that of its section's best token, and that
one's by up to 512 times as much.
"""

import math

import torch
from torch import Tensor

from engine.ops import library  # noqa: F401  (registers the operators)

_LEAST_TEMPERATURE = 1e-30
_LOG2_E = 1.44269504
_WEIGHT_ONE = 2.0**38
_UINT64 = 2**64
# Candidates of rejection sampling before one token is sampled from the filtered distribution.
TRIES = 8
# Tokens in a section; their weights are relative to the section's best token.
SECTION = 512
# Vocabulary sizes with rejection sampling (csrc/sampling/rejection.h).
TRIED = range(1025, 512 * SECTION + 1)


def sample_(
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
    """Sample a token for each row whose slot is not negative.

    The token is written to tokens[r] and out[cursor[r], r]; positions[r] and cursor[r] are
    incremented, remaining[r] is decremented. The row ends (slots[r] = -1) when remaining[r] is 0 or
    the token is one of its stop ids. If the best logit is NaN or infinite, nothing is sampled: -1
    is written to out, the cursor is incremented and the row ends.

    Does not wait for the device, and a row's result does not depend on the others. On CUDA, exp2 is
    torch's; on the CPU it differs, within 1.1 ulp, but is the same for every instruction set.

    Args:
        logits: float32 [rows, vocab]; vocab below 2**24.
        tokens: int32 [rows]; **changed in place**, like all up to `out`.
        slots: int32 [rows]; rows with a negative one are left unchanged.
        positions: int64 [rows]: number of tokens that the row has sampled before.
        remaining: int32 [rows]: how many it may still sample.
        cursor: int32 [rows]: the row of `out` to write next.
        out: int32 [steps, rows].
        temperature: float32 [rows]; 0: the best token, of equal ones the lowest id.
        top_k: int32 [rows]; 0: off.
        top_p: float64 [rows]; 1: off.
        min_p: float32 [rows]; 0: off.
        streams: int64 [rows]: engine.runner.sampling.random_streams.stream_ids.
        stop_ids: int32 [rows, stop ids], padded with -1.

    Raises:
        RuntimeError: shapes, dtypes or devices do not fit; on the CPU also a cursor outside of
            `out` (on CUDA those rows are skipped).
    """
    torch.ops.minserve.draw_(
        logits, tokens, slots, positions, remaining, cursor, out,
        temperature, top_k, top_p, min_p, streams, stop_ids,
    )  # fmt: skip


def sample_best_(
    best: Tensor,
    tokens: Tensor,
    slots: Tensor,
    positions: Tensor,
    remaining: Tensor,
    cursor: Tensor,
    out: Tensor,
    stop_ids: Tensor,
) -> None:
    """Sample greedily from the best logits of parts of the rows; CUDA only.

    It does what sample_ does for rows of temperature 0.

    Args:
        best: int64 [rows, parts], from `engine.ops.gemm.linear_best`.
        tokens, slots, positions, remaining, cursor, out, stop_ids: as for `sample_`; all but
            stop_ids are **changed in place**.

    Raises:
        RuntimeError: shapes, dtypes or devices do not fit; NotImplementedError on the CPU.
    """
    torch.ops.minserve.draw_best_(best, tokens, slots, positions, remaining, cursor, out, stop_ids)


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
    """Reference of sample_, row by row with torch's exp2 and a sort; changes the same tensors."""
    for r in range(len(logits)):
        if slots[r] < 0:
            continue
        token = -1
        if logits[r].max().isfinite():
            token = _sample_one(
                logits[r],
                float(temperature[r]),
                int(top_k[r]),
                float(top_p[r]),
                min_p[r],
                (int(streams[r]), int(positions[r])),
            )
            tokens[r] = token
            positions[r] += 1
            remaining[r] -= 1
        out[cursor[r], r] = token
        cursor[r] += 1
        if token < 0 or remaining[r] <= 0 or token in stop_ids[r].tolist():
            slots[r] = -1


def _sample_one(
    logits: Tensor,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: Tensor,
    place: tuple[int, int],
) -> int:
    best, vocab = logits.max(), len(logits)
    if not temperature > 0:
        return int((logits == best).nonzero()[0])
    log2_e, divisor = torch.tensor([_LOG2_E, max(temperature, _LEAST_TEMPERATURE)])
    octaves = float(log2_e / divisor)
    distances = (best - logits) * octaves
    weights = ((-distances).exp2() * _WEIGHT_ONE).long()
    has_top_k = 0 < top_k < vocab
    kept = ~(-distances < min_p.log2())
    if has_top_k or top_p < 1:
        order = distances.sort(stable=True).indices
        ranked = order[:top_k] if top_k > 0 else order
        before = weights[ranked].cumsum(0) - weights[ranked]
        nucleus = before.double() < top_p * weights[ranked].sum().double()
        nucleus[0] = True
        within = torch.zeros_like(kept)
        within[ranked[nucleus]] = True
        kept &= within
    refused = 0
    if vocab in TRIED and not has_top_k:
        sections = _Sections(logits, octaves)
        while refused < TRIES:
            token = sections.token(_uniform(*place, refused))
            if kept[token]:
                return token
            refused += 1
    cumulative = weights.masked_fill(~kept, 0).cumsum(0)
    number = _uniform(*place, refused)
    target = min(int(number * float(cumulative[-1])), int(cumulative[-1]) - 1)
    return int((cumulative > target).nonzero()[0])


class _Sections:
    """A row's logits in sections, from which uniform numbers select tokens."""

    def __init__(self, logits: Tensor, octaves: float) -> None:
        missing = -len(logits) % SECTION
        rows = torch.nn.functional.pad(logits, (0, missing), value=-math.inf).view(-1, SECTION)
        best = rows.amax(1, keepdim=True)
        possible = best.clamp(min=torch.finfo(best.dtype).min)
        weights = (((rows - possible) * octaves).exp2() * _WEIGHT_ONE).long()
        self._within = weights.cumsum(1)  # [sections, SECTION]
        beside = ((best[:, 0] - logits.max()) * octaves).exp2()
        sections = (self._within[:, -1].double() * beside.double()).long()
        self._sections = sections.cumsum(0)  # [sections]

    def token(self, number: float) -> int:
        """Return the token that a number in [0, 1) selects."""
        total = int(self._sections[-1])
        place = number * float(total)
        section = int((self._sections > min(int(place), total - 1)).nonzero()[0])
        before = int(self._sections[section - 1]) if section > 0 else 0
        share = (place - float(before)) / float(int(self._sections[section]) - before)
        within = self._within[section]
        weight = int(within[-1])
        target = min(max(int(share * float(weight)), 0), weight - 1)
        return section * SECTION + int((within > target).nonzero()[0])


def _uniform(stream: int, position: int, refused: int = 0) -> float:
    """Return number `position` of a random stream, in [0, 1), by splitmix64.

    Source: Steele, Lea, Flood, 2014. After `refused` rejected candidates it is number `refused` of
    the stream that begins with the first number's bits.
    """
    x = _random_bits(stream, position)
    return math.ldexp((_random_bits(x, refused) if refused > 0 else x) >> 11, -53)


def _random_bits(stream: int, position: int) -> int:
    x = (stream + (position + 1) * 0x9E3779B97F4A7C15) % _UINT64
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % _UINT64
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB % _UINT64
    return x ^ (x >> 31)


def _fake(*_: Tensor) -> None:
    """Return nothing; the changed tensors keep their shapes."""


torch.library.register_fake("minserve::draw_", _fake)
torch.library.register_fake("minserve::draw_best_", _fake)
