"""What sampling parameters ask for, as questions that the engine asks of them."""

from __future__ import annotations

from engine.protocol.logprobs import MOST_TOP
from engine.protocol.messages import (
    SamplingParams,
)

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
