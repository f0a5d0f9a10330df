"""Turns of many sessions on several servers, each answer compared with the witness's."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from engine.protocol.placement import engine_of_state
from loadtest.store.turns import Answer, Line, body_of
from service.terminal.bench.connection import BadResponse

PLACEMENTS = ("random", "affinity")


@dataclass
class Placed:
    """What came of the turns."""

    seconds: list[float] = field(default_factory=list)  # of each turn that followed another
    whole: float = 0.0  # seconds of all turns together
    turns: int = 0
    failed: list[str] = field(default_factory=list)
    different: list[str] = field(default_factory=list)


async def placed(
    urls: Sequence[str],
    placement: str,
    expected: list[list[Answer]],
    clients: int,
    seed: int,
) -> Placed:
    """Carry out as many turns of each session as the witness has, one at a time of a session.

    The sessions take turns at random, so that between two turns of one many others come.
    """
    found = Placed()
    draw = random.Random(seed)
    ready = [(session, 1) for session, answers in enumerate(expected) if answers]
    left = sum(map(len, expected))

    async def client() -> None:
        nonlocal left
        line = Line(urls)
        while left:
            if not ready:  # the others are under way
                await asyncio.sleep(0.001)
                continue
            at = draw.randrange(len(ready))
            ready[at], ready[-1] = ready[-1], ready[at]
            session, turn = ready.pop()
            left -= 1
            if not await one(line, session, turn):
                left -= len(expected[session]) - turn
            elif turn < len(expected[session]):
                ready.append((session, turn + 1))
        line.close()

    async def one(line: Line, session: int, turn: int) -> bool:
        id = f"{placement}{session}"
        at = (
            engine_of_state("", id, len(urls))
            if placement == "affinity"
            else draw.randrange(len(urls))
        )
        begun = time.perf_counter()
        try:
            content = body_of(session, turn, id, numbered=True)
            status, body = await line.ask(at, "/v1/completions", content)
        except (OSError, BadResponse, TimeoutError) as error:
            found.failed.append(f"{id}, turn {turn}: {error!r}")
            return False
        seconds = time.perf_counter() - begun
        if status != 200:
            found.failed.append(f"{id}, turn {turn}: {status} {body}")
            return False
        found.turns += 1
        if turn > 1:
            found.seconds.append(seconds)
        answer, right = Answer.of(body), expected[session][turn - 1]
        if not answer.equals(right):
            found.different.append(f"{id}, turn {turn}: {answer}, not {right}")
        elif answer.stored is not True:
            found.failed.append(f"{id}, turn {turn}: not stored")
        return True

    begun = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for _ in range(clients):
            group.create_task(client())
    found.whole = time.perf_counter() - begun
    return found
