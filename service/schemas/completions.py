"""POST /v1/completions: OpenAI's fields, and extensions that other servers have too."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, Discriminator, Field, Tag

from service.schemas.common import (
    INT32_MAX,
    ErrorDetail,
    LogitBias,
    Logprobs,
    Many,
    MinP,
    MinTokens,
    Penalty,
    Prompt,
    RepetitionPenalty,
    RequestModel,
    Seed,
    Stop,
    Temperature,
    TokenId,
    TopK,
    TopLogprobs,
    TopP,
    Usage,
)


def _one_or_many(value: Any) -> str | None:
    """A list is one prompt of ids, or many prompts as soon as it holds a string or a list."""
    if isinstance(value, str):
        return "<one>"
    if isinstance(value, list):
        return "<many>" if any(type(item) in (str, list) for item in value[:1]) else "<one>"
    return None


Prompts = Annotated[
    Annotated[Prompt, Tag("<one>")] | Annotated[Many[Prompt], Tag("<many>"), Field(min_length=1)],
    Discriminator(
        _one_or_many,
        custom_error_type="prompt_type",
        custom_error_message="must be a string, a list of strings, a list of token ids or a list "
        "of lists of token ids",
    ),
]


class StreamOptions(RequestModel):
    include_usage: bool | None = Field(default=None, description="one last chunk with the usage")
    continuous_usage_stats: bool | None = Field(default=None, description="usage on every chunk")
    include_obfuscation: bool | None = Field(default=None, description="has no effect")


class CompletionRequest(RequestModel):
    """null means the default, everywhere. `best_of` and `suffix` are accepted at their neutral
    values only."""

    model: str | None = None
    prompt: Prompts
    max_tokens: Annotated[int, Field(ge=0, le=INT32_MAX)] | None = Field(
        default=None, description="default 16; 0 reads the prompt only (with echo: scores it)"
    )
    temperature: Temperature | None = None
    top_p: TopP | None = None
    n: Annotated[int, Field(ge=1)] | None = None
    stop: Stop | None = None
    seed: Seed | None = None
    logprobs: TopLogprobs | None = None
    echo: bool | None = None
    logit_bias: LogitBias | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    best_of: int | None = Field(default=None, description="only n (or null)")
    suffix: str | None = Field(default=None, description="only null or empty")
    # Extensions
    top_k: TopK | None = None
    min_p: MinP | None = None
    repetition_penalty: RepetitionPenalty | None = None
    min_tokens: MinTokens | None = None
    ignore_eos: bool | None = None
    stop_token_ids: Many[TokenId] | None = None
    return_token_ids: bool | None = None


class Choice(BaseModel):
    index: int
    text: str | None = Field(description="null without a tokenizer")
    logprobs: Logprobs | None
    finish_reason: str | None
    token_ids: list[int] | None = Field(default=None, description="with return_token_ids")
    prompt_token_ids: list[int] | None = Field(default=None, description="with return_token_ids")
    error: ErrorDetail | None = None


class CompletionResponse(BaseModel):
    id: str
    object: str
    created: int
    model: str
    choices: list[Choice]
    usage: Usage | None = None


EXAMPLES: dict[str, Any] = {
    "one prompt": {
        "value": {"prompt": "ROMEO:", "max_tokens": 32, "temperature": 0},
    },
    "three samples, streamed": {
        "value": {
            "prompt": "ROMEO:",
            "n": 3,
            "temperature": 0.8,
            "seed": 7,
            "stream": True,
            "stream_options": {"include_usage": True},
        },
    },
    "scoring of a prompt": {
        "value": {"prompt": "To be, or not to be", "max_tokens": 0, "echo": True, "logprobs": 1},
    },
}
