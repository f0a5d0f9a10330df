"""What the requests share: strictness, prompts, sampling parameters and the answers' parts."""

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
    """A request body: no conversions ("5" is no 5, true is no 1), no unknown fields, no NaN."""

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
# A list whose validation ends at the first wrong entry: there may be a million of them.
Many = Annotated[list[T], Field(fail_fast=True)]

# Tags of unions stand in angle brackets: service.http.errors leaves them out of parameter paths.
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
    """JSON has no integer keys: "17" stands for 17."""
    if isinstance(key, str) and key.isascii() and key.isdigit() and len(key) <= 10:
        return int(key)
    return key


def _first_wrong_entry(value: Any, validate: ValidatorFunctionWrapHandler) -> Any:
    """As `Many`: validates alone the first entry that may be wrong, so that it alone is told."""
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


MaxTokens = Annotated[int, Field(ge=1, le=INT32_MAX)]
MinTokens = Annotated[int, Field(ge=0, le=INT32_MAX)]
Temperature = Annotated[float, Field(ge=0, le=100, description="0 = greedy")]
TopK = Annotated[int, Field(ge=-1, le=INT32_MAX, description="0 or -1 = off")]
TopP = Annotated[float, Field(ge=0, le=1, description="1 = off; 0 takes the best token")]
MinP = Annotated[float, Field(ge=0, le=1, description="0 = off")]
RepetitionPenalty = Annotated[float, Field(gt=0, le=100, description="1 = off")]
Penalty = Annotated[float, Field(ge=-2, le=2, description="0 = off")]
LogitBias = Annotated[
    dict[
        Annotated[int, BeforeValidator(_token_key), Field(ge=0, le=INT32_MAX)],
        Annotated[float, Field(ge=-MOST_BIAS, le=MOST_BIAS)],
    ],
    WrapValidator(_first_wrong_entry),
]
Timeout = Annotated[
    float, Field(gt=0, description="seconds from its arrival; then finish_reason is timeout")
]
Priority = Annotated[
    int,
    Field(
        ge=LEAST_PRIORITY,
        le=MOST_PRIORITY,
        description="requests with a lower one are served earlier; default 0. Keys may be limited",
    ),
]
Seed = Annotated[int, Field(ge=-(2**63), lt=2**63, description="null = a random one")]
TopLogprobs = Annotated[int, Field(ge=0, description="null = none; k = the k best as well")]
StopString = Annotated[str, Field(min_length=1)]
Stop = Annotated[
    Annotated[StopString, Tag("<string>")] | Annotated[Many[StopString], Tag("<strings>")],
    Discriminator(
        lambda value: {str: "<string>", list: "<strings>"}.get(type(value)),
        custom_error_type="stop_type",
        custom_error_message="must be a string or a list of strings",
    ),
]


def _one_or_each(value: Any) -> str:
    return "<each>" if isinstance(value, list) else "<one>"


def _one_or_each_list(value: Any) -> str:
    """For parameters that are lists themselves: a list with a list or null inside is one per
    prompt."""
    listed = isinstance(value, list) and any(item is None or type(item) is list for item in value)
    return "<each>" if listed else "<one>"


# One value for all prompts, or a list with one per prompt.
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
        description="with stream: tokens of one event. The first are sent at once, the last with "
        "the end, and none is held for more than 50 ms. Default: the server's",
    ),
]


ParseSpecial = Annotated[
    bool,
    Field(
        description="special tokens that a prompt's text spells out are these tokens, for clients "
        "that render templates themselves: never where the text holds what others have written, "
        "who could then end a turn or begin one. Default: they are text",
    ),
]


class StreamOptions(RequestModel):
    include_usage: bool | None = Field(default=None, description="one last chunk with the usage")
    continuous_usage_stats: bool | None = Field(default=None, description="usage on every chunk")
    include_obfuscation: bool | None = Field(default=None, description="has no effect")


class PromptTokensDetails(BaseModel):
    cached_tokens: int = Field(description="of the prompt's that were known and not read again")


class Usage(BaseModel):
    prompt_tokens: int = Field(description="without those of a state that the request began with")
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | None = None


class Logprobs(BaseModel):
    """Parallel arrays, one entry per token; natural logarithms."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """Every error."""

    error: ErrorDetail


def statuses(answer: type[BaseModel], *, streams: bool = False) -> dict[int | str, dict[str, Any]]:
    """The `responses` of a route that answers with `answer` or an error, and `streams` if asked."""
    good: dict[str, Any] = {"model": answer}
    if streams:
        # No type: tools disagree on whether a schema is the whole text's or an event's.
        events = {"description": "Events whose data are JSON; after the last one, data: [DONE]."}
        good["content"] = {"text/event-stream": {"schema": events}}
    return {200: good, "4XX": {"model": ErrorBody}, "5XX": {"model": ErrorBody}}
