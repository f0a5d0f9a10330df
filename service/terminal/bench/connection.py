"""A minimal HTTP/1.1 client connection for load tests: one request at a time, streamed answers.

A general client needs a hundred times the time of the server's smallest answers; a load test would
measure the client.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from typing import Literal, cast
from urllib.parse import urlsplit

MOST_HEAD = 2**16  # bytes


class BadResponse(Exception):
    """An answer is not valid HTTP, or the connection was closed before its end."""


class Connection(asyncio.Protocol):
    """A connection to a server; `ask` sends a request and waits for the whole answer."""

    def __init__(self) -> None:
        self.open = False
        self.answered = False  # whether a part of the current answer has arrived
        self._transport: asyncio.Transport | None = None
        self._buffer = bytearray()
        self._part: Literal["head", "length", "size", "chunk", "trailer", "rest"] = "head"
        self._left = 0  # bytes of the body or the chunk that have not arrived
        self.status = 0  # of the current answer, once its head has arrived
        self._keeps = True
        self._on_body: Callable[[bytes], None] | None = None
        self._answer: asyncio.Future[int] | None = None

    async def ask(self, request: bytes, on_body: Callable[[bytes], None]) -> int:
        """Send a request and return the status when the whole answer has arrived.

        `on_body`: takes each part of the answer's body. Raises BadResponse.
        """
        assert self._transport is not None and self._answer is None
        self._part, self._keeps, self.answered = "head", True, False
        self.status = 0
        if not self.open:
            raise BadResponse("the server closed the connection")
        self._on_body = on_body
        self._answer = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        try:
            return await self._answer
        finally:
            self._answer = None
            if not self._keeps or self._part != "head" or self._buffer:
                self.close()

    def close(self) -> None:
        """Abort the connection."""
        self.open = False
        if self._transport is not None:
            self._transport.abort()

    # Called by the event loop.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self.open = True

    def connection_lost(self, exc: Exception | None) -> None:
        self.open = False
        if self._part == "rest":
            self._end()
        self._fail("the server closed the connection" if exc is None else str(exc))

    def data_received(self, data: bytes) -> None:
        self.answered = True
        self._buffer += data
        try:
            while self._advance():
                pass
        except (BadResponse, ValueError, IndexError) as error:
            self._fail(f"not understood: {error}")
            self.close()

    def _advance(self) -> bool:
        """Parse one part of the answer in the buffer; return False if more data is needed."""
        match self._part:
            case "head":
                return self._head()
            case "size":
                line = self._line()
                if line is None:
                    return False
                self._left = int(line.partition(b";")[0], 16)
                self._part = "chunk" if self._left else "trailer"
                return True
            case "chunk":
                if len(self._buffer) < self._left + 2:
                    return False
                self._hand_on(self._left)
                del self._buffer[:2]
                self._part = "size"
                return True
            case "trailer":
                line = self._line()
                if line == b"":
                    self._end()
                return line not in (None, b"")
            case "length":
                self._left -= self._hand_on(min(self._left, len(self._buffer)))
                if not self._left:
                    self._end()
                return False
            case "rest":
                self._hand_on(len(self._buffer))
                return False

    def _line(self) -> bytes | None:
        end = self._buffer.find(b"\r\n")
        if end < 0:
            return None
        line = bytes(self._buffer[:end])
        del self._buffer[: end + 2]
        return line

    def _head(self) -> bool:
        end = self._buffer.find(b"\r\n\r\n")
        if end < 0:
            if len(self._buffer) > MOST_HEAD:
                raise BadResponse(f"the answer's head has more than {MOST_HEAD} bytes")
            return False
        first, *lines = bytes(self._buffer[:end]).lower().split(b"\r\n")
        del self._buffer[: end + 4]
        if not first.startswith(b"http/1."):
            raise BadResponse(f"the answer is not HTTP/1.x: it begins with {first[:40]!r}")
        self.status = int(first.split(b" ", 2)[1])
        if self.status < 200:
            return True
        headers = dict(line.split(b":", 1) for line in lines)
        self._keeps = b"close" not in headers.get(b"connection", b"")
        if b"chunked" in headers.get(b"transfer-encoding", b""):
            self._part = "size"
        elif b"content-length" in headers or self.status in (204, 304):
            self._left = int(headers.get(b"content-length", b"0"))
            self._part = "length"
        else:
            self._part, self._keeps = "rest", False
        return True

    def _hand_on(self, length: int) -> int:
        if length and self._on_body is not None:
            self._on_body(bytes(self._buffer[:length]))
        del self._buffer[:length]
        return length

    def _end(self) -> None:
        self._part = "head"
        if self._answer is not None and not self._answer.done():
            self._answer.set_result(self.status)

    def _fail(self, reason: str) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(BadResponse(reason))


class Server:
    """The server under test: opens connections to it and renders requests.

    Raises ValueError for a URL that is neither http nor https.
    """

    def __init__(self, url: str, headers: dict[str, str]) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{url!r} is not an http or https URL")
        self._host = parts.hostname
        self._port = parts.port or (443 if parts.scheme == "https" else 80)
        self._base = parts.path.rstrip("/")
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        lines = [f"host: {parts.netloc.rpartition('@')[2]}"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        self._lines = "\r\n".join(lines)

    async def connect(self) -> Connection:
        """Open a new connection. Raises OSError."""
        loop = asyncio.get_running_loop()
        _, made = await loop.create_connection(Connection, self._host, self._port, ssl=self._tls)
        return made

    def request(
        self, path: str, body: bytes, method: str = "POST", content_type: str = "application/json"
    ) -> bytes:
        """Return the bytes of a request."""
        head = f"{method} {self._base}{path} HTTP/1.1\r\n{self._lines}\r\n"
        head += f"content-type: {content_type}\r\ncontent-length: {len(body)}\r\n\r\n"
        return head.encode() + body
