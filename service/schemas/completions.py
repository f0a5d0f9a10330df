"""Request and answer of POST /v1/completions: OpenAI's fields and extensions."""

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
from service.schemas.states import LeftState, ReturnState, SessionId, StateSource, Ttl, Turn


def _one_or_many(value: Any) -> str | None:
    """Return the tag of a `prompt`, one or many.

    A list of strings or of lists is several prompts; a list of token ids is one.
    """
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
    """Prompts to continue, and how to sample the continuations. null means a field's default."""

    prompt: Prompts | None = Field(
        description="One or several prompts, each a string or a list of token ids. null, or an "
        "empty text if the tokenizer puts no token before a text, stands for the end-of-text "
        "token; with state or session_id it stands for an empty prompt."
    )
    max_tokens: MaxTokens | None = Field(
        default=None,
        description="Most tokens to generate. Default: 16. 0 only reads the prompt; with echo and "
        "logprobs it scores the prompt.",
    )
    max_completion_tokens: MaxTokens | None = Field(
        default=None, description="Another name of max_tokens, as the chat endpoint has it."
    )
    logprobs: TopLogprobs | None = None
    parse_special: ParseSpecial | None = None
    echo: bool | None = Field(
        default=None,
        description="Whether the answer begins with the prompt. With logprobs and max_tokens 1, a "
        "token that ends the text is reported like any other, so that the arrays always end with "
        "one sampled token.",
    )
    best_of: Annotated[int, Field(ge=1)] | None = Field(
        default=None,
        description="Samples to draw of each prompt, at least n. The answer holds the n samples "
        "with the highest mean log-probability per token; usage counts all of them. With stream: "
        "n only.",
    )
    state: StateSource | None = None
    session_id: SessionId | None = None
    turn: Turn | None = None
    return_state: ReturnState | None = None
    state_ttl: Ttl | None = None
    suffix: str | None = Field(
        default=None, description="Not supported: null or an empty string only."
    )


class Choice(OpenAIChoice):
    """One sampled continuation."""

    text: str | None = Field(description="The text; null for a model without a tokenizer.")
    logprobs: Logprobs | None
    state: LeftState | None = Field(
        default=None,
        description="The state at the answer's end, with return_state or session_id.",
    )


class CompletionResponse(OpenAIResponse):
    """The continuations. Choice i * n + j is sample j of prompt i."""

    choices: list[Choice]
    usage: Usage | None = None


EXAMPLES: dict[str, Any] = {
    "one prompt": {
        "value": {"prompt": "It was a dark night, and", "max_tokens": 32, "temperature": 0},
    },
    "three samples, streamed": {
        "value": {
            "prompt": "It was a dark night, and",
            "n": 3,
            "temperature": 0.8,
            "seed": 7,
            "stream": True,
            "stream_options": {"include_usage": True},
        },
    },
    "the best of four samples": {
        "value": {
            "prompt": "It was a dark night, and",
            "best_of": 4,
            "max_tokens": 16,
            "logprobs": 0,
            "seed": 1,
        },
    },
    "scoring of a prompt": {
        "value": {"prompt": "To be, or not to be", "max_tokens": 0, "echo": True, "logprobs": 1},
    },
}
