"""Request and answer of POST /v1/generate: a batch of prompts, each with its own parameters."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, Field

from engine.protocol.requests import FinishReason
from service.schemas.common import (
    ErrorDetail,
    LogitBias,
    Logprobs,
    Many,
    MaxTokens,
    MinP,
    MinTokens,
    ParseSpecial,
    Penalty,
    PerPrompt,
    PerPromptList,
    Priority,
    Prompt,
    RepetitionPenalty,
    RequestModel,
    Seed,
    Stop,
    StreamInterval,
    Temperature,
    Timeout,
    TokenId,
    TopK,
    TopLogprobs,
    TopP,
    Usage,
)
from service.schemas.states import (
    CachePoints,
    CacheSalt,
    LeftState,
    NoCache,
    ReturnState,
    SessionId,
    StateSource,
    Ttl,
    Turn,
)
from service.schemas.structured import ResponseFormat, StructuredOutputs


class GenerateRequest(RequestModel):
    """Prompts to continue, and their parameters.

    A parameter is one value for all prompts, or a list with one value per prompt; for `stop`,
    `stop_token_ids` and `cache_points` that is a list of lists.
    """

    prompts: Many[Prompt] = Field(
        min_length=1, description="The prompts, each a string or a list of token ids."
    )
    model: str | None = Field(
        default=None, description="The model's name. Default: the model that is served."
    )
    max_tokens: PerPrompt[MaxTokens] = None
    min_tokens: PerPrompt[MinTokens] = None
    temperature: PerPrompt[Temperature] = None
    top_k: PerPrompt[TopK] = None
    top_p: PerPrompt[TopP] = None
    min_p: PerPrompt[MinP] = None
    repetition_penalty: PerPrompt[RepetitionPenalty] = None
    presence_penalty: PerPrompt[Penalty] = None
    frequency_penalty: PerPrompt[Penalty] = None
    logit_bias: PerPrompt[LogitBias] = None
    seed: PerPrompt[Seed] = None
    stop: PerPromptList[Stop] = None
    stop_token_ids: PerPromptList[Many[TokenId]] = Field(
        default=None, description="Further tokens that end the answer."
    )
    ignore_eos: PerPrompt[bool] = Field(
        default=None, description="Whether to go on after an end-of-text token."
    )
    logprobs: PerPrompt[TopLogprobs] = None
    timeout: PerPrompt[Timeout] = None
    priority: PerPrompt[Priority] = None
    response_format: PerPrompt[ResponseFormat] = None
    structured_outputs: PerPrompt[StructuredOutputs] = None
    state: PerPrompt[StateSource] = None
    session_id: PerPrompt[SessionId] = None
    turn: PerPrompt[Turn] = None
    return_state: PerPrompt[ReturnState] = None
    state_ttl: PerPrompt[Ttl] = None
    cache_salt: PerPrompt[CacheSalt] = None
    cache_points: PerPromptList[CachePoints] = None
    no_cache: PerPrompt[NoCache] = None
    parse_special: ParseSpecial | None = None
    stream: bool | None = Field(
        default=None, description="Whether to answer with server-sent events."
    )
    stream_interval: StreamInterval | None = None


class GenerateResult(BaseModel):
    """The continuation of one prompt, or the `error` with which this prompt alone failed."""

    index: int = Field(description="Index of the prompt.")
    text: str | None = Field(
        default=None, description="The text; null for a model without a tokenizer."
    )
    token_ids: list[int] = []
    finish_reason: FinishReason | None = None
    logprobs: Logprobs | None = None
    usage: Usage | None = None
    state: LeftState | None = Field(
        default=None,
        description="The state at the answer's end, with return_state or session_id.",
    )
    error: ErrorDetail | None = None


class GenerateResponse(BaseModel):
    """One result per prompt, in the order of the prompts."""

    id: str
    model: str
    results: list[GenerateResult]
    usage: Usage


EXAMPLES: dict[str, Any] = {
    "one prompt, greedy": {
        "value": {"prompts": ["It was a dark night, and"], "max_tokens": 32, "temperature": 0},
    },
    "a batch": {
        "value": {
            "prompts": ["It was a dark night, and", '"My dear," said'],
            "max_tokens": [16, 24],
            "temperature": 0.8,
            "top_k": 40,
            "seed": [1, 2],
            "stop": ["\n\n"],
            "logprobs": 2,
        },
    },
    "one of three answers": {
        "value": {
            "prompts": ["To be, or not to "],
            "structured_outputs": {"choice": ["be", "do", "sleep"]},
        },
    },
    "a turn of a session": {
        "value": {
            "prompts": ['"Who is there?" said Emma.\n\n'],
            "session_id": "emma",
            "max_tokens": 24,
        },
    },
    "streamed": {
        "value": {"prompts": ["My dear", [74, 85, 76]], "max_tokens": 16, "stream": True},
    },
}
