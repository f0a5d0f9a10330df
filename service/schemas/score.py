"""POST /v1/score: log-probabilities of texts, or of continuations of contexts."""

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
    ReturnState,
    StateSource,
    Ttl,
)


class ScoreItem(RequestModel):
    """A context, which is read once, and what may follow it."""

    context: Prompt
    continuations: Many[Prompt] = Field(min_length=1)


class ScoreRequest(RequestModel):
    """Exactly one of `texts` and `items`."""

    texts: Many[Prompt] | None = Field(default=None, min_length=1)
    items: Many[ScoreItem] | None = Field(default=None, min_length=1)
    model: str | None = None
    timeout: Timeout | None = Field(
        default=None, description="seconds from its arrival; what is not scored then is an error"
    )
    priority: Priority | None = None
    state: StateSource | None = None
    return_state: ReturnState | None = None
    state_ttl: Ttl | None = None
    cache_salt: CacheSalt | None = None
    cache_points: CachePoints | None = None

    @model_validator(mode="after")
    def _one_kind(self) -> ScoreRequest:
        if (self.texts is None) == (self.items is None):
            raise PydanticCustomError(
                "one_of", "exactly one of the fields texts and items must be given"
            )
        return self


class TextScore(BaseModel):
    """Natural logarithms; the first token has no log-probability, but after a state."""

    index: int
    token_ids: list[int] = []
    token_logprobs: list[float | None] = []
    total_logprob: float | None = None
    num_scored_tokens: int | None = None
    perplexity: float | None = None
    bits_per_byte: float | None = None
    state: LeftState | None = Field(default=None, description="with return_state")
    error: ErrorDetail | None = None


class ContinuationScore(BaseModel):
    logprob: float | None = None
    num_tokens: int | None = None
    token_logprobs: list[float] = []
    is_greedy: bool | None = Field(
        default=None, description="each token is the most likely one: greedy decoding gives it"
    )
    error: ErrorDetail | None = None


class ItemScore(BaseModel):
    index: int
    continuations: list[ContinuationScore]


class ScoreResponse(BaseModel):
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
