"""The load: users who send all kinds of requests one after the other, each judged."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from typing import Any

from loadtest.chaos.judge import Ending, Verdict
from service.terminal.bench.connection import BadResponse, Connection, Server

PATIENCE = 60.0  # seconds until a request counts as hung
PAUSE = 0.05  # of a user whom nobody serves


def kinds(choice: random.Random, tokens: int) -> tuple[str, dict[str, Any], bool, int]:
    """Return a random request: path, body, whether it is streamed, number of prompts."""
    prompts = ["ROMEO:" + "x" * choice.randrange(200) for _ in range(choice.choice([1, 1, 1, 4]))]
    match choice.randrange(4):
        case 0:
            return "/v1/score", {"texts": prompts}, False, len(prompts)
        case 1:
            body = {"prompts": prompts, "max_tokens": tokens}
            return "/v1/generate", body, False, len(prompts)
        case _:
            body = {"prompts": prompts, "max_tokens": tokens, "stream": True}
            return "/v1/generate", body | {"stop": ["never to be seen"]}, True, len(prompts)


class Load:
    """`users` users of one server, who send requests until the context ends.

    `verdicts` counts how their requests ended; `slowest` is the longest time to an answer, in
    seconds.
    """

    def __init__(self, url: str, users: int, tokens: int = 64) -> None:
        self._server = Server(url, {})
        self._users = users
        self._tokens = tokens
        self._stop = False
        self._tasks: list[asyncio.Task[None]] = []
        self.verdicts: Counter[Verdict] = Counter()
        self.slowest = 0.0

    async def __aenter__(self) -> Load:
        self._tasks = [asyncio.create_task(self._user(seed)) for seed in range(self._users)]
        return self

    async def __aexit__(self, *_: object) -> None:
        """Stop the users, and return when every request has ended."""
        self._stop = True
        await asyncio.gather(*self._tasks)

    async def _user(self, seed: int) -> None:
        choice = random.Random(seed)
        while not self._stop:
            verdict = await self._ask(*kinds(choice, self._tokens))
            self.verdicts[verdict] += 1
            if verdict in ("refused", "no server"):
                await asyncio.sleep(PAUSE)

    async def _ask(self, path: str, body: dict[str, Any], stream: bool, prompts: int) -> Verdict:
        ending = Ending(stream, prompts)
        request = self._server.request(path, json.dumps(body).encode())
        connection: Connection | None = None
        begun = time.monotonic()
        try:
            async with asyncio.timeout(PATIENCE):
                connection = await self._server.connect()
                verdict = ending.judge(await connection.ask(request, ending.take))
            self.slowest = max(self.slowest, time.monotonic() - begun)
            return verdict
        except TimeoutError:
            return "HUNG"
        except OSError:
            return "no server"
        except BadResponse:
            # A server that has ended takes connections from its backlog with it, unread.
            return "BROKEN" if connection is not None and connection.answered else "no server"
        finally:
            if connection is not None:
                connection.close()
