"""A long shared context: read, cached, named, brought back, and read once for many."""

from __future__ import annotations

import asyncio
import base64
import time
from typing import Any

from engine.protocol.token_ids import pack_ids
from loadtest.report import percentile
from loadtest.state.asker import Asker, Texts
from service.http.json_response import encode
from service.text.tokenizer import Tokenizer


async def first_tokens(
    asker: Asker, texts: Texts, length: int, asks: int, rows: int
) -> dict[str, list[float]]:
    """Return the seconds to the first token after a context of `length` letters, by its source.

    The device holds `rows` states.
    """
    context = texts.draw(length)
    times: dict[str, list[float]] = {"prompt of one token": []}
    for name in ("cold", "the second, which finds where they part"):
        times[name] = [await asker.first_token(context + texts.draw(8))]
    made = (await asker.post("/v1/states", {"prompt": context})).json()
    path = f"/v1/states/{made['id']}"
    await asker.post(f"{path}/fork", {"id": "session:long"})
    snapshot = base64.b64encode((await asker.ask("GET", f"{path}/content")).content).decode()
    # Distinct states, more than the device holds: whoever is next has been put out.
    others = [
        (await asker.post("/v1/states", {"prompt": texts.draw(1), "state": made["id"]})).json()
        for _ in range(rows + 8)
    ]
    named = ("cached", "state", "session", "state out on the host", "uploaded with it")
    times |= {name: [] for name in named}
    for _ in range(asks):
        times["prompt of one token"].append(await asker.first_token("a", cache_salt=texts.salt()))
        times["cached"].append(await asker.first_token(context + texts.draw(8)))
        times["state"].append(await asker.first_token("a", state=made["id"]))
        times["session"].append(await asker.first_token("a", session_id="long"))
        times["uploaded with it"].append(await asker.first_token("a", state={"snapshot": snapshot}))
    for turn in range(asks):
        state = others[turn % len(others)]["id"]
        times["state out on the host"].append(await asker.first_token("a", state=state))
    for state in [*(other["id"] for other in others), made["id"], "session:long"]:
        await asker.ask("DELETE", f"/v1/states/{state}")
    return times


def reading_seconds(tokenizer: Tokenizer, length: int, asks: int) -> float:
    """Return the median seconds to parse and tokenise such a prompt."""
    body = encode({"prompts": [Texts(0).draw(length)]})
    times = []
    for _ in range(asks):
        begun = time.perf_counter()
        pack_ids(tokenizer.encode(_parse(body)["prompts"][0]))
        times.append(time.perf_counter() - begun)
    return percentile(times, 50)


def _parse(body: bytes) -> Any:
    import pydantic_core

    return pydantic_core.from_json(body, allow_inf_nan=False)


async def samples(url: str, texts: Texts, length: int, n: int, tokens: int) -> dict[str, float]:
    """Return the seconds of `n` samples of one prompt, and of `n` requests that share nothing."""
    asker = Asker(url)

    async def complete(asker: Asker, prompt: str, n: int, tokens: int) -> float:
        body = {"prompt": prompt, "n": n, "max_tokens": tokens, "ignore_eos": True}
        return (await asker.post("/v1/completions", body)).whole

    found = {"prefill": await complete(asker, texts.draw(length), 1, 1)}
    found["decode"] = await complete(asker, texts.draw(1), n, tokens)
    found["together"] = await complete(asker, texts.draw(length), n, tokens)
    askers = [Asker(url) for _ in range(n)]
    begun = time.perf_counter()
    await asyncio.gather(*(complete(one, texts.draw(length), 1, tokens) for one in askers))
    found["apart"] = time.perf_counter() - begun
    for one in (asker, *askers):
        one.close()
    return found


async def continuations(url: str, texts: Texts, length: int, count: int) -> dict[str, float]:
    """Return the seconds to score `count` continuations of one context.

    They are sent in one request, and as one request each with contexts that share nothing.
    """
    asker = Asker(url)
    context, endings = texts.draw(length), [texts.draw(8) for _ in range(count)]

    async def score(endings: list[str], salt: str | None = None) -> float:
        items = [{"context": context, "continuations": endings}]
        return (await asker.post("/v1/score", {"items": items, "cache_salt": salt})).whole

    together = await score(endings)
    apart = sum([await score([ending], texts.salt()) for ending in endings])
    asker.close()
    return {"together": together, "apart": apart}
