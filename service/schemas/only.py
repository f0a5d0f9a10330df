"""Only: a field that is accepted at values that change nothing."""

from __future__ import annotations

from typing import Any

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic_core import PydanticCustomError, core_schema, to_json


class Only:
    """Annotation of a field that is accepted at the listed values only."""

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
