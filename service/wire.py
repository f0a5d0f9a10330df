"""JSON and server-sent events as bytes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
from starlette.responses import Response

# Numbers that are not finite become null: JSON has no word for them.
encode: Callable[[Any], bytes] = msgspec.json.Encoder().encode

DONE = b"data: [DONE]\n\n"


def event(content: Any) -> bytes:
    """One server-sent event."""
    return b"data: " + encode(content) + b"\n\n"


class JSONResponse(Response):
    """A JSON answer."""

    media_type = "application/json"

    def __init__(
        self, content: Any, status_code: int = 200, headers: dict[str, str] | None = None
    ) -> None:
        super().__init__(encode(content), status_code, headers)
