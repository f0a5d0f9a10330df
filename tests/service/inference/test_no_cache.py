"""`no_cache`: whatever a request asks for beside it, nothing is found and nothing is left."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.service.chat import chat_runner
from tests.service.harness import Service, fake_runner, running
from tests.service.inference.test_operation import scrape, value

GENERATE, COMPLETIONS, SCORE, STATES = (
    f"/v1/{name}" for name in ("generate", "completions", "score", "states")
)
GREEDY = {"max_tokens": 2, "temperature": 0}
TEXT = "a long prompt that could be cached, " * 8  # more than two whole chunks
CONTINUATIONS = [f"{chr(letter)} end" for letter in range(97, 102)]
REQUESTS: list[tuple[str, dict[str, Any]]] = [
    (COMPLETIONS, {"prompt": TEXT, **GREEDY}),
    (COMPLETIONS, {"prompt": TEXT, "n": 3, "best_of": 4, **GREEDY}),
    (COMPLETIONS, {"prompt": TEXT, "n": 3, "return_state": True, **GREEDY}),
    (COMPLETIONS, {"prompt": [TEXT + one for one in CONTINUATIONS], **GREEDY}),
    (COMPLETIONS, {"prompt": TEXT, "echo": True, "logprobs": 1, "max_tokens": 0}),
    (GENERATE, {"prompts": [TEXT + one for one in CONTINUATIONS], **GREEDY}),
    (SCORE, {"texts": [TEXT + one for one in CONTINUATIONS]}),
    (SCORE, {"items": [{"context": TEXT, "continuations": CONTINUATIONS}]}),
    (STATES, {"prompt": TEXT}),
]


@pytest.fixture(params=[False, True])
async def service(byte_folder: Path, request: pytest.FixtureRequest) -> AsyncIterator[Service]:
    runner = fake_runner(
        byte_folder, host_rows=64, share_slots=64, deterministic=request.param, slots=4
    )
    async with running(runner) as service:
        yield service


def cached_texts(service: Service) -> int:
    trees = service.engine._cache.cache._trees.values()
    return sum(not tree.empty for tree in trees)


def answers(answer: dict[str, Any]) -> Any:
    """What does not differ from one request to the next."""
    told = answer.get("choices") or answer.get("results") or [answer["tokens"]]
    for one in told:
        if isinstance(one, dict):
            one.pop("state", None)
            one.pop("usage", None)
    return told


@pytest.mark.parametrize(("path", "body"), REQUESTS)
async def test_it_is_answered_alike(service: Service, path: str, body: dict[str, Any]) -> None:
    for _ in range(2):
        answer = await service.post(path, {**body, "no_cache": True})
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        assert cached_texts(service) == 0
    with_cache = await service.post(path, {**body, "no_cache": False})
    assert answers(with_cache) == answers(answer)
    if body.get("max_tokens"):  # of texts that are only read, some leave nothing in any case
        assert cached_texts(service) == 1
    again = await service.post(path, {**body, "no_cache": True})
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    families = await scrape(service)
    asked = sum(one.prompt_tokens for one in service.runner.admitted if not one.no_cache)
    assert value(families, "minserve_prefix_cache_queries_tokens_total") == asked


async def test_streams_and_sessions(service: Service) -> None:
    body = {"prompt": TEXT, "session_id": "talk", "no_cache": True, **GREEDY}
    for _ in range(2):
        frames = await service.stream(
            COMPLETIONS, {**body, "stream_options": {"include_usage": True}}
        )
        assert frames[-1]["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        assert cached_texts(service) == 0
    state = (await service.http.get(f"{STATES}/session:talk")).json()
    assert state["tokens"] == 2 * (len(TEXT) + 2)


async def test_each_prompt_decides_for_itself(service: Service) -> None:
    body = {"prompts": [TEXT, TEXT[::-1]], "no_cache": [True, None], **GREEDY}
    await service.post(GENERATE, body)
    results = (await service.post(GENERATE, {**body, "no_cache": None}))["results"]
    known = [one["usage"]["prompt_tokens_details"]["cached_tokens"] for one in results]
    assert known == [0, len(TEXT)]


async def test_chat_has_it(tmp_path: Path) -> None:
    runner = chat_runner(tmp_path, share_slots=64)
    async with running(runner) as service:
        messages = [{"role": "user", "content": TEXT}]
        body = {"messages": messages, "n": 2, **GREEDY}
        for _ in range(2):
            answer = await service.post("/v1/chat/completions", {**body, "no_cache": True})
            assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
            assert cached_texts(service) == 0


@pytest.mark.parametrize("other", [{"cache_salt": "s"}, {"cache_points": [1]}])
@pytest.mark.parametrize(
    ("path", "body"), [(path, body) for path, body in REQUESTS if "best_of" not in body]
)
async def test_what_contradicts_it(
    service: Service, path: str, body: dict[str, Any], other: dict[str, Any]
) -> None:
    message = await service.refused(path, {**body, **other, "no_cache": True}, "no_cache")
    assert f"not allowed together with {next(iter(other))}" in message
    await service.post(path, {**body, **other, "no_cache": False})
    nothing = {"cache_salt": "", "cache_points": []}
    await service.post(path, {**body, **nothing, "no_cache": True})


async def test_bad_values(service: Service) -> None:
    body = {"prompts": ["a", "b"], "no_cache": [True, "yes"]}
    assert "boolean" in await service.refused(GENERATE, body, "no_cache[1]")
    body = {"prompts": ["a", "b"], "no_cache": [False, True], "cache_salt": "s"}
    assert "cache_salt" in await service.refused(GENERATE, body, "no_cache[1]")
