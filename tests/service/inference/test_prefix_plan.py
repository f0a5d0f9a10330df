"""Batches whose prompts begin alike: where they part is found, and shared parts are read once."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from engine.protocol.token_ids import pack_ids
from service.inference.prefix_plan import LEAST, MOST_POINTS, junctions
from tests.service.harness import Service, fake_runner, running

GENERATE, COMPLETIONS, SCORE, STATES = (
    f"/v1/{name}" for name in ("generate", "completions", "score", "states")
)


def found(*prompts: str) -> list[tuple[int, ...]]:
    return junctions([pack_ids(prompt.encode()) for prompt in prompts])


def test_where_prompts_part() -> None:
    a, b, c = "a" * 20, "b" * 30, "c" * 40
    assert found() == [] and found(a) == [()]
    assert found(a, b) == [(), ()]
    assert found(a + "x", b, a + "y") == [(20,), (), (20,)]
    assert found(a + b + "x", a + b + "y", a + c) == [(20, 50), (20, 50), (20,)]
    assert found(a + b + "1", a + b + "2", a + c + "1", a + c + "2") == [
        (20, 50), (20, 50), (20, 60), (20, 60),
    ]  # fmt: skip
    assert found(a, a + b) == [(), (20,)], "at its own end a state is kept anyhow"
    assert found("a" * 15 + "x", "a" * 15 + "y") == [(), ()], "too little to stop there for"
    ladder = [a + "b" * (20 * i) + "x" for i in range(20)]
    assert all(len(points) <= MOST_POINTS for points in found(*ladder))


def _drawn(chance: random.Random) -> str:
    parts = chance.randint(1, 5)
    return "".join(chance.choice("ab") * chance.choice([5, 20]) for _ in range(parts))


def test_any_two_prompts_part_at_a_point_of_both() -> None:
    chance = random.Random(3)
    for _ in range(200):
        prompts = list({_drawn(chance) for _ in range(chance.randint(2, 9))})
        points = found(*prompts)
        for i, one in enumerate(prompts):
            expected = set()
            for other in prompts:
                same = 0
                while same < min(len(one), len(other)) and one[same] == other[same]:
                    same += 1
                if other != one and same >= LEAST and same < len(one):
                    expected.add(same)
            assert points[i] == tuple(sorted(expected))


@pytest.fixture
async def service(byte_folder: Path) -> AsyncIterator[Service]:
    async with running(fake_runner(byte_folder, host_rows=64)) as service:
        yield service


async def tokens_read(service: Service, path: str, body: Any) -> tuple[int, Any]:
    """How many tokens the model reads for a request, and its answer."""
    read: list[int] = []
    start = service.runner.start
    service.runner.start = lambda plan: (  # type: ignore[method-assign]
        read.extend(len(chunk.tokens) for chunk in plan.prefill), start(plan),
    )[1]  # fmt: skip
    answer = await service.post(path, body if path == SCORE else {**ONE, **body})
    service.runner.start = start  # type: ignore[method-assign]
    return sum(read), answer


ONE = {"max_tokens": 1, "temperature": 0}
STEM = "once upon a time there was a "
PROMPTS = [STEM + "king " * 10 + "a", STEM + "king " * 10 + "b", STEM + "queen", STEM + "cat"]
SHARED = len(STEM) + 50 + 1 + 1 + len("queen") + len("cat")


@pytest.mark.parametrize("path", [GENERATE, COMPLETIONS])
@pytest.mark.parametrize("state", [None, "before"])
async def test_each_shared_part_is_read_once(
    service: Service, path: str, state: str | None
) -> None:
    await service.post(STATES, {"prompt": "abc", "id": "before"})
    name = "prompts" if path == GENERATE else "prompt"
    read, answer = await tokens_read(service, path, {name: PROMPTS, "state": state})
    assert read == SHARED + (1 if state else 0), "and the state's last token"
    results = answer["results" if path == GENERATE else "choices"]
    assert [result["text"] for result in results] == ["b", "c", "o", "u"]


async def test_prompts_after_different_states_share_nothing(service: Service) -> None:
    for id in ("one", "two"):
        await service.post(STATES, {"prompt": "abc" + id, "id": id})
    body = {"prompts": PROMPTS[:2], "state": ["one", "two"]}
    read, _ = await tokens_read(service, GENERATE, body)
    assert read == 2 * len(PROMPTS[0]) + 2


async def test_samples_of_several_prompts_share_them(service: Service) -> None:
    read, answer = await tokens_read(service, COMPLETIONS, {"prompt": PROMPTS, "n": 3})
    assert read == SHARED
    assert len(answer["choices"]) == 12


async def test_contexts_of_several_items_share_their_beginning(service: Service) -> None:
    """As examples in front of every question do."""
    items = [
        {"context": STEM * 4 + question, "continuations": [" yes", " no"]}
        for question in ("is it?", "was it?", "how?")
    ]
    read, answer = await tokens_read(service, SCORE, {"items": items})
    # Each continuation reads its context's last token and its own.
    contexts = len(STEM) * 4 + sum(len(item["context"]) - len(STEM) * 4 - 1 for item in items)
    assert read == contexts + 3 * (1 + len(" yes") + 1 + len(" no"))
    assert [len(result["continuations"]) for result in answer["results"]] == [2, 2, 2]
