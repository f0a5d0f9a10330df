"""Draws as whole-tensor arithmetic with a sort, to compare the operator with.

Filters and draws take octaves: a token at -3 is an eighth as likely as the best one, at 0. A row's
result depends on that row alone, bit for bit: every step is element by element, or a sum of
integers. On CUDA the operator has the very same bits; on the CPU its powers of two are others,
within 1.1 ulp.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.runner.sampling.random_streams import _GOLDEN, _mix, _shift_right, ranked

# The most likely token weighs 2**38, so a vocabulary of 2**24 sums to less than 2**63. Tokens less
# than 2**-38 times as likely as the best are not drawn but by a try that nothing filters.
_WEIGHT_ONE = 2.0**38
_LOG2_E = 1.44269504  # as float32


def octaves(logits: Tensor, best: Tensor, temperature: Tensor) -> Tensor:
    """Likelihoods beside the best token's as powers of two: fp32 [rows, vocab], 0 and less.

    best is fp32 [rows], temperature fp32 [rows, 1]. With the best at 0, no temperature can overflow
    to +infinity.
    """
    each = (
        torch.full_like(temperature, _LOG2_E) / temperature
    )  # as octaves_of in csrc/sampling/sample.h
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


def uniform(streams: Tensor, positions: Tensor, refused: int = 0) -> Tensor:
    """Number `positions[i]` of stream `streams[i]`, uniform in [0, 1): float64 [rows].

    Random access into splitmix64, as `engine.runner.sampling.random_streams` has it: its state
    after n steps is known without taking them. After so many that were refused, that number of the
    stream that begins with the first one's bits.
    """
    bits = _mix(streams + (positions + 1) * _GOLDEN)
    if refused > 0:
        bits = _mix(bits + torch.full_like(bits, refused + 1) * _GOLDEN)
    return _shift_right(bits, 11).double() * 2.0**-53


def sample_unfiltered(logits: Tensor, best: Tensor, temperature: Tensor, numbers: Tensor) -> Tensor:
    """The token of each row that a number (float64 [rows], in [0, 1)) finds: int64 [rows].

    A section of 512 neighbours weighs what its tokens do beside its own best, times what that best
    one's odds to the row's are; `best` is fp32 [rows], `temperature` fp32 [rows, 1]. The number
    finds a section, and what is left of it the token.
    """
    each = torch.full_like(temperature, _LOG2_E) / temperature
    rows, vocab = logits.shape
    padded = logits.new_full((rows, -(-vocab // 512) * 512), -torch.inf)
    padded[:, :vocab] = logits
    sections = padded.view(rows, -1, 512)
    own = sections.amax(dim=-1)  # [rows, sections]
    beside = own.masked_fill(own == -torch.inf, 0.0)
    odds = ((sections - beside.unsqueeze(-1)) * each.unsqueeze(-1)).exp2()
    weights = (odds * _WEIGHT_ONE).long()
    sums = weights.sum(dim=-1)
    of_sections = (sums.double() * octaves(own, best, temperature).exp2().double()).long()
    cumulative = of_sections.cumsum(dim=-1)
    total = cumulative[:, -1:]
    places = numbers.unsqueeze(-1) * total
    target = torch.minimum(places.long(), total - 1)
    found = torch.searchsorted(cumulative, target, right=True).clamp(max=own.shape[-1] - 1)
    weight, all_weights = of_sections.gather(-1, found), sums.gather(-1, found)
    share = (places - (cumulative.gather(-1, found) - weight).double()) / weight.double()
    within = (share * all_weights.double()).long().clamp(min=0)
    within = torch.minimum(within, all_weights - 1)
    tokens = weights.gather(1, found.unsqueeze(-1).expand(-1, -1, 512)).squeeze(1).cumsum(dim=-1)
    token = found * 512 + torch.searchsorted(tokens, within, right=True)
    return token.squeeze(-1).clamp(max=vocab - 1)


def sample(octaves: Tensor, numbers: Tensor) -> Tensor:
    """The token of each row at which the cumulative distribution passes `numbers` (float64
    [rows], in [0, 1)): int64 [rows]."""
    cumulative = _weights(octaves).cumsum(dim=-1)
    total = cumulative[:, -1]
    # The product may round up to the total, which is one past the last weight.
    target = torch.minimum((numbers * total).long(), total - 1)
    ids = torch.searchsorted(cumulative, target.unsqueeze(-1), right=True).squeeze(-1)
    return ids.clamp(max=octaves.shape[-1] - 1)  # a row of NaN has no order to search


def _weights(octaves: Tensor) -> Tensor:
    """Probabilities times a constant of the row, in fixed point: int64, best = 2**38."""
    best = octaves.amax(dim=-1, keepdim=True)
    return ((octaves - best).exp2() * _WEIGHT_ONE).long()
