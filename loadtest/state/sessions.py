"""Idle sessions: begun, resumed at random, and the memory they take."""

from __future__ import annotations

import asyncio
import random
import time
from typing import Any

from loadtest.state.asker import Asker, Texts
from loadtest.subject import Subject

BATCH = 64  # turns of one request
PROMPT = 8  # letters of a turn


async def sessions(
    subject: Subject, texts: Texts, count: int, resumes: int, clients: int, seed: int
) -> dict[str, Any]:
    """Measure sessions.

    Raises RuntimeError if a turn's state has not grown by just that turn.
    """
    lengths: dict[str, int] = {}
    errors: list[str] = []
    before = subject.memory()
    names = [f"s{number}" for number in range(count)]
    begun = time.perf_counter()
    await _turns(subject.url, texts, names, clients, lengths, errors)
    created = time.perf_counter() - begun
    after = subject.memory()
    chosen = random.Random(seed).choices(names, k=resumes)
    begun = time.perf_counter()
    # The same session twice in a batch would be two turns at a time.
    await _turns(subject.url, texts, list(dict.fromkeys(chosen)), clients, lengths, errors)
    resumed = time.perf_counter() - begun
    return {
        "sessions": count,
        "resumes": len(set(chosen)),
        "errors": len(errors),
        "first_errors": errors[:3],
        "create_seconds": created,
        "resume_seconds": resumed,
        "memory_mib": after - before,
        "memory_at_end_mib": subject.memory() - before,
    }


async def _turns(
    url: str,
    texts: Texts,
    names: list[str],
    clients: int,
    lengths: dict[str, int],
    errors: list[str],
) -> None:
    batches = [names[i : i + BATCH] for i in range(0, len(names), BATCH)]

    async def client(asker: Asker) -> None:
        while batches:
            await _batch(asker, texts, batches.pop(), lengths, errors)
        asker.close()

    await asyncio.gather(*(client(Asker(url)) for _ in range(clients)))


async def _batch(
    asker: Asker, texts: Texts, names: list[str], lengths: dict[str, int], errors: list[str]
) -> None:
    body = {
        "prompts": [texts.draw(PROMPT) for _ in names],
        "session_id": names,
        "max_tokens": 1,
        "ignore_eos": True,
        "timeout": 600,
    }
    try:
        results = (await asker.post("/v1/generate", body)).json()["results"]
    except (RuntimeError, OSError) as error:
        errors += [str(error)] * len(names)
        return
    for name, result in zip(names, results, strict=True):
        lengths[name] = lengths.get(name, 0) + PROMPT + 1
        if "error" in result:
            errors.append(result["error"]["message"])
        elif result["state"]["tokens"] != lengths[name]:
            errors.append(f"{name} has {result['state']['tokens']} tokens, not {lengths[name]}")
