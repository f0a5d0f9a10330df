"""A client that times its requests: one connection, one request at a time."""

from __future__ import annotations

import json
import random
import string
import time
from typing import Any, NamedTuple

from service.terminal.bench.connection import Connection, Server


class Answer(NamedTuple):
    """An answer, with its seconds from sending the request."""

    content: bytes
    first: float  # until the first byte of the answer's body
    whole: float

    def json(self) -> Any:
        return json.loads(self.content)


class Asker:
    """One connection; raises RuntimeError for every answer that is not 200."""

    def __init__(self, url: str) -> None:
        self._server = Server(url, {})
        self._connection: Connection | None = None

    async def ask(self, method: str, path: str, body: Any = None) -> Answer:
        """Send a request; `body` is bytes, or an object to send as JSON."""
        if isinstance(body, bytes):
            content, kind = body, "application/octet-stream"
        else:
            content, kind = b"" if body is None else _encode(body), "application/json"
        request = self._server.request(path, content, method, kind)
        if self._connection is None or not self._connection.open:
            self._connection = await self._server.connect()
        parts: list[bytes] = []
        first = 0.0
        begun = time.perf_counter()

        def take(part: bytes) -> None:
            nonlocal first
            first = first or time.perf_counter() - begun
            parts.append(part)

        status = await self._connection.ask(request, take)
        whole = time.perf_counter() - begun
        answer = Answer(b"".join(parts), first, whole)
        if status != 200:
            raise RuntimeError(f"{path} was answered {status}: {answer.content[:300]!r}")
        return answer

    async def post(self, path: str, body: Any) -> Answer:
        return await self.ask("POST", path, body)

    async def first_token(self, prompt: str, **more: Any) -> float:
        """Return the seconds until the first token of a stream has arrived."""
        body = {"prompts": [prompt], "max_tokens": 2, "temperature": 0, "ignore_eos": True}
        return (await self.post("/v1/generate", {**body, "stream": True, **more})).first

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()


def _encode(body: Any) -> bytes:
    return json.dumps(body).encode()


class Texts:
    """Texts of letters, no two of which begin alike; a letter is a token of a byte-level model."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def draw(self, length: int) -> str:
        return "".join(self._random.choices(string.ascii_letters + " ", k=length))

    def salt(self) -> str:
        """Return an unused cache salt."""
        return f"{self._random.getrandbits(64):x}"
