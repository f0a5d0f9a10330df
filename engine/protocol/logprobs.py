"""PackedLogprobs: token log-probabilities, kept in the device's format until they are read.

A round may produce thousands of them. One Python object each would take longer than the round.
"""

from __future__ import annotations

from array import array
from typing import NamedTuple

import msgspec

MOST_TOP = 20  # the most top tokens that the device reports with a token
WORDS = 2  # int32 words for the token itself and for each top token
WORD_BYTES = 4

_NO_IDS: list[int] = []  # shared by all results, which nobody modifies
_NO_VALUES: list[float] = []


def words_of_report(top: int) -> int:
    """Return the int32 words in one token's report with `top` top tokens."""
    return WORDS * (1 + top)


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Natural log-probabilities of one token, by log-softmax of the raw fp32 logits."""

    logprob: float  # log-probability of the sampled or scored token
    top_ids: list[int] = []  # the k most likely tokens, best first
    top_logprobs: list[float] = []  # log-probabilities of `top_ids`
    is_greedy: bool = False  # whether the token is the most likely one


class LogprobColumns(NamedTuple):
    """Reports of several tokens, as one list per field."""

    chosen: list[float]
    is_greedy: list[int]
    ids: list[int]  # top token ids, `PackedLogprobs.top` for each token
    values: list[float]  # log-probabilities of `ids`


class PackedLogprobs(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Reports of several tokens, packed as the device writes them."""

    top: int  # number of top tokens in each report
    packed: bytes  # int32 words, laid out as in engine/ops/logprobs.py

    def part(self, begin: int, end: int) -> PackedLogprobs:
        """Return the reports of tokens `begin` to `end` (exclusive)."""
        width = WORD_BYTES * words_of_report(self.top)
        return PackedLogprobs(self.top, self.packed[begin * width : end * width])

    def columns(self) -> LogprobColumns:
        """Unpack all reports into lists, one per field."""
        words, floats = array("i", self.packed), array("f", self.packed)
        every = 1 + self.top  # word pairs per report: the token's own, then one for each top token
        chosen, is_greedy = floats[:: WORDS * every].tolist(), words[1 :: WORDS * every].tolist()
        if not self.top:
            return LogprobColumns(chosen, is_greedy, [], [])
        ids, values = words[::WORDS].tolist(), floats[1::WORDS].tolist()
        del ids[::every], values[::every]
        return LogprobColumns(chosen, is_greedy, ids, values)

    def unpack(self) -> list[TokenLogprobs]:
        """Unpack all reports into one object per token."""
        chosen, is_greedy, ids, values = self.columns()
        if not self.top:
            pairs = zip(chosen, is_greedy, strict=True)
            return [TokenLogprobs(own, _NO_IDS, _NO_VALUES, greedy != 0) for own, greedy in pairs]
        top = self.top
        return [
            TokenLogprobs(own, ids[at : at + top], values[at : at + top], greedy != 0)
            for own, greedy, at in zip(chosen, is_greedy, range(0, len(ids), top), strict=True)
        ]
