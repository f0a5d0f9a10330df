"""POST /v1/chat/completions: OpenAI's fields, those without meaning here at their neutral value."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    Tag,
    model_validator,
)
from pydantic_core import PydanticCustomError, core_schema, to_json
from typing_extensions import TypedDict  # pydantic's: typing's serves it from Python 3.12 on

from service.schemas.common import (
    Many,
    MaxTokens,
    RequestModel,
    TopLogprobs,
    Usage,
)
from service.schemas.openai import OpenAIChoice, OpenAIRequest, OpenAIResponse


class _Only:
    """Marks a field that is accepted at these values alone."""

    def __init__(self, *allowed: Any) -> None:
        self._allowed = allowed

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> core_schema.CoreSchema:
        return core_schema.no_info_plain_validator_function(self._check)

    def __get_pydantic_json_schema__(
        self, schema: core_schema.CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        return {"enum": list(self._allowed)}

    def _check(self, value: Any) -> Any:
        if any(type(value) is type(one) and value == one for one in self._allowed):
            return value
        words = " or ".join(to_json(one).decode() for one in self._allowed)
        raise PydanticCustomError(
            "not_supported", "is not supported here; allowed: {words}", {"words": words}
        )


MOST_MESSAGES = 4096  # of one conversation


class TextPart(TypedDict):
    """Half a million fit into one body, so none becomes an object of its own."""

    __pydantic_config__ = ConfigDict(extra="forbid", strict=True)  # type: ignore[misc]
    type: Literal["text"]
    text: str


Content = Annotated[
    Annotated[str, Tag("<text>")] | Annotated[Many[TextPart], Tag("<parts>")],
    Discriminator(
        lambda value: {str: "<text>", list: "<parts>"}.get(type(value)),
        custom_error_type="content_type",
        custom_error_message="must be a string or a list of text parts",
    ),
]


class ChatMessage(RequestModel):
    """A message; an assistant's may be the one that was answered with, as it was."""

    role: Literal["developer", "system", "user", "assistant"]
    content: Content | None = Field(
        default=None,
        description="text parts are joined by newlines for a chat template that takes texts; "
        "null for assistants only",
    )
    name: str | None = None
    refusal: Annotated[Any, _Only(None)] = None
    audio: Annotated[Any, _Only(None)] = None
    annotations: Annotated[Any, _Only(None, [])] = None
    function_call: Annotated[Any, _Only(None)] = None
    tool_calls: Annotated[Any, _Only(None, [])] = None
    tool_call_id: Annotated[Any, _Only(None)] = None

    @model_validator(mode="after")
    def _content_of_others(self) -> ChatMessage:
        if self.content is None and self.role != "assistant":
            raise PydanticCustomError("no_content", "content must be a string or a list")
        return self


Messages = Annotated[Many[ChatMessage], Field(min_length=1, max_length=MOST_MESSAGES)]


class TemplateFields(RequestModel):
    """How the chat template makes a text of messages; vLLM's fields."""

    add_generation_prompt: bool | None = Field(
        default=None, description="the text ends where an answer begins; default true"
    )
    continue_final_message: bool | None = Field(
        default=None,
        description="the text ends with the last message's content, which the model continues; "
        "needs add_generation_prompt: false. Default false",
    )
    chat_template_kwargs: dict[str, Any] | None = Field(
        default=None, description="further names that the chat template knows, with their values"
    )


class ChatRequest(TemplateFields, OpenAIRequest):
    """null means the default, everywhere."""

    messages: Messages
    max_completion_tokens: MaxTokens | None = Field(default=None, description="default 1024")
    max_tokens: MaxTokens | None = Field(
        default=None, description="the former name of max_completion_tokens"
    )
    logprobs: bool | None = None
    top_logprobs: TopLogprobs | None = Field(default=None, description="with logprobs: true only")
    # Without effect
    metadata: dict[str, str] | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None
    parallel_tool_calls: bool | None = None
    # Not supported
    audio: Annotated[Any, _Only(None)] = None
    documents: Annotated[Any, _Only(None)] = None
    function_call: Annotated[Any, _Only(None, "none", "auto")] = None
    functions: Annotated[Any, _Only(None, [])] = None
    modalities: Annotated[Any, _Only(None, ["text"])] = None
    moderation: Annotated[Any, _Only(None)] = None
    prediction: Annotated[Any, _Only(None)] = None
    prompt_cache_options: Annotated[Any, _Only(None)] = None
    prompt_cache_retention: Annotated[Any, _Only(None, "in_memory")] = None
    reasoning_effort: Annotated[Any, _Only(None, "none")] = None
    service_tier: Annotated[Any, _Only(None, "auto", "default")] = None
    store: Annotated[Any, _Only(None, False)] = None
    tool_choice: Annotated[Any, _Only(None, "none", "auto")] = None
    tools: Annotated[Any, _Only(None, [])] = None
    verbosity: Annotated[Any, _Only(None, "medium")] = None
    web_search_options: Annotated[Any, _Only(None)] = None


class TopLogprob(BaseModel):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    """Natural logarithms."""

    content: list[TokenLogprob]
    refusal: None


class AnswerMessage(BaseModel):
    role: Literal["assistant"]
    content: str
    refusal: None


class ChatChoice(OpenAIChoice):
    message: AnswerMessage
    logprobs: ChatLogprobs | None


class ChatResponse(OpenAIResponse):
    choices: list[ChatChoice]
    usage: Usage
