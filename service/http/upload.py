"""Bodies that are worked on while they come.

A connection whose body nobody reads tells nothing of its client: the end of it stands behind what
has been sent, in the kernels of both sides. So a body is read ahead of the work, up to a bound, and
its end ends the work at once. While the bound is reached, the kernel is asked for the end, which it
knows as soon as it has all that the client has sent.
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

MOST_AT_ONCE = 2**16  # bytes of a part that is worked on


class Upload:
    """A request's body, from its first byte on. `work` reads it while something is done with it."""

    def __init__(self, scope: Scope, receive: Receive, most: int) -> None:
        """`most`: bytes that are read ahead, about; a client that is quicker has to wait."""
        self._connection: Connection | None = scope.get(CONNECTION)
        self._receive = receive
        self._most = most
        self._held = bytearray()  # one piece of memory, however small the parts are that came
        self._whole = False
        self._lost = False  # the connection is
        self._refusal: Exception | None = None  # of the body
        self._news = asyncio.Event()  # something has come
        self._room = asyncio.Event()  # something was taken, or the client is lost

    async def next(self, patience: float) -> bytes | None:
        """The next part of the body, None at its end. Raises ApiError 408 where nothing comes for
        `patience` seconds."""
        try:
            async with asyncio.timeout(patience):
                while not self._held and not self._whole:
                    self._news.clear()
                    await self._news.wait()
        except TimeoutError as error:
            raise ApiError(
                408,
                f"nothing of the body came for {patience:g} s (receive_timeout)",
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
        """The result of `work`, which asks for `next`. It is cancelled when the client leaves:
        then raises ClientGone; or when the body turns out to be none that is allowed: ApiError."""
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
        """Reads until nothing more can come, and says so as `receive` does."""
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
        """Returns when a part has been taken, or the client is lost."""
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
