"""Wire types that several endpoints share: base model, prompts, sampling, usage, errors."""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from engine.protocol.requests import LEAST_PRIORITY, MOST_PRIORITY

INT32_MAX = 2**31 - 1
MOST_BIAS = 100
MOST_INTERVAL = 1024


class RequestModel(BaseModel):
    """Base of request bodies: unknown fields, NaN and values of another JSON type are errors."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _name_unknown_field(cls, data: Any) -> Any:
        fields = cls.model_fields
        if isinstance(data, dict) and not data.keys() <= fields.keys():
            unknown = next(field for field in data if field not in fields)
            raise PydanticCustomError(
                "unknown_field",
                "unknown field; allowed: {allowed}",
                {"field": str(unknown), "allowed": ", ".join(fields)},
            )
        return data


T = TypeVar("T")
# A list whose validation stops at the first wrong entry, because it may hold a million entries.
Many = Annotated[list[T], Field(fail_fast=True)]

# Tags of unions are in angle brackets, so that service.http.errors can omit them from the paths of
# parameters.
TokenId = Annotated[int, Field(ge=0, le=INT32_MAX)]
Prompt = Annotated[
    Annotated[str, Tag("<text>")] | Annotated[Many[TokenId], Tag("<ids>")],
    Discriminator(
        lambda value: {str: "<text>", list: "<ids>"}.get(type(value)),
        custom_error_type="prompt_type",
        custom_error_message="must be a string or a list of token ids",
    ),
]


def _token_key(key: Any) -> Any:
    """Convert a token id that is a JSON key, and so a string, to an integer."""
    if isinstance(key, str) and key.isascii() and key.isdigit() and len(key) <= 10:
        return int(key)
    return key


def _first_wrong_entry(value: Any, validate: ValidatorFunctionWrapHandler) -> Any:
    """Validate a logit_bias so that only its first wrong entry is reported, as `Many` does."""
    if isinstance(value, dict):
        for key, bias in value.items():
            token = _token_key(key)
            if not (
                type(token) is int
                and 0 <= token <= INT32_MAX
                and type(bias) in (int, float)
                and -MOST_BIAS <= bias <= MOST_BIAS
            ):
                validate({key: bias})
    return validate(value)


MaxTokens = Annotated[int, Field(ge=1, le=INT32_MAX, description="Most tokens to generate.")]
MinTokens = Annotated[
    int,
    Field(
        ge=0,
        le=INT32_MAX,
        description="Tokens before which neither an end-of-text token nor one of stop_token_ids is "
        "sampled.",
    ),
]
Temperature = Annotated[
    float, Field(ge=0, le=100, description="Sampling temperature; 0 = greedy. Default: 1.")
]
TopK = Annotated[
    int,
    Field(
        ge=-1,
        le=INT32_MAX,
        description="Sample from the K most likely tokens; 0 or -1 = off.",
    ),
]
TopP = Annotated[
    float,
    Field(
        ge=0,
        le=1,
        description="Sample from the most likely tokens whose probabilities add up to P; 1 = off, "
        "0 = the most likely token only.",
    ),
]
MinP = Annotated[
    float,
    Field(
        ge=0,
        le=1,
        description="Drop tokens less likely than P times the most likely one; 0 = off.",
    ),
]
RepetitionPenalty = Annotated[
    float, Field(gt=0, le=100, description="Penalty of tokens of the prompt and answer; 1 = off.")
]
Penalty = Annotated[
    float, Field(ge=-2, le=2, description="Penalty of the answer's tokens; 0 = off.")
]
LogitBias = Annotated[
    dict[
        Annotated[int, BeforeValidator(_token_key), Field(ge=0, le=INT32_MAX)],
        Annotated[float, Field(ge=-MOST_BIAS, le=MOST_BIAS)],
    ],
    WrapValidator(_first_wrong_entry),
]
Timeout = Annotated[
    float,
    Field(
        gt=0,
        description="Seconds from the request's arrival after which its answer ends, with "
        "finish_reason timeout.",
    ),
]
Priority = Annotated[
    int,
    Field(
        ge=LEAST_PRIORITY,
        le=MOST_PRIORITY,
        description="Requests with a lower value are served earlier. Default: 0. An API key may "
        "have a lower bound.",
    ),
]
Seed = Annotated[
    int, Field(ge=-(2**63), lt=2**63, description="Seed of the sampling; null = a random one.")
]
TopLogprobs = Annotated[
    int,
    Field(
        ge=0,
        description="Log-probabilities: null = none; k = of each token and of the k most likely "
        "tokens at its place.",
    ),
]
StopString = Annotated[str, Field(min_length=1)]
Stop = Annotated[
    Annotated[StopString, Tag("<string>")] | Annotated[Many[StopString], Tag("<strings>")],
    Discriminator(
        lambda value: {str: "<string>", list: "<strings>"}.get(type(value)),
        custom_error_type="stop_type",
        custom_error_message="must be a string or a list of strings",
    ),
    Field(description="Strings that end the answer; they are not part of it."),
]


def _one_or_each(value: Any) -> str:
    return "<each>" if isinstance(value, list) else "<one>"


def _one_or_each_list(value: Any) -> str:
    """Return the tag for a parameter that is itself a list.

    A list with a list or null inside holds one value per prompt.
    """
    listed = isinstance(value, list) and any(item is None or type(item) is list for item in value)
    return "<each>" if listed else "<one>"


# One value for all prompts, or a list with one value per prompt.
PerPrompt = Annotated[
    Annotated[T | None, Tag("<one>")] | Annotated[Many[T | None], Tag("<each>")],
    Discriminator(_one_or_each),
]
PerPromptList = Annotated[
    Annotated[T | None, Tag("<one>")] | Annotated[Many[T | None], Tag("<each>")],
    Discriminator(_one_or_each_list),
]


StreamInterval = Annotated[
    int,
    Field(
        ge=1,
        le=MOST_INTERVAL,
        description="With stream: tokens per event. The first token is sent at once, and no token "
        "is held back for more than 50 ms. Default: the server's setting.",
    ),
]


ParseSpecial = Annotated[
    bool,
    Field(
        description="Whether special tokens that are spelled out in a prompt's text become these "
        "tokens, for clients that render templates themselves. Do not use it with text that others "
        "have written: they could end or begin a turn. Default: false, they are plain text.",
    ),
]


class StreamOptions(RequestModel):
    """What a stream holds beside the text."""

    include_usage: bool | None = Field(
        default=None, description="Whether a last chunk tells the usage."
    )
    continuous_usage_stats: bool | None = Field(
        default=None, description="Whether every chunk tells the usage."
    )
    include_obfuscation: bool | None = Field(default=None, description="Has no effect.")


class PromptTokensDetails(BaseModel):
    """How much of the prompts came from the prefix cache."""

    cached_tokens: int = Field(
        description="Prompt tokens that were found in the prefix cache and not read again."
    )


class Usage(BaseModel):
    """Tokens that a request read and generated."""

    prompt_tokens: int = Field(
        description="Tokens of the prompts, without those of a state that the request started from."
    )
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | None = None


class Logprobs(BaseModel):
    """Log-probabilities (natural logarithms) as parallel arrays with one entry per token."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class ErrorDetail(BaseModel):
    """An error. `code` is stable and machine-readable; `param` names the wrong parameter."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """The body of every error answer."""

    error: ErrorDetail


def statuses(answer: type[BaseModel], *, streams: bool = False) -> dict[int | str, dict[str, Any]]:
    """Return FastAPI's `responses` of a route that answers with `answer` or an error.

    `streams`: the route also answers with server-sent events.
    """
    good: dict[str, Any] = {"model": answer}
    if streams:
        # No type: tools disagree on whether the schema describes the whole text or one event.
        events = {"description": "Events whose data is JSON; after the last one, data: [DONE]."}
        good["content"] = {"text/event-stream": {"schema": events}}
    return {200: good, "4XX": {"model": ErrorBody}, "5XX": {"model": ErrorBody}}
