"""FairLock: one holder at a time, owners in rotation, and a waiter that leaves delays nobody."""

from __future__ import annotations

import asyncio

from service.inference.inputs.grammar_check import FairLock


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


class Visits:
    """Notes who holds the lock, until `end`."""

    def __init__(self) -> None:
        self.lock = FairLock()
        self.came: list[str] = []
        self._over = asyncio.Event()

    async def visit(self, owner: str) -> None:
        async with self.lock.hold(owner):
            self.came.append(owner)
            self._over.clear()
            await self._over.wait()

    async def end(self) -> None:
        self._over.set()
        await settle()


async def test_owners_go_round() -> None:
    seen = Visits()
    visits = [asyncio.create_task(seen.visit(owner)) for owner in "aaaabcb"]
    await settle()
    assert seen.came == ["a"]
    while not all(visit.done() for visit in visits):
        await seen.end()
    assert "".join(seen.came) == "aabcaba"


async def test_whoever_leaves_holds_nobody_up() -> None:
    seen = Visits()
    first, second, third, last = [asyncio.create_task(seen.visit(owner)) for owner in "abcd"]
    await settle()
    second.cancel()  # while it waits
    await settle()
    first.cancel()  # in its turn, which passes to the third
    await asyncio.sleep(0)
    third.cancel()  # perhaps just when that comes
    await settle()
    assert seen.came[-1] == "d"
    await seen.end()
    assert last.done()
    again = asyncio.create_task(seen.visit("a"))
    await settle()
    assert seen.came[-1] == "a" and len(seen.came) <= 4
    await seen.end()
    await again
