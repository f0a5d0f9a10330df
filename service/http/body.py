"""BodyLimit: answers 413 to request bodies over a size limit.

A body with a content-length is refused at once, others when more than the limit has arrived.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service.http.connection import FIRST
from service.http.errors import ApiError, respond
from service.http.scope import CONNECTION, REFUSAL, discard, header
from service.http.slashes import plain

MOST_DIGITS = 18  # of a content-length; longer ones count as too large without being parsed


class BodyLimit:
    """ASGI middleware that answers 413 to request bodies over a size limit."""

    def __init__(
        self,
        app: ASGIApp,
        max_bytes: int,
        others: Mapping[str, Callable[[], int]] | None = None,
        for_states: Mapping[str, Callable[[], int]] | None = None,
    ) -> None:
        """Create the middleware.

        Args:
            app: The application.
            max_bytes: The limit of all paths but `others`.
            others: Paths that have limits of their own.
            for_states: Paths whose bodies may have a state in them: how many more bytes they may
                have. The route refuses larger bodies without one.
        """
        self.app = app
        self.max_bytes = max_bytes
        self._others = others or {}
        self._for_states = for_states or {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        path = plain(scope["path"])
        own, state = self._others.get(path), self._for_states.get(path)
        most = self.max_bytes if own is None else own()
        for_state = 0 if state is None else state()
        announced = header(scope, b"content-length") or ""
        is_known = announced.isdecimal()
        is_large = is_known and (len(announced) > MOST_DIGITS or int(announced) > most + for_state)
        if is_known and not is_large and CONNECTION in scope:
            return await self.app(scope, receive, send)  # httptools ends the body at its length
        received = 0

        async def counted() -> Message:
            nonlocal received
            message = await receive()
            if REFUSAL in scope:  # the chunked coding is broken, so the body is incomplete
                raise scope[REFUSAL]
            received += len(message.get("body", b""))
            if received > most + for_state:
                raise too_large(most, for_state)
            return message

        async def send_then_discard(message: Message) -> None:
            has_body = FIRST in message or message["type"] == "http.response.body"
            ends = has_body and not message.get("more_body", False)
            if ends and received > most + for_state:
                await self._end(message, receive, send)
            else:
                await send(message)

        if is_large:
            received = most + for_state + 1
            return await respond(scope, too_large(most, for_state))(
                scope, receive, send_then_discard
            )
        await self.app(scope, counted, send_then_discard)

    async def _end(self, message: Message, receive: Receive, send: Send) -> None:
        """Send the last part of an answer, read the rest of the request's body, end the answer."""
        await send({**message, "more_body": True})  # some clients wait for it before they send more
        await discard(receive)
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def too_large(most: int, for_state: int = 0) -> ApiError:
    """Return the error for a body of more than `most` bytes.

    `for_state`: how many more a body may have with a state in it.
    """
    more = f", and {for_state} more for a state in it" if for_state else ""
    return ApiError(
        413,
        f"the body is too large; allowed: up to {most} bytes{more}",
        code="body_too_large",
        headers={"Connection": "close"},
    )
