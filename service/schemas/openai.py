"""What OpenAI's two endpoints share: parameters of sampling, extensions, ends of answers."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, Field

from service.schemas.common import (
    ErrorDetail,
    LogitBias,
    Many,
    MinP,
    MinTokens,
    Penalty,
    Priority,
    RepetitionPenalty,
    RequestModel,
    Seed,
    Stop,
    StreamInterval,
    StreamOptions,
    Temperature,
    Timeout,
    TokenId,
    TopK,
    TopP,
)
from service.schemas.states import CachePoints, CacheSalt
from service.schemas.structured import Choices, JsonSchema, ResponseFormat, StructuredOutputs

FORMER = "a former name of structured_outputs' field"


class OpenAIRequest(RequestModel):
    """null means the default, everywhere."""

    model: str | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    n: Annotated[int, Field(ge=1)] | None = None
    stop: Stop | None = None
    seed: Seed | None = None
    logit_bias: LogitBias | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    user: str | None = Field(default=None, description="without effect")
    # Extensions
    top_k: TopK | None = None
    min_p: MinP | None = None
    repetition_penalty: RepetitionPenalty | None = None
    min_tokens: MinTokens | None = None
    ignore_eos: bool | None = None
    stop_token_ids: Many[TokenId] | None = None
    return_token_ids: bool | None = None
    timeout: Timeout | None = None
    priority: Priority | None = None
    stream_interval: StreamInterval | None = None
    cache_salt: CacheSalt | None = None
    cache_points: CachePoints | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: JsonSchema | None = Field(default=None, description=FORMER)
    guided_regex: str | None = Field(default=None, description=FORMER)
    guided_choice: Choices | None = Field(default=None, description=FORMER)
    guided_grammar: str | None = Field(default=None, description=FORMER)


class OpenAIChoice(BaseModel):
    """How an answer ended, beside what it says."""

    index: int
    finish_reason: str | None
    token_ids: list[int] | None = Field(default=None, description="with return_token_ids")
    prompt_token_ids: list[int] | None = Field(default=None, description="with return_token_ids")
    error: ErrorDetail | None = None


class OpenAIResponse(BaseModel):
    """Beside its choices."""

    id: str
    object: str
    created: int
    model: str
