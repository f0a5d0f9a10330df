"""Turns: one at a time, owners go round, and whoever leaves holds nobody up."""

from __future__ import annotations

import asyncio

from service.inference.inputs.fair_lock import FairLock


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


class Desk:
    """Notes who has turns, each of which lasts until `end`."""

    def __init__(self) -> None:
        self.turns = FairLock()
        self.came: list[str] = []
        self._over = asyncio.Event()

    async def visit(self, owner: str) -> None:
        async with self.turns.turn(owner):
            self.came.append(owner)
            self._over.clear()
            await self._over.wait()

    async def end(self) -> None:
        self._over.set()
        await settle()


async def test_owners_go_round() -> None:
    desk = Desk()
    visits = [asyncio.create_task(desk.visit(owner)) for owner in "aaaabcb"]
    await settle()
    assert desk.came == ["a"]
    while not all(visit.done() for visit in visits):
        await desk.end()
    assert "".join(desk.came) == "aabcaba"


async def test_whoever_leaves_holds_nobody_up() -> None:
    desk = Desk()
    first, second, third, last = [asyncio.create_task(desk.visit(owner)) for owner in "abcd"]
    await settle()
    second.cancel()  # while it waits
    await settle()
    first.cancel()  # in its turn, which passes to the third
    await asyncio.sleep(0)
    third.cancel()  # perhaps just when that comes
    await settle()
    assert desk.came[-1] == "d"
    await desk.end()
    assert last.done()
    again = asyncio.create_task(desk.visit("a"))
    await settle()
    assert desk.came[-1] == "a" and len(desk.came) <= 4
    await desk.end()
    await again
