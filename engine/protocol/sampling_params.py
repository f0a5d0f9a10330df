"""SamplingParams: how the tokens of one request are drawn, and what follows from that."""

from __future__ import annotations

from typing import Literal

import msgspec

from engine.protocol.logprobs import MOST_TOP

GrammarKind = Literal["json", "regex", "choice", "grammar"]


class Grammar(msgspec.Struct, frozen=True, array_like=True):
    """What the whole text of an answer has to match: a JSON schema, a regular expression, one of
    several texts (a JSON list of strings), or a grammar in Lark's or llama.cpp's notation."""

    kind: GrammarKind
    text: str


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """How the tokens of one request are drawn.

    Applied in this order: grammar, penalties, logit_bias, min_tokens, temperature, top_k, top_p,
    min_p. A draw depends on (seed, choice, position) and the logits alone; `position` counts
    generated tokens from 0.

    With a `grammar` the tokens that end an answer are possible where the text matches, and only
    there (those of stop_token_ids that are text also as text). Where nothing can follow, the
    answer ends by itself, with "stop", whatever min_tokens and ignore_eos say.
    """

    max_tokens: int = 16
    min_tokens: int = 0  # end-of-text and stop_token_ids are impossible before this many tokens
    temperature: float = 1.0  # 0 = greedy
    top_k: int = 0  # 0 = off
    top_p: float = 1.0  # 1 = off; the best token always stays: 0 = greedy
    min_p: float = 0.0  # 0 = off
    repetition_penalty: float = 1.0  # over the prompt's and the answer's tokens; 1 = off
    presence_penalty: float = 0.0  # over the answer's tokens
    frequency_penalty: float = 0.0  # over the answer's tokens
    logit_bias: dict[int, float] = {}
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    seed: int = 0  # in [0, 2**63)
    choice: int = 0  # which of n samples of one prompt this is
    logprobs: int | None = None  # None = none; k >= 0 = the token's own and the k best
    grammar: Grammar | None = None


MOST_OWNER_BYTES = 64  # of Request.owner in UTF-8
MOST_STOP_IDS = 8  # that the device looks for by itself


def stop_ids(params: SamplingParams, eos_token_ids: tuple[int, ...]) -> frozenset[int]:
    """The tokens that end an answer, where `eos_token_ids` end a text of the model."""
    if params.ignore_eos:
        return frozenset(params.stop_token_ids)
    return frozenset((*params.stop_token_ids, *eos_token_ids))


def endings(params: SamplingParams, eos_token_ids: tuple[int, ...]) -> frozenset[int]:
    """The tokens that min_tokens rules out: end-of-text, where it is ignored, too."""
    return frozenset((*params.stop_token_ids, *eos_token_ids))


def is_plain(params: SamplingParams, eos_token_ids: tuple[int, ...]) -> bool:
    """Whether the device can draw for the request, token after token, without the host."""
    return (
        params.grammar is None
        and top_of(params) <= MOST_TOP
        and len(params.stop_token_ids) + len(eos_token_ids) <= MOST_STOP_IDS
    )


def has_penalties(params: SamplingParams) -> bool:
    """Whether tokens that were there before are less likely, or more."""
    return (
        params.repetition_penalty != 1
        or params.presence_penalty != 0
        or params.frequency_penalty != 0
    )


def is_adjusted(params: SamplingParams) -> bool:
    """Whether logits are changed before a token is drawn from them, but by a grammar."""
    return bool(params.logit_bias) or params.min_tokens > 0 or has_penalties(params)


def top_of(params: SamplingParams) -> int:
    """How many best tokens are reported beside each token that is drawn; -1: not even that one."""
    return -1 if params.logprobs is None else params.logprobs


def is_greedy(params: SamplingParams) -> bool:
    """Whether each token is the most likely one: at temperature 0, or with a top_p of 0."""
    return params.temperature <= 0 or params.top_p <= 0
