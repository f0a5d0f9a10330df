"""What the settings add to /openapi.json: the API keys that operations require, their headers."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI

from service.app.auth import Access
from service.inference.inputs.session_header import SessionHeader

SCHEMES = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
}
REFUSALS = {"key": {"401": "No valid API key."}}
REFUSALS["admin"] = {**REFUSALS["key"], "403": "Not the admin key."}


# Operations whose requests the session header places on an engine, and those that may continue a
# session.
PLACED = ("generate", "completions", "chat/completions", "score", "states", "states/text")
CONTINUING = ("generate", "completions")


def describe(app: FastAPI, access: Access, header: SessionHeader) -> None:
    """Add the keys that `access` requires, and the session header, to the OpenAPI schema."""
    plain = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            schema = plain()  # the object that FastAPI caches, and that is changed here
            _add_keys(schema, access)
            _add_header(schema, header)
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


def _add_header(schema: dict[str, Any], header: SessionHeader) -> None:
    for name in PLACED:
        text = "Requests with the same value go to the same engine where that costs little."
        if header.names_session and name == "chat/completions":
            text = "Not allowed: it names a session, and messages hold the whole conversation."
        elif header.names_session and name in CONTINUING:
            text = "The request's session_id, unless its body has the same one."
        parameter = {
            "name": header.name,
            "in": "header",
            "required": False,
            "schema": {"type": "string"},
            "description": text,
        }
        schema["paths"][f"/v1/{name}"]["post"].setdefault("parameters", []).append(parameter)


def _error_body() -> dict[str, Any]:
    reference = {"$ref": "#/components/schemas/ErrorBody"}
    return {"content": {"application/json": {"schema": reference}}}
