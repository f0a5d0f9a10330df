"""The turns of sessions, their answers, and the witness that tells what the answers must be."""

from __future__ import annotations

import asyncio
import json
import random
import string
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from service.terminal.bench.connection import BadResponse, Connection, Server

PROMPT = 4  # letters of a turn, each a token
TOKENS = 4  # of an answer
PATIENCE = 90.0  # seconds until a turn counts as hung


@dataclass(frozen=True)
class Answer:
    """What a turn has answered, by which the state it came from can be told from any other."""

    text: str
    logprobs: tuple[float, ...]
    tokens: int  # of the session afterwards
    stored: bool | None

    @classmethod
    def of(cls, body: Any) -> Answer:
        """Read an answer of `/v1/completions`. Raises LookupError or TypeError for no such body."""
        (choice,) = body["choices"]
        state = choice["state"]
        logprobs = tuple(choice["logprobs"]["token_logprobs"])
        return cls(choice["text"], logprobs, state["tokens"], state.get("stored"))

    def equals(self, other: Answer) -> bool:
        """Return whether both are the same turn of the same text, bit for bit."""
        mine, theirs = ((one.text, one.logprobs, one.tokens) for one in (self, other))
        return mine == theirs


def body_of(session: int, turn: int, id: str, numbered: bool) -> bytes:
    """Return the request of a session's turn (from 1 on), with its number if asked for."""
    draw = random.Random(f"{session}/{turn}")
    body: dict[str, Any] = {
        "prompt": "".join(draw.choices(string.ascii_letters + " ", k=PROMPT)),
        "max_tokens": TOKENS,
        "temperature": 1,
        "seed": session,
        "logprobs": 0,
        "ignore_eos": True,
        "session_id": id,
    }
    if numbered:
        body["turn"] = turn
    return json.dumps(body).encode()


class Line:
    """One client's connections, one to each server; it asks one thing at a time."""

    def __init__(self, urls: Iterable[str], key: str = "") -> None:
        headers = {"authorization": f"Bearer {key}"} if key else {}
        self._servers = [Server(url, headers) for url in urls]
        self._connections: dict[int, Connection] = {}

    async def ask(
        self, at: int, path: str, body: bytes, method: str = "POST", patience: float = PATIENCE
    ) -> tuple[int, Any]:
        """Return the status and the answer, which is JSON, of the server with the number `at`.

        Raises OSError, BadResponse or TimeoutError if there is no whole answer.
        """
        status, content = await self.fetch(at, path, body, method, patience)
        try:
            return status, json.loads(content or b"null")
        except ValueError as error:
            raise BadResponse(f"the body is no JSON: {error}") from None

    async def fetch(
        self, at: int, path: str, body: bytes, method: str, patience: float = PATIENCE
    ) -> tuple[int, bytes]:
        """Return the status and the content of the answer; raises as `ask` does."""
        connection = self._connections.get(at)
        async with asyncio.timeout(patience):
            if connection is None or not connection.open:
                connection = await self._servers[at].connect()
                self._connections[at] = connection
            parts: list[bytes] = []
            request = self._servers[at].request(path, body, method)
            try:
                status = await connection.ask(request, parts.append)
            except BaseException:
                connection.close()
                raise
        return status, b"".join(parts)

    def close(self) -> None:
        for connection in self._connections.values():
            connection.close()


async def witness(
    url: str, sessions: int, turns: int, clients: int
) -> tuple[list[list[Answer]], list[float]]:
    """Carry out all turns, each session's in a row.

    Returns their answers by session, and the seconds of each turn that followed another.
    Raises RuntimeError if one is refused.
    """
    answers: list[list[Answer]] = [[] for _ in range(sessions)]
    seconds: list[float] = []
    left = list(range(sessions))

    async def client() -> None:
        line = Line([url])
        while left:
            session = left.pop()
            id = f"w{session}"
            for turn in range(1, turns + 1):
                content = body_of(session, turn, id, numbered=False)
                begun = time.perf_counter()
                status, body = await line.ask(0, "/v1/completions", content)
                if turn > 1:
                    seconds.append(time.perf_counter() - begun)
                if status != 200:
                    raise RuntimeError(f"the witness was answered {status}: {body}")
                answers[session].append(Answer.of(body))
            await line.ask(0, f"/v1/states/session:{id}", b"", "DELETE")
        line.close()

    async with asyncio.TaskGroup() as group:
        for _ in range(clients):
            group.create_task(client())
    return answers, seconds
