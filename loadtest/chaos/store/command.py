"""Turns of many sessions at random servers under faults, and what is left of them."""

from __future__ import annotations

import asyncio
import random
import tempfile
import time
from argparse import Namespace
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from loadtest.chaos.store.client import KEYS, Lost, Seen, ask_until_done, id_of, owner_of
from loadtest.chaos.store.faults import World
from loadtest.chaos.store.proxy import Proxy
from loadtest.report import percentile, print_table, save_json
from loadtest.served import free_port
from loadtest.store.redis import RedisProcess
from loadtest.store.turns import Answer, Line, witness
from loadtest.subject import Subject

STORES = ("redis", "folder")
WITNESSES = 8  # turns under way at a time at the witness
SHOWN = 10  # of what went wrong
TOLD_SECONDS = 30.0  # between two lines of how far it is


@dataclass
class Result:
    """What has happened, what clients have seen, and what the store has in the end."""

    happened: dict[str, list[float]]  # seconds from each fault until a turn was carried out
    seen: Seen
    checked: int  # sessions whose last state is right
    seconds: float


def _settings(args: Namespace) -> dict[str, Any]:
    keys = ",".join(f"{name}:{key}" for name, key in KEYS.items())
    return {"deterministic": True, "max_slots": args.users, "api_keys": keys}


async def _carry_out(world: World, expected: list[list[Answer]], args: Namespace) -> Result:
    """Carry out all turns but each session's last, under faults; then the last ones without."""
    urls = [subject.url for subject in world.subjects]
    seen, draw = Seen(last=time.monotonic()), random.Random(args.seed)
    ready = [(session, 1) for session in range(len(expected))]
    under_way = 0
    wrong = set[int]()

    async def user(seed: int) -> None:
        nonlocal under_way
        lines = {owner: Line(urls, key) for owner, key in KEYS.items()}
        mine = random.Random(f"{args.seed}/{seed}")
        while ready or under_way:
            if not ready:
                await asyncio.sleep(0.01)
                continue
            at = draw.randrange(len(ready))
            ready[at], ready[-1] = ready[-1], ready[at]
            session, turn = ready.pop()
            under_way += 1
            try:
                right = expected[session][turn - 1]
                await ask_until_done(lines, len(urls), session, turn, right, mine, seen)
                if turn < len(expected[session]) - 1:
                    ready.append((session, turn + 1))
            except Lost as error:
                seen.wrong.append(str(error))
                wrong.add(session)
            finally:
                under_way -= 1
        for line in lines.values():
            line.close()

    async def tell() -> None:
        while True:
            await asyncio.sleep(TOLD_SECONDS)
            print(f"{time.monotonic() - begun:.0f} s: {seen.turns:,} turns", flush=True)

    over = asyncio.Event()
    begun = time.monotonic()
    telling = asyncio.create_task(tell())
    trouble = asyncio.create_task(world.trouble(args.every, over))
    async with asyncio.TaskGroup() as group:
        for number in range(args.users):
            group.create_task(user(number))
    seconds = time.monotonic() - begun
    telling.cancel()
    over.set()
    await trouble  # all servers are ready again
    checked = 0
    lines = {owner: Line(urls, key) for owner, key in KEYS.items()}
    for session, answers in enumerate(expected):
        if session not in wrong:
            checked += await _check(lines, urls, session, answers, draw, seen)
    happened = {
        fault: [seen.next_after(moment) for moment in moments]
        for fault, moments in world.happened.items()
    }
    return Result(happened, seen, checked, seconds)


async def _check(
    lines: dict[str, Line],
    urls: list[str],
    session: int,
    answers: list[Answer],
    draw: random.Random,
    seen: Seen,
) -> bool:
    """Return whether the session's last turn follows from the state that the store has."""
    right, last = answers[-1], len(answers)
    calm = Seen(last=time.monotonic())
    try:
        await ask_until_done(lines, len(urls), session, last, right, draw, calm)
        line = lines[owner_of(session)]
        path = f"/v1/states/session:{id_of(session)}"
        status, told = await line.ask(draw.randrange(len(urls)), path, b"", "GET")
        if status != 200 or (told["turns"], told["tokens"]) != (last, right.tokens):
            raise Lost(f"session {session} has {told}, not {last} turns of {right.tokens} tokens")
    except Lost as error:
        seen.wrong.append(str(error))
        return False
    return True


async def _run(args: Namespace) -> Result:
    turns = -(-args.turns // args.sessions)
    with Subject(deterministic=True) as subject:
        await subject.started()
        expected, _ = await witness(subject.url, args.sessions, turns + 1, WITNESSES)
    print(f"witness: {args.sessions} sessions of {turns} turns", flush=True)
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        redis: RedisProcess | None = None
        proxies: list[Proxy] = []
        urls = [f"file://{folder}/states"] * args.servers
        if args.store == "redis":
            (folder / "redis").mkdir()
            redis = stack.enter_context(RedisProcess(folder / "redis"))
            for _ in range(args.servers):
                proxies.append(await stack.enter_async_context(Proxy(redis.port)))
            urls = [f"redis://127.0.0.1:{proxy.port}/0" for proxy in proxies]
        settings = [{**_settings(args), "state_store": url, "port": free_port()} for url in urls]
        world = World(settings, proxies, redis, args.seed)
        stack.callback(world.close)
        await world.started()
        return await _carry_out(world, expected, args)


def run(args: Namespace) -> int:
    """Run it, print what came of it, and return 1 if anything was lost, doubled or mixed up."""
    try:
        result = asyncio.run(_run(args))
    except (RuntimeError, OSError) as error:
        print(f"not measured: {error}")
        return 2
    except ExceptionGroup as errors:
        if errors.split((RuntimeError, OSError))[1] is not None:
            raise
        print(f"not measured: {errors.exceptions}")
        return 2
    seen = result.seen
    print_table(
        f"what happened in {result.seconds:.0f} s",
        ["fault", "times", "until a turn was carried out, s: p50", "longest"],
        [
            [name, str(len(after)), f"{percentile(after, 50):.2f}", f"{max(after):.1f}"]
            for name, after in sorted(result.happened.items())
        ],
    )
    print_table(
        "why turns were asked for again",
        ["answer", "times"],
        [[why, str(count)] for why, count in seen.retries.most_common()],
    )
    print(
        f"{seen.turns:,} turns of {args.sessions} sessions, "
        f"{sum(seen.retries.values()):,} asked for again, {seen.done_before:,} told turn_done; "
        f"the slowest took {seen.slowest:.1f} s, and none was carried out for {seen.gap:.1f} s"
    )
    print(
        f"{result.checked} of {args.sessions} sessions end as the witness's; "
        f"{len(seen.wrong)} lost, doubled or another's"
    )
    for line in seen.wrong[:SHOWN]:
        print(" ", line)
    save_json(args.json, msgspec.to_builtins(result))
    return 0 if result.checked == args.sessions and not seen.wrong else 1
