"""JSON and server-sent events as bytes; large answers are rendered beside the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from service.http.connection import begin

# Numbers that are not finite become null: JSON has no word for them.
encode: Callable[[Any], bytes] = msgspec.json.Encoder().encode

# Answers of more tokens would hold the event loop up for milliseconds.
TOKENS_AT_ONCE = 2048

T = TypeVar("T")

DONE = b"data: [DONE]\n\n"


def event(content: Any) -> bytes:
    """One server-sent event."""
    return b"data: " + encode(content) + b"\n\n"


class JSONResponse(Response):
    """A JSON answer."""

    def __init__(
        self, content: Any, status_code: int = 200, headers: dict[str, str] | None = None
    ) -> None:
        # As Starlette would, which takes longer for it than the content to be encoded.
        self.status_code = status_code
        self.background = None
        self.body = body = encode(content)
        told = [(b"content-length", b"%d" % len(body)), (b"content-type", b"application/json")]
        if headers:
            told += [
                (name.lower().encode(), one.encode("latin-1")) for name, one in headers.items()
            ]
        self.raw_headers = told

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await begin(scope, send, self.status_code, self.raw_headers, bytes(self.body))


async def render(tokens: int, work: Callable[[], T]) -> T:
    """What `work` renders of so many tokens; on a thread where they are many."""
    return work() if tokens <= TOKENS_AT_ONCE else await asyncio.to_thread(work)
