"""Random streams, ranking and reports: pure functions of tensors, equal on every device.

Logits are fp32 [rows, vocab]; nothing here waits for the device. A row's result depends on that row
only, bit for bit: every operation is elementwise, or a sum in a fixed order
(`ops.target_logprobs`). Sampling itself is done by an operator (`ops.sample_`).
"""

from __future__ import annotations

from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine import ops
from engine.protocol.logprobs import MOST_TOP

# splitmix64 (Steele, Lea, Flood, "Fast splittable pseudorandom number generators", 2014), with its
# constants as signed 64-bit integers; int64 tensors and arrays wrap around as required.
_GOLDEN = 0x9E3779B97F4A7C15 - 2**64
_MIX_1 = 0xBF58476D1CE4E5B9 - 2**64
_MIX_2 = 0x94D049BB133111EB - 2**64

Int64 = TypeVar("Int64", Tensor, NDArray[np.int64])


def ranked(logits: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Return the `width` best logits of each row as (values, ids), best first.

    Equal logits are ordered by id, lowest first. torch.topk leaves their order open, and 16-bit
    models have many. So the ranking uses unique integers: a logit's order-preserving bits followed
    by its inverted id.
    """
    vocab = logits.shape[-1]
    bits = (logits + 0.0).view(torch.int32)  # + 0.0 turns -0.0 into 0.0, its equal
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # negative floats: larger magnitude, smaller value
    inverted = torch.arange(vocab - 1, -1, -1, device=logits.device)
    keys = (ordered.long() << 32) | inverted  # [rows, vocab]
    ids = vocab - 1 - (keys.topk(min(width, vocab), dim=-1).values & 0xFFFFFFFF)
    return logits.gather(-1, ids), ids


def stream_ids(seeds: Int64, choices: Int64) -> Int64:
    """Return the random stream id for each (seed, choice): int64 [rows]."""
    return _mix(_mix(seeds) + (choices + 1) * _GOLDEN)


def token_reports(logits: Tensor, tokens: Tensor, top: int) -> Tensor:
    """Return reports as `ops.target_logprobs` does, with any number of top tokens."""
    if top <= MOST_TOP:
        return ops.target_logprobs(logits, tokens, top)
    values, ids = ranked(logits, top)
    # The best token's log-probability is minus the logarithm of the sum of all exp(logit - best).
    minus_log = ops.read_reports(ops.target_logprobs(logits, ids[:, 0])).chosen
    logprobs = (values - values[:, :1]) + minus_log.unsqueeze(-1)
    best = torch.stack([ids.int(), logprobs.view(torch.int32)], dim=-1)
    return torch.cat([ops.target_logprobs(logits, tokens), best.flatten(1)], dim=-1)


def _shift_right(x: Int64, bits: int) -> Int64:
    """Shift int64 as if it were unsigned."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mix(x: Int64) -> Int64:
    """Apply splitmix64's finaliser, a bijection on 64 bits that spreads every bit over all."""
    x = (x ^ _shift_right(x, 30)) * _MIX_1
    x = (x ^ _shift_right(x, 27)) * _MIX_2
    return x ^ _shift_right(x, 31)
