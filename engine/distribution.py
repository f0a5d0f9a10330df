"""From logits to a token: pure functions on tensors, the same on every device.

Logits are fp32 [rows, vocab]; nothing here waits for the device. A row's result depends on that row
alone, bit for bit: every step is element by element, or a sum of integers, which has no rounding
and so no order, or a sum in an order of its own (`ops.target_logprobs`). For this the weights that
a token is drawn by are fixed-point numbers (`_weights`).

Filters and draws take octaves: a token at -3 is an eighth as likely as the best one, at 0.

Draws invert the cumulative distribution with one uniform number per row. Gumbel noise would do
without the cumulative sum, but needs a hash and two logarithms per vocabulary entry.
"""

from __future__ import annotations

from typing import NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine import ops

# The most likely token weighs 2**38, so a vocabulary of 2**24 sums to less than 2**63. Tokens less
# than 2**-38 times as likely as the best are never drawn.
_WEIGHT_ONE = 2.0**38

_LOG2_E = 1.44269504  # as float32

_MAX_LOGIT = torch.finfo(torch.float32).max

# splitmix64 (Steele, Lea, Flood, "Fast splittable pseudorandom number generators", 2014), its
# constants as signed 64-bit integers; int64 tensors and arrays wrap around as its arithmetic asks.
_GOLDEN = 0x9E3779B97F4A7C15 - 2**64
_MIX_1 = 0xBF58476D1CE4E5B9 - 2**64
_MIX_2 = 0x94D049BB133111EB - 2**64

Int64 = TypeVar("Int64", Tensor, NDArray[np.int64])


class Logprobs(NamedTuple):
    """Of one token per row, from the log-softmax of raw logits."""

    chosen: Tensor  # [rows] fp32
    is_greedy: Tensor  # [rows] bool: the token is the most likely one
    top_ids: Tensor  # [rows, k], best first
    top_logprobs: Tensor  # [rows, k]


