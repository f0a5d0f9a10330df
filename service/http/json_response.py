"""JSON answers and server-sent events as bytes; large answers are rendered on a thread."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from service.http.connection import begin

# Numbers that are not finite become null, because JSON cannot hold them.
encode: Callable[[Any], bytes] = msgspec.json.Encoder().encode

# Rendering an answer of more tokens would block the event loop for milliseconds.
TOKENS_AT_ONCE = 2048

T = TypeVar("T")

DONE = b"data: [DONE]\n\n"


def event(content: Any) -> bytes:
    """Return one server-sent event with this content as JSON."""
    return b"data: " + encode(content) + b"\n\n"


class JSONResponse(Response):
    """A JSON answer, sent in one piece with its head."""

    def __init__(
        self, content: Any, status_code: int = 200, headers: dict[str, str] | None = None
    ) -> None:
        # Sets what Starlette's constructor would set, which takes longer than the encoding.
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
    """Return the result of `work`, which renders `tokens` tokens; run it on a thread for many."""
    return work() if tokens <= TOKENS_AT_ONCE else await asyncio.to_thread(work)
