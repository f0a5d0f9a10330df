"""Traffic that feeds every series: right and wrong requests, too many, clients that leave."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Awaitable, Callable
from typing import Any

from loadtest.state.asker import Texts
from loadtest.subject import Subject
from loadtest.with_httpx import httpx

SETTINGS: dict[str, Any] = {"max_slots": 4, "max_waiting": 4, "share_slots": 8}  # soon full
USERS = 3  # of each kind
CROWD = 24  # requests at once, of which most are refused
PAUSE = 0.2
ENGINE_DIES = 0.3  # of the time, after which all windows fill again


class Traffic:
    """Sends requests to one server for some seconds; every answer is accepted."""

    def __init__(self, subject: Subject, seconds: float) -> None:
        self._subject = subject
        self._end = time.monotonic() + seconds
        self._death = time.monotonic() + seconds * ENGINE_DIES
        self._texts = Texts(0)
        self.answers: dict[int, int] = {}  # by status; 0 = the connection broke

    async def run(self) -> None:
        async with httpx.AsyncClient(base_url=self._subject.url, timeout=60) as self._client:
            kinds = (self._generate, self._complete, self._score, self._keep, self._match)
            users = [self._repeat(kind) for kind in kinds for _ in range(USERS)]
            others = (self._leave, self._wrong, self._crowd)
            await asyncio.gather(*users, *map(self._repeat, others), self._kill())

    async def _repeat(self, kind: Callable[[], Awaitable[None]]) -> None:
        while time.monotonic() < self._end:
            try:
                await kind()
            except httpx.TransportError:
                self._count(0)
            await asyncio.sleep(PAUSE)

    def _count(self, status: int) -> None:
        self.answers[status] = self.answers.get(status, 0) + 1

    async def _post(self, path: str, body: object) -> None:
        self._count((await self._client.post(path, json=body)).status_code)

    async def _generate(self) -> None:
        body = {"prompts": [self._texts.draw(200)], "max_tokens": 32, "stream": True}
        await self._post("/v1/generate", body)

    async def _complete(self) -> None:
        """Send a prompt that is in the prefix cache after its first time."""
        await self._post("/v1/completions", {"prompt": "ROMEO:\nWhat light? " * 4, "n": 2})

    async def _score(self) -> None:
        continuations = [" is the question.", " be two bees."]
        item = {"context": self._texts.draw(64), "continuations": continuations}
        await self._post("/v1/score", {"items": [item]})

    async def _keep(self) -> None:
        name = self._texts.salt()
        await self._post("/v1/states", {"prompt": self._texts.draw(64), "id": name, "ttl": 20})
        await self._post("/v1/generate", {"prompts": ["JULIET:"], "state": name, "max_tokens": 8})
        await self._post("/v1/completions", {"prompt": "O ", "session_id": name, "max_tokens": 8})

    async def _match(self) -> None:
        """Ask for a grammar that was not used before."""
        choice = {"choice": [self._texts.draw(8), self._texts.draw(8)]}
        await self._post("/v1/generate", {"prompts": ["KING:"], "structured_outputs": choice})

    async def _leave(self) -> None:
        body = {"prompts": ["ROMEO:"], "max_tokens": 10_000, "stream": True, "ignore_eos": True}
        async with self._client.stream("POST", "/v1/generate", json=body) as answer:
            self._count(answer.status_code)
            async for _ in answer.aiter_bytes():
                return

    async def _wrong(self) -> None:
        await self._post("/v1/generate", {"prompts": ["ROMEO:"], "temperature": -1})
        await self._post("/v1/generate", {"prompts": ["ROMEO:"], "state": "nobody's"})

    async def _crowd(self) -> None:
        await asyncio.gather(*(self._generate() for _ in range(CROWD)))

    async def _kill(self) -> None:
        """Kill the engine once, so that a restart is counted."""
        await asyncio.sleep(max(0.0, self._death - time.monotonic()))
        self._subject.signal_engine(signal.SIGKILL)