def ranked(logits: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """The `width` best logits of each row, best first, equal ones by lowest id: (values, ids).

    torch.topk leaves the order of equal values open, and 16-bit models have many; so the ranking
    is over unique integers, a logit's order-preserving bits followed by its inverted id.
    """
    vocab = logits.shape[-1]
    bits = (logits + 0.0).view(torch.int32)  # + 0.0: -0.0 becomes 0.0, its equal
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # negative floats: more magnitude, less value
    inverted = torch.arange(vocab - 1, -1, -1, device=logits.device)
    keys = (ordered.long() << 32) | inverted  # [rows, vocab]
    ids = vocab - 1 - (keys.topk(min(width, vocab), dim=-1).values & 0xFFFFFFFF)
    return logits.gather(-1, ids), ids


def greedy(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The best logit of each row and its lowest id: ([rows], [rows]). NaN, if any, is the best."""
    best, ids = logits.max(dim=-1)
    return best, ids


def allow(logits: Tensor, bits: Tensor) -> Tensor:
    """Makes impossible what a mask does not allow: bit t of row i of `bits` int32 [rows, words],
    counted from the lowest bit of the first word, is token t. Words beyond the vocabulary count
    nothing."""
    octets = bits.view(torch.uint8).unsqueeze(-1)  # [rows, 4 * words, 1]
    each = (octets >> torch.arange(8, dtype=torch.uint8, device=bits.device)) & 1
    forbidden = each.flatten(1)[:, : logits.shape[-1]] == 0
    return logits.masked_fill(forbidden, -torch.inf)


def penalise(
    logits: Tensor,
    in_prompt: Tensor,
    answer_counts: Tensor,
    repetition: Tensor,
    presence: Tensor,
    frequency: Tensor,
) -> Tensor:
    """Makes tokens that were there already less likely.

    in_prompt bool and answer_counts integer are [rows, vocab]; the penalties fp32 [rows, 1].
    Repetition (Keskar et al., arXiv 1909.05858) divides a positive logit and multiplies a negative
    one, for tokens of prompt and answer; presence and frequency (OpenAI) are subtracted, once and
    per occurrence, for tokens of the answer.
    """
    answered = answer_counts > 0
    scaled = torch.where(logits > 0, logits / repetition, logits * repetition)
    logits = torch.where(in_prompt | answered, scaled, logits)
    logits = logits - presence * answered - frequency * answer_counts
    return logits.clamp(max=_MAX_LOGIT)


def add_bias(logits: Tensor, rows: Tensor, ids: Tensor, values: Tensor) -> Tensor:
    """logits[rows[i], ids[i]] + values[i] for every i; -inf makes a token impossible."""
    biased = logits.index_put((rows, ids), values, accumulate=True)
    return biased.clamp(max=_MAX_LOGIT)


def octaves(logits: Tensor, best: Tensor, temperature: Tensor) -> Tensor:
    """Likelihoods beside the best token's as powers of two: fp32 [rows, vocab], 0 and less.

    best is fp32 [rows], temperature fp32 [rows, 1]. With the best at 0, no temperature can overflow
    to +infinity.
    """
    each = torch.full_like(temperature, _LOG2_E) / temperature  # as octaves_of in csrc/draw/draw.h
    return (logits - best.unsqueeze(-1)) * each


def keep_top(octaves: Tensor, top_k: Tensor, top_p: Tensor, width: int) -> Tensor:
    """Sets to -inf all but each row's top_k best and, of these, all but the top_p nucleus.

    top_k int64 [rows, 1], at least 1; top_p float64 [rows, 1]: the fewest best tokens whose
    probabilities reach it are kept (Holtzman et al., arXiv 1904.09751), always at least one.
    `width` bounds every row's top_k.
    """
    values, ids = ranked(octaves, width)  # [rows, width]
    within_k = torch.arange(values.shape[-1], device=octaves.device) < top_k
    weights = _weights(values.masked_fill(~within_k, -torch.inf))
    cumulative = weights.cumsum(dim=-1)
    before = (cumulative - weights).double()
    within_p = before < top_p * cumulative[:, -1:]
    within_p[:, 0] = True
    kept = torch.where(within_k & within_p, values, -torch.inf)
    return torch.full_like(octaves, -torch.inf).scatter(-1, ids, kept)


def keep_min_p(octaves: Tensor, min_p: Tensor) -> Tensor:
    """Sets to -inf what is less than min_p (fp32 [rows, 1]) times as likely as the best.

    Being relative to the best token, which every filter keeps, it is the same before and after a
    renormalisation (Nguyen et al., arXiv 2407.01082).
    """
    threshold = octaves.amax(dim=-1, keepdim=True) + min_p.log2()
    return octaves.masked_fill(octaves < threshold, -torch.inf)


def stream_ids(seeds: Int64, choices: Int64) -> Int64:
    """One random stream for each (seed, choice): int64 [rows]."""
    return _mix(_mix(seeds) + (choices + 1) * _GOLDEN)


def uniform(streams: Tensor, positions: Tensor) -> Tensor:
    """Number `positions[i]` of stream `streams[i]`, uniform in [0, 1): float64 [rows].

    Random access into splitmix64: its state after n steps is known without taking them.
    """
    bits = _mix(streams + (positions + 1) * _GOLDEN)
    return _shift_right(bits, 11).double() * 2.0**-53


def draw(octaves: Tensor, numbers: Tensor) -> Tensor:
    """The token of each row at which the cumulative distribution passes `numbers` (float64
    [rows], in [0, 1)): int64 [rows]."""
    cumulative = _weights(octaves).cumsum(dim=-1)
    total = cumulative[:, -1]
    # The product may round up to the total, which is one past the last weight.
    target = torch.minimum((numbers * total).long(), total - 1)
    ids = torch.searchsorted(cumulative, target.unsqueeze(-1), right=True).squeeze(-1)
    return ids.clamp(max=octaves.shape[-1] - 1)  # a row of NaN has no order to search


def token_logprobs(logits: Tensor, tokens: Tensor, top: int) -> Logprobs:
    """Natural log-probabilities of tokens [rows] int64, and of the `top` best of each row."""
    best, best_ids = greedy(logits)
    # The best token's own is minus the logarithm of the sum of all exp(logit - best): summed by one
    # operator wherever a log-probability is asked for, since torch's order may depend on the rows.
    minus_log, _ = ops.target_logprobs(logits, best_ids)
    chosen = (logits.gather(-1, tokens.unsqueeze(-1)).squeeze(-1) - best) + minus_log
    top_ids = tokens.new_empty(len(tokens), 0)
    top_logits = logits.new_empty(len(tokens), 0)
    if top:
        top_logits, top_ids = ranked(logits, top)
    top_logprobs = (top_logits - best.unsqueeze(-1)) + minus_log.unsqueeze(-1)
    return Logprobs(chosen, best_ids == tokens, top_ids, top_logprobs)


def _weights(octaves: Tensor) -> Tensor:
    """Probabilities times a constant of the row, in fixed point: int64, best = 2**38."""
    best = octaves.amax(dim=-1, keepdim=True)
    return ((octaves - best).exp2() * _WEIGHT_ONE).long()


def _shift_right(x: Int64, bits: int) -> Int64:
    """Shifts int64 as if it were unsigned."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mix(x: Int64) -> Int64:
    """splitmix64's finaliser: a bijection of 64 bits that spreads every input bit over all."""
    x = (x ^ _shift_right(x, 30)) * _MIX_1
    x = (x ^ _shift_right(x, 27)) * _MIX_2
    return x ^ _shift_right(x, 31)
