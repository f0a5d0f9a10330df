"""SamplingParams: how the tokens of one request are sampled, and properties derived from it."""

from __future__ import annotations

from typing import Literal

import msgspec

from engine.protocol.logprobs import MOST_TOP

GrammarKind = Literal["json", "regex", "choice", "grammar"]


class Grammar(msgspec.Struct, frozen=True, array_like=True):
    """A constraint that the whole text of an answer must match.

    `text` is, by kind: a JSON schema, a regular expression, a JSON list of strings of which one is
    chosen, or a grammar in Lark's or llama.cpp's notation.
    """

    kind: GrammarKind
    text: str


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """How the tokens of one request are sampled.

    The stages are applied in this order: grammar, penalties, logit_bias, min_tokens, temperature,
    top_k, top_p, min_p. A draw depends only on (seed, choice, position) and the logits; `position`
    counts generated tokens from 0.

    With a `grammar`, tokens that end an answer are allowed only where the text matches.
    (stop_token_ids that stand for text are also allowed as text.) Where nothing can follow, the
    answer ends with "stop", whatever min_tokens and ignore_eos say.
    """

    max_tokens: int = 16
    min_tokens: int = 0  # end-of-text and stop_token_ids are masked before this many tokens
    temperature: float = 1.0  # 0 = greedy
    top_k: int = 0  # 0 = off
    top_p: float = 1.0  # 1 = off; the best token always stays, so 0 = greedy
    min_p: float = 0.0  # 0 = off
    repetition_penalty: float = 1.0  # over the tokens of prompt and answer; 1 = off
    presence_penalty: float = 0.0  # over the answer's tokens
    frequency_penalty: float = 0.0  # over the answer's tokens
    logit_bias: dict[int, float] = {}
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    seed: int = 0  # in [0, 2**63)
    choice: int = 0  # index among the n samples of one prompt
    logprobs: int | None = None  # None = off; k >= 0 = the token's own and those of the k best
    grammar: Grammar | None = None


MOST_OWNER_BYTES = 64  # the most bytes of Request.owner, in UTF-8
MOST_STOP_IDS = 8  # the most stop ids that the device checks by itself


def stop_ids(params: SamplingParams, eos_token_ids: tuple[int, ...]) -> frozenset[int]:
    """Return the tokens that end an answer; `eos_token_ids` are the model's."""
    if params.ignore_eos:
        return frozenset(params.stop_token_ids)
    return frozenset((*params.stop_token_ids, *eos_token_ids))


def endings(params: SamplingParams, eos_token_ids: tuple[int, ...]) -> frozenset[int]:
    """Return the tokens that min_tokens masks; they include end-of-text even with ignore_eos."""
    return frozenset((*params.stop_token_ids, *eos_token_ids))


def is_plain(params: SamplingParams, eos_token_ids: tuple[int, ...]) -> bool:
    """Return whether the device can sample for the request without the host, step after step."""
    return (
        params.grammar is None
        and top_of(params) <= MOST_TOP
        and len(params.stop_token_ids) + len(eos_token_ids) <= MOST_STOP_IDS
    )


def has_penalties(params: SamplingParams) -> bool:
    """Return whether any penalty changes the logits of tokens that occurred before."""
    return (
        params.repetition_penalty != 1
        or params.presence_penalty != 0
        or params.frequency_penalty != 0
    )


def is_adjusted(params: SamplingParams) -> bool:
    """Return whether logit_bias, min_tokens or penalties change the logits; ignores grammars."""
    return bool(params.logit_bias) or params.min_tokens > 0 or has_penalties(params)


def top_of(params: SamplingParams) -> int:
    """Return how many top tokens to report with each sampled token; -1: no log-probabilities."""
    return -1 if params.logprobs is None else params.logprobs


def is_greedy(params: SamplingParams) -> bool:
    """Return whether each token is the most likely one: temperature 0 or top_p 0."""
    return params.temperature <= 0 or params.top_p <= 0
