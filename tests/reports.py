"""Reports as tests make them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from engine.protocol.logprobs import WORDS, PackedLogprobs, TokenLogprobs


def packed(tokens: Sequence[TokenLogprobs], top: int) -> PackedLogprobs:
    """What the device would give, each with `top` best tokens; values become float32."""
    words = np.empty((len(tokens), 1 + top, WORDS), np.int32)
    floats = words.view(np.float32)
    for at, one in enumerate(tokens):
        floats[at, 0, 0], words[at, 0, 1] = one.logprob, one.is_greedy
        words[at, 1:, 0], floats[at, 1:, 1] = one.top_ids, one.top_logprobs
    return PackedLogprobs(top, words.tobytes())


def in_float32(value: float) -> float:
    """The nearest value that a report can hold."""
    return float(np.float32(value))


def log32(x: float) -> float:
    """The natural logarithm as a report holds it."""
    return in_float32(math.log(x))
