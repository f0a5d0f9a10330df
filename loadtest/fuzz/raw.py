"""Mutated requests against a server, over raw sockets."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass, field

from loadtest.fuzz.mutations import Mutator
from service.terminal.bench.connection import BadResponse, Connection, Server

# What is asked whole is answered long before; a request that announces more than it sends is not.
PATIENCE = 2.0  # seconds
STUCK = 30.0  # seconds for which a server that still works may take
KEPT = 20  # requests that went wrong, to be shown


@dataclass
class Outcome:
    """The results of the requests: statuses, or how they ended without one."""

    endings: Counter[str] = field(default_factory=Counter)
    errors: list[tuple[str, bytes]] = field(default_factory=list)  # 5xx: the answer, the request

    def note(self, ending: str, request: bytes, body: bytes = b"") -> None:
        self.endings[ending] += 1
        if ending.startswith("5") and len(self.errors) < KEPT:
            self.errors.append((f"{ending} {body[:300]!r}", request))


async def fuzz(url: str, requests: int, seed: int, connections: int) -> Outcome:
    """Send `requests` requests. Raises OSError if the server accepts no connections any more."""
    outcome, server, mutator = Outcome(), Server(url, {}), Mutator(seed)
    left = requests

    async def client() -> None:
        nonlocal left
        connection: Connection | None = None
        while left > 0:
            left -= 1
            request = mutator.draw()
            if connection is None or not connection.open:
                async with asyncio.timeout(STUCK):
                    connection = await server.connect()
            body = bytearray()
            try:
                async with asyncio.timeout(PATIENCE):
                    status = await connection.ask(request, body.extend)
                outcome.note(str(status), request, bytes(body))
            except TimeoutError:
                outcome.note("asked for more", request)
                connection.close()
            except BadResponse:
                # Closed without an answer, or more than one answer to what was more than one
                # request.
                outcome.note("closed", request)
                connection.close()

    async with asyncio.TaskGroup() as tasks:
        for _ in range(connections):
            tasks.create_task(client())
    return outcome
