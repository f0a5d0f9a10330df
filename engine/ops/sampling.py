"""Sampling: one token for every row of a decode batch, and the rows moved on, all on the device.

Temperature, top_k, top_p and min_p apply in this order. The vocabulary is not sorted: each filter
keeps the first tokens in the order of (logit, lowest id), so one cut in that order does for all
three. Weights are fixed-point numbers (the most likely token's is 2**38), whose sums have no
rounding and so no order, and a uniform number samples by inverting the cumulative distribution:
Gumbel noise would do without the sums, but needs a hash and two logarithms per token. Top-p is due
to Holtzman et al. (arXiv 1904.09751), min-p to Nguyen et al. (arXiv 2407.01082).

Rows of 1,025 to 262,144 tokens without top_k use rejection sampling first: up to `TRIES` tokens are
sampled from the unfiltered distribution, each with a number of its own, until the filters keep one.
That leaves kept tokens their odds to each other. These candidates are found in two levels. A number
finds a section of `SECTION` tokens by the section's weight relative to the row's best token, and
what is left of it finds the token by its weight relative to the section's best token, which is
2**38 there. So a token's probability is off by up to 2**-38 of its section's best one's, and that
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
#: Candidates of rejection sampling before one token is sampled from those that the filters keep.
TRIES = 8
#: Tokens whose weights are relative to the best of them.
SECTION = 512
#: Vocabularies of so many tokens use rejection sampling (csrc/sampling/rejection.h).
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
    """Samples a token for each row whose slot is not negative.

    The token goes to tokens[r] and out[cursor[r], r]; positions[r] and cursor[r] go up by one,
    remaining[r] down by one. The row ends, slots[r] = -1, when remaining[r] is 0 or the token is
    one of its stop ids. Where the best logit is NaN or infinite nothing is sampled: -1 goes to
    out, the cursor moves and the row ends.

    Nothing waits for the device, and a row's result does not depend on the others. On CUDA powers
    of two are those of torch; on the CPU they are others, within 1.1 ulp, and alike for every
    instruction set.

    Args:
        logits: float32 [rows, vocab]; vocab below 2**24.
        tokens: int32 [rows]; **changed in place**, as all up to `out`.
        slots: int32 [rows]; rows with a negative one are left as they are.
        positions: int64 [rows]: how many tokens the row has sampled before.
        remaining: int32 [rows]: how many it may still sample.
        cursor: int32 [rows]: the row of `out` that comes next.
        out: int32 [steps, rows].
        temperature: float32 [rows]; 0: the best token, of equal ones the lowest id.
        top_k: int32 [rows]; 0: all.
        top_p: float64 [rows]; 1: all.
        min_p: float32 [rows]; 0: none is dropped.
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
    """Greedy sampling from the best logits of parts of the rows, on CUDA alone.

    It does what sample_ does with rows of temperature 0.

    Args:
        best: int64 [rows, parts], as `engine.ops.gemm.linear_best` returns them.
        tokens, slots, positions, remaining, cursor, out, stop_ids: as of `sample_`; all but
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
    """The same, row by row with torch's exp2 and a sort; changes the same tensors in place."""
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
    """A row in sections, from which numbers sample tokens."""

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
        """The token that a number in [0, 1) finds."""
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
    """In [0, 1), by splitmix64 (Steele, Lea, Flood, 2014): number `position` of the stream; after
    so many that were refused, that number of the stream that begins with the first one's bits."""
    x = _random_bits(stream, position)
    return math.ldexp((_random_bits(x, refused) if refused > 0 else x) >> 11, -53)


def _random_bits(stream: int, position: int) -> int:
    x = (stream + (position + 1) * 0x9E3779B97F4A7C15) % _UINT64
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % _UINT64
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB % _UINT64
    return x ^ (x >> 31)


def _fake(*_: Tensor) -> None:
    """Returns nothing; what it changes keeps its shape."""


torch.library.register_fake("minserve::draw_", _fake)
torch.library.register_fake("minserve::draw_best_", _fake)
