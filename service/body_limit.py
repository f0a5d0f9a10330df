"""Bodies over the limit: 413, at once where their length is announced, else once more has come.

A client reads no answer before it has sent its body, and a connection that is closed with unread
data is reset, which takes the answer away with it. So what is left of the body is read and thrown
away before the answer ends, up to a bound; whoever sends more than that loses the connection.
"""

from __future__ import annotations

import asyncio

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service.errors import ApiError, respond
from service.scope import header

DISCARDED = 64 * 2**20  # bytes at most
DISCARD_SECONDS = 10.0  # at most


class BodyLimit:
    """Answers 413 to a body over `max_bytes`."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self.app = app
        self.max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        received = 0

        async def counted() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > self.max_bytes:
                raise self._error()
            return message

        async def send_then_discard(message: Message) -> None:
            last = message["type"] == "http.response.body" and not message.get("more_body", False)
            if last and received > self.max_bytes:
                await self._end(message, receive, send)
            else:
                await send(message)

        announced = header(scope, b"content-length") or ""
        if announced.isdigit() and (len(announced) > 18 or int(announced) > self.max_bytes):
            received = self.max_bytes + 1
            return await respond(scope, self._error())(scope, receive, send_then_discard)
        await self.app(scope, counted, send_then_discard)

    async def _end(self, message: Message, receive: Receive, send: Send) -> None:
        """Sends the last message of an answer, but reads the body's rest before it is the last."""
        await send({**message, "more_body": True})
        left = DISCARDED
        try:
            async with asyncio.timeout(DISCARD_SECONDS):
                while left > 0:
                    read = await receive()
                    left -= len(read.get("body", b""))
                    if not read.get("more_body", False):
                        break
        except TimeoutError:
            pass
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    def _error(self) -> ApiError:
        return ApiError(
            413,
            f"the body is too large; allowed: up to {self.max_bytes} bytes",
            code="body_too_large",
            headers={"Connection": "close"},
        )
