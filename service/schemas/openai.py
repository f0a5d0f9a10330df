"""Fields that OpenAI's two endpoints share: sampling parameters, extensions, parts of answers."""

from __future__ import annotations

from typing import Annotated, Any

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
from service.schemas.only import Only
from service.schemas.states import CachePoints, CacheSalt, NoCache
from service.schemas.structured import Choices, JsonSchema, ResponseFormat, StructuredOutputs

FORMER = "vLLM's former name of a field of structured_outputs."


class OpenAIRequest(RequestModel):
    """Fields of both OpenAI endpoints. null means a field's default."""

    model: str | None = Field(
        default=None, description="The model's name. Default: the model that is served."
    )
    temperature: Temperature | None = None
    top_p: TopP | None = None
    n: Annotated[int, Field(ge=1)] | None = Field(
        default=None, description="Samples of each prompt. Default: 1."
    )
    stop: Stop | None = None
    seed: Seed | None = None
    logit_bias: LogitBias | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    user: str | None = Field(default=None, description="Has no effect.")
    # Extensions
    top_k: TopK | None = None
    min_p: MinP | None = None
    repetition_penalty: RepetitionPenalty | None = None
    min_tokens: MinTokens | None = None
    ignore_eos: bool | None = Field(
        default=None, description="Whether to go on after an end-of-text token."
    )
    stop_token_ids: Many[TokenId] | None = Field(
        default=None, description="Further tokens that end the answer."
    )
    return_token_ids: bool | None = Field(
        default=None, description="Whether to return the token ids of prompt and answer."
    )
    timeout: Timeout | None = None
    priority: Priority | None = None
    stream_interval: StreamInterval | None = None
    cache_salt: CacheSalt | None = None
    cache_points: CachePoints | None = None
    no_cache: NoCache | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: JsonSchema | None = Field(default=None, description=FORMER)
    guided_regex: str | None = Field(default=None, description=FORMER)
    guided_choice: Choices | None = Field(default=None, description=FORMER)
    guided_grammar: str | None = Field(default=None, description=FORMER)
    # Not supported. vllm-router reads a request into fields of SGLang, and sends these with their
    # defaults even where the client did not.
    no_stop_trim: Annotated[Any, Only(None, False)] = None
    return_hidden_states: Annotated[Any, Only(None, False)] = None
    skip_special_tokens: Annotated[Any, Only(None, True)] = None


class OpenAIChoice(BaseModel):
    """Fields of a choice that both OpenAI endpoints have."""

    index: int
    finish_reason: str | None
    token_ids: list[int] | None = Field(
        default=None, description="Tokens of the answer, with return_token_ids."
    )
    prompt_token_ids: list[int] | None = Field(
        default=None, description="Tokens of the prompt, with return_token_ids."
    )
    error: ErrorDetail | None = None


class OpenAIResponse(BaseModel):
    """Fields of an answer that both OpenAI endpoints have."""

    id: str
    object: str
    created: int
    model: str
