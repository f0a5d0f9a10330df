"""Bodies over the limit: 413, at once where their length is announced, else once more has come.

A client reads no answer before it has sent its body, and a connection that is closed with unread
data is reset, which takes the answer away with it. So what is left of the body is read and thrown
away before the answer ends, up to a bound; whoever sends more than that loses the connection.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service.direct import Connection
from service.errors import ApiError, respond
from service.scope import CONNECTION, header

DISCARDED = 64 * 2**20  # bytes at most
DISCARD_SECONDS = 10.0  # at most


class BodyLimit:
    """Answers 413 to a body over `max_bytes`; `others` are the limits of paths that have their
    own."""

    def __init__(
        self,
        app: ASGIApp,
        max_bytes: int,
        others: Mapping[str, Callable[[], int]] | None = None,
    ) -> None:
        self.app = app
        self.max_bytes = max_bytes
        self._others = others or {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        received = 0
        own = self._others.get(scope["path"])
        most = self.max_bytes if own is None else own()

        async def counted() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > most:
                raise _error(most)
            return message

        async def send_then_discard(message: Message) -> None:
            last = message["type"] == "http.response.body" and not message.get("more_body", False)
            if last and received > most:
                await self._end(message, scope, receive, send)
            else:
                await send(message)

        announced = header(scope, b"content-length") or ""
        if announced.isdigit() and (len(announced) > 18 or int(announced) > most):
            received = most + 1
            return await respond(scope, _error(most))(scope, receive, send_then_discard)
        if announced.isdigit() and CONNECTION in scope:  # httptools lets no more of it come
            return await self.app(scope, receive, send)
        await self.app(scope, counted, send_then_discard)

    async def _end(self, message: Message, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends the last message of an answer, but reads the body's rest before it is the last."""
        await send({**message, "more_body": True})
        connection: Connection | None = scope.get(CONNECTION)
        if connection is not None:
            connection.flush()  # a client may wait for it before it sends more
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


def _error(most: int) -> ApiError:
    return ApiError(
        413,
        f"the body is too large; allowed: up to {most} bytes",
        code="body_too_large",
        headers={"Connection": "close"},
    )
