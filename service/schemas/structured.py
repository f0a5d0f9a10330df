"""Wire types of structured output: OpenAI's response_format and vLLM's structured_outputs."""

from __future__ import annotations

from typing import (
    Annotated,
    Any,
    Literal,
    NotRequired,
)

from pydantic import ConfigDict, Discriminator, Field, Tag
from typing_extensions import TypedDict

from service.schemas.common import Many

_STRICT = ConfigDict(extra="forbid", strict=True)

JsonSchema = Annotated[
    Annotated[dict[str, Any], Tag("<object>")] | Annotated[str, Tag("<text>")],
    Discriminator(
        lambda value: {dict: "<object>", str: "<text>"}.get(type(value)),
        custom_error_type="schema_type",
        custom_error_message="must be a JSON schema: an object, or its text",
    ),
]
Choices = Annotated[Many[str], Field(min_length=1)]


class TextFormat(TypedDict):
    """Plain text: no constraint."""

    __pydantic_config__ = _STRICT  # type: ignore[misc]
    type: Literal["text"]


class JsonObjectFormat(TypedDict):
    """Any JSON object."""

    __pydantic_config__ = _STRICT  # type: ignore[misc]
    type: Literal["json_object"]


class NamedSchema(TypedDict):
    """A named JSON schema. `strict` has no effect: answers always match the schema."""

    __pydantic_config__ = _STRICT  # type: ignore[misc]
    name: str
    schema: dict[str, Any]
    description: NotRequired[str | None]
    strict: NotRequired[bool | None]


class JsonSchemaFormat(TypedDict):
    """JSON that matches a schema."""

    __pydantic_config__ = _STRICT  # type: ignore[misc]
    type: Literal["json_schema"]
    json_schema: NamedSchema


def _format(value: Any) -> str | None:
    kind = value.get("type") if isinstance(value, dict) else None
    return f"<{kind}>" if isinstance(kind, str) else None


ResponseFormat = Annotated[
    Annotated[TextFormat, Tag("<text>")]
    | Annotated[JsonObjectFormat, Tag("<json_object>")]
    | Annotated[JsonSchemaFormat, Tag("<json_schema>")],
    Discriminator(
        _format,
        custom_error_type="response_format",
        custom_error_message="must be an object with the type text, json_object or json_schema",
    ),
]


class StructuredOutputs(TypedDict):
    """A constraint on the answer's text: exactly one of these fields."""

    __pydantic_config__ = _STRICT  # type: ignore[misc]
    json: NotRequired[JsonSchema | None]
    regex: NotRequired[str | None]
    choice: NotRequired[Choices | None]
    grammar: NotRequired[str | None]
    json_object: NotRequired[bool | None]
