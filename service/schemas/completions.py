"""POST /v1/completions: OpenAI's fields, and extensions that other servers have too."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Discriminator, Field, Tag

from service.schemas.common import (
    INT32_MAX,
    Logprobs,
    Many,
    ParseSpecial,
    Prompt,
    TopLogprobs,
    Usage,
)
from service.schemas.openai import OpenAIChoice, OpenAIRequest, OpenAIResponse
from service.schemas.states import LeftState, ReturnState, SessionId, StateSource, Ttl


def _one_or_many(value: Any) -> str | None:
    """A list is one prompt of ids, or many prompts as soon as it holds a string or a list."""
    if isinstance(value, str):
        return "<one>"
    if isinstance(value, list):
        return "<many>" if any(type(item) in (str, list) for item in value[:1]) else "<one>"
    return None


MaxTokens = Annotated[int, Field(ge=0, le=INT32_MAX)]
Prompts = Annotated[
    Annotated[Prompt, Tag("<one>")] | Annotated[Many[Prompt], Tag("<many>"), Field(min_length=1)],
    Discriminator(
        _one_or_many,
        custom_error_type="prompt_type",
        custom_error_message="must be a string, a list of strings, a list of token ids or a list "
        "of lists of token ids",
    ),
]


class CompletionRequest(OpenAIRequest):
    """null means the default, everywhere. `suffix` is accepted at its neutral value only."""

    prompt: Prompts | None = Field(
        description="null, or an empty text where the tokenizer puts nothing before one, stands "
        "for the end-of-text token; with state or session_id for nothing"
    )
    max_tokens: MaxTokens | None = Field(
        default=None, description="default 16; 0 reads the prompt only (with echo: scores it)"
    )
    max_completion_tokens: MaxTokens | None = Field(
        default=None, description="chat's name of max_tokens"
    )
    logprobs: TopLogprobs | None = None
    parse_special: ParseSpecial | None = None
    echo: bool | None = Field(
        default=None,
        description="the prompt before the answer. With logprobs and max_tokens 1 a token that "
        "ends the text is reported like any other, so that the arrays end with one drawn token",
    )
    best_of: Annotated[int, Field(ge=1)] | None = Field(
        default=None,
        description="draws so many samples (at least n) of each prompt and answers with the n of "
        "the highest mean log-probability per token; their tokens count in usage. Beyond n not "
        "with stream",
    )
    state: StateSource | None = None
    session_id: SessionId | None = None
    return_state: ReturnState | None = None
    state_ttl: Ttl | None = None
    suffix: str | None = Field(default=None, description="only null or empty")


class Choice(OpenAIChoice):
    text: str | None = Field(description="null without a tokenizer")
    logprobs: Logprobs | None
    state: LeftState | None = Field(default=None, description="with return_state or session_id")


class CompletionResponse(OpenAIResponse):
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
    "the best of four samples": {
        "value": {"prompt": "ROMEO:", "best_of": 4, "max_tokens": 16, "logprobs": 0, "seed": 1},
    },
    "scoring of a prompt": {
        "value": {"prompt": "To be, or not to be", "max_tokens": 0, "echo": True, "logprobs": 1},
    },
}
