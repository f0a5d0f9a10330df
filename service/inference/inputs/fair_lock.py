"""FairLock: something that one at a time may do; owners go round, however many of one are
waiting."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class FairLock:
    """Used on one event loop."""

    def __init__(self) -> None:
        self._taken = False
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}  # whose turn is next comes first

    @asynccontextmanager
    async def turn(self, owner: str) -> AsyncIterator[None]:
        """Waits for a turn, which lasts as long as the context."""
        await self._take(owner)
        try:
            yield
        finally:
            self._pass_on()

    async def _take(self, owner: str) -> None:
        if not self._taken:
            self._taken = True
            return
        come: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(owner, deque()).append(come)
        try:
            await come
        except asyncio.CancelledError:
            if not come.cancelled():  # its turn had come already
                self._pass_on()
            raise

    def _pass_on(self) -> None:
        while self._waiting:
            owner = next(iter(self._waiting))
            line = self._waiting.pop(owner)
            come = line.popleft()
            if line:
                self._waiting[owner] = line
            if not come.done():  # else it has left
                come.set_result(None)
                return
        self._taken = False
