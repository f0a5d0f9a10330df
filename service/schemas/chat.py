"""Request and answer of POST /v1/chat/completions: OpenAI's fields and extensions.

Fields of OpenAI's API that are not supported are accepted at their neutral values only (`Only`).
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    model_validator,
)
from pydantic_core import PydanticCustomError
from typing_extensions import TypedDict  # pydantic takes typing's from Python 3.12 on only

from service.schemas.common import (
    Many,
    MaxTokens,
    RequestModel,
    TopLogprobs,
    Usage,
)
from service.schemas.only import Only
from service.schemas.openai import OpenAIChoice, OpenAIRequest, OpenAIResponse

MOST_MESSAGES = 4096  # in one conversation


# A TypedDict, because half a million parts fit into one body: dicts are cheaper than models.
class TextPart(TypedDict):
    """A text part of a message's content."""

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
    """A message of the conversation. Assistant messages can be sent back as they were received."""

    role: Literal["developer", "system", "user", "assistant"]
    content: Content | None = Field(
        default=None,
        description="A string or text parts. Parts are joined by newlines for a chat template that "
        "expects strings. null is allowed for assistants only.",
    )
    name: str | None = None
    refusal: Annotated[Any, Only(None)] = None
    audio: Annotated[Any, Only(None)] = None
    annotations: Annotated[Any, Only(None, [])] = None
    function_call: Annotated[Any, Only(None)] = None
    tool_calls: Annotated[Any, Only(None, [])] = None
    tool_call_id: Annotated[Any, Only(None)] = None

    @model_validator(mode="after")
    def _content_of_others(self) -> ChatMessage:
        if self.content is None and self.role != "assistant":
            raise PydanticCustomError("no_content", "content must be a string or a list")
        return self


Messages = Annotated[Many[ChatMessage], Field(min_length=1, max_length=MOST_MESSAGES)]


class TemplateFields(RequestModel):
    """How the chat template renders the messages as one text (vLLM's fields)."""

    add_generation_prompt: bool | None = Field(
        default=None,
        description="Whether the rendered text ends where the assistant's answer begins. Default: "
        "true.",
    )
    continue_final_message: bool | None = Field(
        default=None,
        description="Whether the rendered text ends with the last message's content, which the "
        "model then continues. Needs add_generation_prompt: false. Default: false.",
    )
    chat_template_kwargs: dict[str, Any] | None = Field(
        default=None, description="Further variables for the chat template, with their values."
    )


class ChatRequest(TemplateFields, OpenAIRequest):
    """A conversation to answer, and how to sample the answer. null means a field's default."""

    messages: Messages
    max_completion_tokens: MaxTokens | None = Field(
        default=None, description="Most tokens to generate. Default: 1024."
    )
    max_tokens: MaxTokens | None = Field(
        default=None, description="The former name of max_completion_tokens."
    )
    logprobs: bool | None = Field(
        default=None, description="Whether to return the log-probability of each token."
    )
    top_logprobs: TopLogprobs | None = Field(
        default=None,
        description="How many of the most likely tokens to return beside each token. Needs "
        "logprobs: true.",
    )
    # Without effect
    metadata: dict[str, str] | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None
    parallel_tool_calls: bool | None = None
    # Not supported
    audio: Annotated[Any, Only(None)] = None
    documents: Annotated[Any, Only(None)] = None
    function_call: Annotated[Any, Only(None, "none", "auto")] = None
    functions: Annotated[Any, Only(None, [])] = None
    modalities: Annotated[Any, Only(None, ["text"])] = None
    moderation: Annotated[Any, Only(None)] = None
    prediction: Annotated[Any, Only(None)] = None
    prompt_cache_options: Annotated[Any, Only(None)] = None
    prompt_cache_retention: Annotated[Any, Only(None, "in_memory")] = None
    reasoning_effort: Annotated[Any, Only(None, "none")] = None
    service_tier: Annotated[Any, Only(None, "auto", "default")] = None
    store: Annotated[Any, Only(None, False)] = None
    tool_choice: Annotated[Any, Only(None, "none", "auto")] = None
    tools: Annotated[Any, Only(None, [])] = None
    verbosity: Annotated[Any, Only(None, "medium")] = None
    web_search_options: Annotated[Any, Only(None)] = None
    # Not supported, and sent with every conversation by routers: see OpenAIRequest
    include_reasoning: Annotated[Any, Only(None, True)] = None
    separate_reasoning: Annotated[Any, Only(None, True)] = None
    stream_reasoning: Annotated[Any, Only(None, True)] = None


class TopLogprob(BaseModel):
    """A token with its log-probability (natural logarithm) and its bytes."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    """A token of the answer with the most likely tokens at its place."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    """Log-probabilities of an answer's tokens, as natural logarithms."""

    content: list[TokenLogprob]
    refusal: None


class AnswerMessage(BaseModel):
    """The assistant's message of a choice."""

    role: Literal["assistant"]
    content: str
    refusal: None


class ChatChoice(OpenAIChoice):
    """One sampled answer to the conversation."""

    message: AnswerMessage
    logprobs: ChatLogprobs | None


class ChatResponse(OpenAIResponse):
    """The answers to a conversation."""

    choices: list[ChatChoice]
    usage: Usage
