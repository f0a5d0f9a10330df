"""Moving states: the time to keep, fork, download, upload and continue from one."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from loadtest.latency import sums
from loadtest.report import percentile
from loadtest.state.asker import Answer, Asker, Texts

Times = dict[str, list[float]]


async def copies(asker: Asker, texts: Texts, asks: int, url: str) -> dict[str, Any]:
    """Return the seconds of each kind of request, made in turn, and the bytes of a state."""
    made = (await asker.post("/v1/states", {"prompt": texts.draw(64)})).json()
    state, path = made["id"], f"/v1/states/{made['id']}"
    content = (await asker.ask("GET", f"{path}/content")).content
    forget: list[str] = []

    async def forgotten(work: Awaitable[Answer]) -> float:
        answer = await work
        forget.append(answer.json()["id"])
        return answer.whole

    async def one_token() -> float:
        return await asker.first_token("a", cache_salt=texts.salt())

    async def kept() -> float:
        body = {"prompts": ["a"], "max_tokens": 1, "temperature": 0, "return_state": True}
        answer = await asker.post("/v1/generate", {**body, "cache_salt": texts.salt()})
        forget.append(answer.json()["results"][0]["state"]["id"])
        return answer.whole

    async def plain() -> float:
        body = {"prompts": ["a"], "max_tokens": 1, "temperature": 0}
        return (await asker.post("/v1/generate", {**body, "cache_salt": texts.salt()})).whole

    async def download() -> float:
        return (await asker.ask("GET", f"{path}/content")).whole

    ways: dict[str, Callable[[], Awaitable[float]]] = {
        "one token answered": plain,
        "the same, its state kept": kept,
        "fork": lambda: forgotten(asker.post(f"{path}/fork", {})),
        "snapshot (download)": download,
        "restore (upload)": lambda: forgotten(asker.post("/v1/states/import", content)),
        "first token, prompt of one": one_token,
        "first token after a state": lambda: asker.first_token("a", state=state),
    }
    times: Times = {name: [] for name in ways}
    before = sums(url)
    for turn in range(asks + 3):
        for name, way in ways.items():
            seconds = await way()
            if turn >= 3:
                times[name].append(seconds)
        while forget:
            await asker.ask("DELETE", f"/v1/states/{forget.pop()}")
    after = sums(url)
    names = [f'engine_step_seconds_{part}phase="decode"' for part in ("sum", "count")]
    spent, count = (after[name] - before.get(name, 0.0) for name in names)
    await asker.ask("DELETE", path)
    return {
        "times": times,
        "state_bytes": made["bytes"],
        "file_bytes": len(content),
        "decode_step": spent / count,
    }


def restore_cost(found: dict[str, Any]) -> float:
    """Return how many more seconds it takes to start from a state than from nothing."""
    times = found["times"]
    after, plain = times["first token after a state"], times["first token, prompt of one"]
    return percentile(after, 50) - percentile(plain, 50)
