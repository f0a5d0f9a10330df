"""Request heads are bounded, in bytes and in time: they come before any key can be asked for.

httptools gathers a head of any size and waits for its end for ever. (h11, which stands in for it on
other systems, bounds the size itself.)
"""

from __future__ import annotations

import asyncio
from itertools import chain
from typing import Any

from service.http.errors import ApiError
from service.http.upgrades import IS_HTTPTOOLS, PlainProtocol

MOST_HEAD_BYTES = 64 * 2**10  # of the path and all names and values; while it comes, of its reads


class BoundedHeads(PlainProtocol):
    """uvicorn's HTTP protocol, which answers 431 to a head that is too large."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._head_bytes = 0
        self._awaited_since: float | None = None  # a head, by the loop's time

    def connection_made(self, transport: asyncio.Transport) -> None:
        if IS_HTTPTOOLS:
            self._awaited_since = self.loop.time()
        super().connection_made(transport)

    def on_message_begin(self) -> None:
        """The first byte of a request has come."""
        self._head_bytes = 0
        self._awaited_since = self.loop.time()
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """The head has come, perhaps in a single read, which may be larger than what is allowed."""
        self._awaited_since = None
        size = len(self.url) + sum(map(len, chain.from_iterable(self.headers)))
        if size > MOST_HEAD_BYTES:
            self.refuse(_too_large())
        if not self.refused:
            super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """A part of a body has come."""
        if not self.refused:  # there is no request that it could belong to
            super().on_body(body)

    def on_message_complete(self) -> None:
        """A request has come whole."""
        if not self.refused:
            super().on_message_complete()

    def data_received(self, data: bytes) -> None:
        if self.refused:
            return
        if self._awaited_since is not None:
            # What comes now may be a body for the most part.
            if self._head_bytes > MOST_HEAD_BYTES:
                self.refuse(_too_large())
                return
            self._head_bytes += len(data)
        super().data_received(data)

    def cut_if_late(self, now: float, timeout: float) -> bool:
        """Closes where a head has begun and not ended for `timeout` seconds, or none has come at
        all; whether that was so."""
        if self.refused or self._awaited_since is None or now - self._awaited_since < timeout:
            return False
        self._awaited_since = None
        self.transport.close()
        return True


def _too_large() -> ApiError:
    return ApiError(
        431,
        f"the request's head is too large; allowed: up to {MOST_HEAD_BYTES} bytes",
        code="head_too_large",
    )
