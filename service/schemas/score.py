"""Request and answer of POST /v1/score: log-probabilities of texts or continuations."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, Field, model_validator
from pydantic_core import PydanticCustomError

from service.schemas.common import (
    ErrorDetail,
    Many,
    Priority,
    Prompt,
    RequestModel,
    Timeout,
    Usage,
)
from service.schemas.states import (
    CachePoints,
    CacheSalt,
    LeftState,
    NoCache,
    ReturnState,
    StateSource,
    Ttl,
)


class ScoreItem(RequestModel):
    """A context, which is read once, and the continuations to score after it."""

    context: Prompt
    continuations: Many[Prompt] = Field(min_length=1)


class ScoreRequest(RequestModel):
    """Texts to score, or contexts with continuations: exactly one of `texts` and `items`."""

    texts: Many[Prompt] | None = Field(
        default=None, min_length=1, description="Texts to score, each from its second token on."
    )
    items: Many[ScoreItem] | None = Field(
        default=None, min_length=1, description="Contexts with the continuations to score."
    )
    model: str | None = Field(
        default=None, description="The model's name. Default: the model that is served."
    )
    timeout: Timeout | None = Field(
        default=None,
        description="Seconds from the request's arrival; a text that is not scored by then is an "
        "error.",
    )
    priority: Priority | None = None
    state: StateSource | None = None
    return_state: ReturnState | None = None
    state_ttl: Ttl | None = None
    cache_salt: CacheSalt | None = None
    cache_points: CachePoints | None = None
    no_cache: NoCache | None = None

    @model_validator(mode="after")
    def _one_kind(self) -> ScoreRequest:
        if (self.texts is None) == (self.items is None):
            raise PydanticCustomError(
                "one_of", "exactly one of the fields texts and items must be given"
            )
        return self


class TextScore(BaseModel):
    """The score of one text, with natural logarithms.

    The first token's log-probability is null, unless the text continues a state.
    """

    index: int = Field(description="Index of the text.")
    token_ids: list[int] = []
    token_logprobs: list[float | None] = []
    total_logprob: float | None = None
    num_scored_tokens: int | None = None
    perplexity: float | None = None
    bits_per_byte: float | None = None
    state: LeftState | None = Field(
        default=None, description="The state after the text, with return_state."
    )
    error: ErrorDetail | None = None


class ContinuationScore(BaseModel):
    """The score of one continuation, with natural logarithms."""

    logprob: float | None = None
    num_tokens: int | None = None
    token_logprobs: list[float] = []
    is_greedy: bool | None = Field(
        default=None,
        description="Whether each token is the most likely one, so that greedy decoding would give "
        "this continuation.",
    )
    error: ErrorDetail | None = None


class ItemScore(BaseModel):
    """The scores of one context's continuations."""

    index: int = Field(description="Index of the item.")
    continuations: list[ContinuationScore]


class ScoreResponse(BaseModel):
    """One result per text or item, in their order."""

    id: str
    model: str
    results: list[TextScore] | list[ItemScore]
    usage: Usage


EXAMPLES: dict[str, Any] = {
    "texts": {"value": {"texts": ["To be, or not to be", [84, 111, 32, 98, 101]]}},
    "continuations of a context": {
        "value": {
            "items": [{"context": "To be, or not to", "continuations": [" be", " see"]}],
        },
    },
}
