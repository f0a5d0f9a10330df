"""PackedLogprobs: log-probabilities of tokens, packed as the device gives them until somebody reads
them.

A round may bring those of thousands of tokens, and an object of each would cost the engine more
than the round does.
"""

from __future__ import annotations

from array import array
from typing import NamedTuple

import msgspec

MOST_TOP = 20  # best tokens that the device reports beside a token
WORDS = 2  # int32, of a token and of each of the best tokens beside it
WORD_BYTES = 4

_NO_IDS: list[int] = []  # nobody changes what was unpacked, so all may share them
_NO_VALUES: list[float] = []


def words_of_report(top: int) -> int:
    """Words of a token's report with so many best tokens."""
    return WORDS * (1 + top)


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Natural log-probabilities of one token, from the log-softmax of the raw fp32 logits."""

    logprob: float  # of the token that was drawn or scored
    top_ids: list[int] = []  # the k best, best first
    top_logprobs: list[float] = []
    is_greedy: bool = False  # the token is the most likely one


class LogprobColumns(NamedTuple):
    """Reports as lists."""

    chosen: list[float]
    is_greedy: list[int]
    ids: list[int]  # of the best, `PackedLogprobs.top` for each token
    values: list[float]  # their log-probabilities


class PackedLogprobs(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Log-probabilities of some tokens, packed as the device reports them."""

    top: int  # how many best tokens each has
    packed: bytes  # int32 words, as engine/ops/logprobs.py says

    def part(self, begin: int, end: int) -> PackedLogprobs:
        """Of tokens `begin` to `end`."""
        width = WORD_BYTES * words_of_report(self.top)
        return PackedLogprobs(self.top, self.packed[begin * width : end * width])

    def columns(self) -> LogprobColumns:
        """Of all tokens, one after the other."""
        words, floats = array("i", self.packed), array("f", self.packed)
        every = 1 + self.top  # pairs of words: a token's own, then one for each of the best
        chosen, is_greedy = floats[:: WORDS * every].tolist(), words[1 :: WORDS * every].tolist()
        if not self.top:
            return LogprobColumns(chosen, is_greedy, [], [])
        ids, values = words[::WORDS].tolist(), floats[1::WORDS].tolist()
        del ids[::every], values[::every]
        return LogprobColumns(chosen, is_greedy, ids, values)

    def unpack(self) -> list[TokenLogprobs]:
        """Of each token."""
        chosen, is_greedy, ids, values = self.columns()
        if not self.top:
            pairs = zip(chosen, is_greedy, strict=True)
            return [TokenLogprobs(own, _NO_IDS, _NO_VALUES, greedy != 0) for own, greedy in pairs]
        top = self.top
        return [
            TokenLogprobs(own, ids[at : at + top], values[at : at + top], greedy != 0)
            for own, greedy, at in zip(chosen, is_greedy, range(0, len(ids), top), strict=True)
        ]
