"""POST /tokenize and POST /detokenize."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, Field, model_validator
from pydantic_core import PydanticCustomError

from service.schemas.chat import Messages, TemplateFields
from service.schemas.common import Many, RequestModel, TokenId


class TokenizeRequest(TemplateFields):
    """Exactly one of `prompt` and `messages`; the chat template's fields with the latter only."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = Field(
        default=None,
        description="what the tokenizer puts around a text, as the other endpoints do (default "
        "true); of no effect on messages, where the chat template puts it",
    )
    return_token_strs: bool | None = None

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
    count: int
    tokens: list[int]
    token_strs: list[str] | None = Field(description="with return_token_strs")


class DetokenizeRequest(RequestModel):
    model: str | None = None
    tokens: Many[TokenId]


class DetokenizeResponse(BaseModel):
    prompt: str = Field(description="special tokens are left out")


TOKENIZE: dict[str, Any] = {"a text": {"value": {"prompt": "To be, or not"}}}
DETOKENIZE: dict[str, Any] = {"tokens": {"value": {"tokens": [84, 111, 32, 98, 101]}}}
