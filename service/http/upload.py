"""Upload: a request body that is processed while it arrives.

A disconnect is not noticed on a connection that nobody reads, because it comes after the data that
the client has sent. So the body is read ahead of the work, up to a bound, and a disconnect ends the
work at once. While the bound is reached, the kernel is asked for the client's close instead, which
it knows as soon as it has received everything that the client sent.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.types import Message, Receive, Scope

from service.http.connection import Connection
from service.http.disconnect import ClientGone, unless_client_leaves
from service.http.errors import ApiError
from service.http.scope import CONNECTION

T = TypeVar("T")

MOST_AT_ONCE = 2**16  # bytes of one part


class Upload:
    """A request's body as a sequence of parts. `work` reads it while its coroutine uses it."""

    def __init__(self, scope: Scope, receive: Receive, most: int) -> None:
        """`most`: about how many bytes to read ahead; a faster client has to wait."""
        self._connection: Connection | None = scope.get(CONNECTION)
        self._receive = receive
        self._most = most
        self._held = bytearray()  # what has arrived and was not taken
        self._whole = False  # the whole body has arrived
        self._lost = False  # the connection is lost
        self._refusal: Exception | None = None  # why the body is not allowed
        self._news = asyncio.Event()  # something has arrived
        self._room = asyncio.Event()  # something was taken, or the connection is lost

    async def next(self, patience: float) -> bytes | None:
        """Return the next part of the body, or None at its end.

        Raises ApiError 408 if nothing arrives for `patience` seconds.
        """
        try:
            async with asyncio.timeout(patience):
                while not self._held and not self._whole:
                    self._news.clear()
                    await self._news.wait()
        except TimeoutError as error:
            raise ApiError(
                408,
                f"nothing of the body arrived for {patience:g} s (receive_timeout)",
                code="body_too_slow",
                headers={"Connection": "close"},
            ) from error
        if not self._held:
            return None
        part = bytes(self._held[:MOST_AT_ONCE])
        del self._held[:MOST_AT_ONCE]
        self._room.set()
        return part

    async def work(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work`, which calls `next`, and return its result.

        Cancels it and raises ClientGone if the client disconnects, or ApiError if the body turns
        out not to be allowed (too large, or broken).
        """
        connection = self._connection
        unwatch = None if connection is None else connection.watch_unread(self._note_lost)
        try:
            return await unless_client_leaves({}, self._read, work)
        except ClientGone:
            if self._refusal is not None:
                raise self._refusal from None
            raise
        finally:
            if unwatch is not None:
                unwatch()

    async def _read(self) -> Message:
        """Read until nothing more can arrive; return the disconnect message, as `receive` does."""
        while not self._lost:
            if len(self._held) >= self._most and not self._whole:
                await self._await_room()
                continue
            try:
                message = await self._receive()
            except Exception as error:
                self._refusal = error
                break
            if message["type"] == "http.disconnect":
                break
            self._held += message.get("body", b"")
            self._whole = self._whole or not message.get("more_body", False)
            self._news.set()
        return {"type": "http.disconnect"}

    async def _await_room(self) -> None:
        """Return when a part has been taken, or the connection is lost."""
        end_watch = None if self._connection is None else self._connection.await_end()
        try:
            while len(self._held) >= self._most and not self._lost:
                self._room.clear()
                await self._room.wait()
        finally:
            if end_watch is not None:
                end_watch()

    def _note_lost(self) -> None:
        self._lost = True
        self._room.set()
