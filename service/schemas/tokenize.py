"""Requests and answers of POST /tokenize and POST /detokenize."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, Field, model_validator
from pydantic_core import PydanticCustomError

from service.schemas.chat import Messages, TemplateFields
from service.schemas.common import Many, RequestModel, TokenId


class TokenizeRequest(TemplateFields):
    """A text or a conversation: exactly one of `prompt` and `messages`.

    The fields of the chat template are allowed with `messages` only.
    """

    model: str | None = Field(
        default=None, description="The model's name. Default: the model that is served."
    )
    prompt: str | None = Field(default=None, description="A text.")
    messages: Messages | None = Field(
        default=None, description="A conversation, which the chat template renders."
    )
    add_special_tokens: bool | None = Field(
        default=None,
        description="Whether to add the special tokens that the tokenizer puts around a text, as "
        "the other endpoints do. Default: true. Has no effect on messages, where the chat template "
        "adds them.",
    )
    return_token_strs: bool | None = Field(
        default=None, description="Whether to return the tokens' texts too."
    )

    @model_validator(mode="after")
    def _one_kind(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise PydanticCustomError(
                "one_of", "exactly one of the fields prompt and messages must be given"
            )
        if self.messages is None:
            for field in TemplateFields.model_fields:
                if getattr(self, field) is not None:
                    raise PydanticCustomError(
                        "with_messages", "{field} is allowed with messages only", {"field": field}
                    )
        return self


class TokenizeResponse(BaseModel):
    """The tokens of a text or of a conversation."""

    count: int = Field(description="Number of tokens.")
    tokens: list[int] = Field(description="Token ids.")
    token_strs: list[str] | None = Field(
        description="Texts of the tokens, with return_token_strs; else null."
    )


class DetokenizeRequest(RequestModel):
    """Token ids to turn into text."""

    model: str | None = Field(
        default=None, description="The model's name. Default: the model that is served."
    )
    tokens: Many[TokenId]


class DetokenizeResponse(BaseModel):
    """The text of token ids."""

    prompt: str = Field(description="The text, without special tokens.")


TOKENIZE: dict[str, Any] = {"a text": {"value": {"prompt": "To be, or not"}}}
DETOKENIZE: dict[str, Any] = {"tokens": {"value": {"tokens": [84, 111, 32, 98, 101]}}}
