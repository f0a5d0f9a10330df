"""The API keys in /openapi.json: which operations require one, and how it is sent."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI

from service.app.auth import Access

SCHEMES = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
}
REFUSALS = {"key": {"401": "No valid API key."}}
REFUSALS["admin"] = {**REFUSALS["key"], "403": "Not the admin key."}


def describe_access(app: FastAPI, access: Access) -> None:
    """Add the keys that `access` requires to the application's OpenAPI schema."""
    plain = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            _add_keys(plain(), access)  # changes the schema object that FastAPI caches
        return plain()

    app.openapi = openapi  # type: ignore[method-assign]


def _add_keys(schema: dict[str, Any], access: Access) -> None:
    for path, operations in schema["paths"].items():
        level = access.level(path)
        if level == "open":
            continue
        schema.setdefault("components", {})["securitySchemes"] = SCHEMES
        for operation in operations.values():
            operation["security"] = [{name: []} for name in SCHEMES]
            for status, text in REFUSALS[level].items():
                operation["responses"].setdefault(status, {"description": text, **_error_body()})


def _error_body() -> dict[str, Any]:
    reference = {"$ref": "#/components/schemas/ErrorBody"}
    return {"content": {"application/json": {"schema": reference}}}
