"""Keys, priorities and time limits over HTTP: what a request may ask for and what comes of it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.service.chat import chat_runner
from tests.service.harness import Service, fake_runner, running, until

KEYS = {name: f"{name}-0123456789abcdef" for name in ("alice", "bob", "vip", "batch")}
ENTRIES = ",".join(
    f"{name}:{key}" + {"vip": " priority=-10", "batch": " priority=5"}.get(name, "")
    for name, key in KEYS.items()
)
GENERATE, COMPLETIONS, SCORE = "/v1/generate", "/v1/completions", "/v1/score"
CHAT = "/v1/chat/completions"
BODIES: list[tuple[str, dict[str, Any]]] = [
    (GENERATE, {"prompts": ["ab"], "max_tokens": 2}),
    (COMPLETIONS, {"prompt": "ab", "max_tokens": 2}),
    (CHAT, {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2}),
    (SCORE, {"texts": ["abc"]}),
]


def headers(name: str) -> dict[str, str]:
    return {"x-api-key": KEYS[name]}


def seen(service: Service) -> list[tuple[str, int]]:
    """Owner and priority of the requests that the model was given, in order."""
    return [(one.owner, one.priority) for one in service.runner.admitted]


@pytest.mark.parametrize(("path", "body"), BODIES)
async def test_priorities_reach_the_engine(tmp_path: Path, path: str, body: Any) -> None:
    async with running(chat_runner(tmp_path)) as service:
        for priority in (-100, 100):
            await service.post(path, {**body, "priority": priority})
            assert seen(service)[-1] == ("", priority)
        await service.post(path, body)
        assert seen(service)[-1] == ("", 0)
        for wrong in (-101, 101, "1", 1.5):
            message = await service.refused(path, {**body, "priority": wrong}, "priority")
            assert "priority" in message


@pytest.mark.parametrize(("path", "body"), BODIES)
async def test_keys_limit_priorities(tmp_path: Path, path: str, body: Any) -> None:
    async with running(chat_runner(tmp_path), api_keys=ENTRIES) as service:

        async def post(name: str, **fields: Any) -> Any:
            return await service.http.post(path, json={**body, **fields}, headers=headers(name))

        for name, default, least in (("alice", 0, 0), ("vip", 0, -10), ("batch", 5, 5)):
            assert (await post(name)).status_code == 200
            assert seen(service)[-1] == (name, default)
            assert (await post(name, priority=least)).status_code == 200
            assert seen(service)[-1] == (name, least)
            refused = await post(name, priority=least - 1)
            assert refused.status_code == 400
            assert f"allowed with this key: {least} to 100" in refused.json()["error"]["message"]


async def test_each_prompt_may_have_its_own_priority(byte_folder: Path) -> None:
    async with running(fake_runner(byte_folder)) as service:
        body = {"prompts": ["a", "b", "c"], "max_tokens": 1, "priority": [3, None, -3]}
        await service.post(GENERATE, body)
        assert sorted(seen(service)) == [("", -3), ("", 0), ("", 3)]
        await service.refused(GENERATE, {**body, "priority": [1, 2]}, "priority")


@pytest.mark.parametrize(("path", "body"), BODIES)
async def test_requests_name_their_time(tmp_path: Path, path: str, body: Any) -> None:
    runner = chat_runner(tmp_path, max_step_tokens=1, step_seconds=0.02)
    async with running(runner, max_request_timeout=50.0) as service:
        for wrong in (0, -1, 50.1, "1"):
            await service.refused(path, {**body, "timeout": wrong}, "timeout")
        if path == SCORE:
            body = {"texts": ["a" * 1000]}
            message = await service.refused(path, {**body, "timeout": 0.1}, None, 504)
            assert "timed out" in message
            return
        body = {**body, "max_tokens": 1000, "ignore_eos": True, "timeout": 0.3}
        answer = await service.post(path, body)
        (choice,) = answer.get("choices") or answer["results"]
        assert choice["finish_reason"] == "timeout"


async def test_the_default_time_is_within_the_limit(byte_folder: Path) -> None:
    runner = fake_runner(byte_folder, step_seconds=0.01)
    async with running(runner, max_request_timeout=0.1) as service:
        body = {"prompts": ["a"], "max_tokens": 100_000, "ignore_eos": True}
        (result,) = (await service.post(GENERATE, body))["results"]
        assert result["finish_reason"] == "timeout"


async def test_one_keys_flood_neither_refuses_nor_holds_up_another(byte_folder: Path) -> None:
    runner = fake_runner(byte_folder, slots=1, max_waiting=8, step_seconds=0.005)
    async with running(runner, api_keys=ENTRIES) as service:

        async def post(name: str, **fields: Any) -> Any:
            body = {"prompts": ["a"], "max_tokens": 20, "ignore_eos": True, **fields}
            return await service.http.post(GENERATE, json=body, headers=headers(name))

        flood = [asyncio.create_task(post("alice")) for _ in range(7)]
        await until(lambda: service.client.stats.waiting == 6)
        refused = await post("alice")
        assert refused.status_code == 429
        assert refused.json()["error"]["code"] == "share_full"
        assert int(refused.headers["retry-after"]) >= 1
        answer = await post("bob")
        assert answer.status_code == 200
        assert sum(task.done() for task in flood) <= 2, "it was next, though it came last"
        assert [(await task).status_code for task in flood] == [200] * 7
        assert service.client.queued.owners == 0


async def test_the_queue_is_bounded_in_tokens(byte_folder: Path) -> None:
    runner = fake_runner(byte_folder, slots=1, max_waiting_tokens=100, step_seconds=0.005)
    async with running(runner, max_waiting_tokens=100) as service:
        body = {"prompts": ["a" * 90], "max_tokens": 100, "ignore_eos": True}
        held = [asyncio.create_task(service.http.post(GENERATE, json=body))]
        await until(lambda: service.client.stats.running == 1)
        held.append(asyncio.create_task(service.http.post(GENERATE, json=body)))
        await until(lambda: service.client.stats.waiting == 1)
        message = await service.refused(GENERATE, {"prompts": ["a" * 50]}, None, 429)
        assert "90 prompt tokens are waiting already" in message
        await service.post(GENERATE, {"prompts": ["a" * 10], "max_tokens": 1})
        big = asyncio.create_task(service.http.post(GENERATE, json={"prompts": ["a" * 500]}))
        assert [(await task).status_code for task in held] == [200, 200]
        assert (await big).status_code in (200, 429)


async def test_a_batch_that_could_never_wait_is_refused_for_good(byte_folder: Path) -> None:
    runner = fake_runner(byte_folder, slots=1, max_waiting_tokens=100)
    async with running(runner, max_waiting_tokens=100) as service:
        two = {"prompts": ["a" * 60, "b" * 60], "max_tokens": 1}
        samples = {"prompt": "a" * 60, "n": 2, "max_tokens": 1}
        item = {"context": "a" * 60, "continuations": ["b", "c"]}
        for path, body in (
            (GENERATE, two),
            (GENERATE, {**two, "stream": True}),
            ("/v1/completions", samples),
            ("/v1/score", {"items": [item]}),
        ):
            message = await service.refused(path, body, None)
            assert "at most 100 prompt tokens" in message
        await service.post(GENERATE, {**two, "prompts": ["a" * 50, "b" * 50]})
        await service.post(GENERATE, {**two, "prompts": ["a" * 500]})


async def test_a_queue_that_is_full_of_tokens_reads_no_body(byte_folder: Path) -> None:
    runner = fake_runner(byte_folder, slots=1, max_waiting_tokens=100, step_seconds=0.005)
    async with running(runner, max_waiting_tokens=100) as service:
        body = {"prompts": ["a" * 100], "max_tokens": 50, "ignore_eos": True}
        held = [asyncio.create_task(service.http.post(GENERATE, json=body))]
        await until(lambda: service.client.stats.running == 1)
        held.append(asyncio.create_task(service.http.post(GENERATE, json=body)))
        await until(lambda: service.client.stats.waiting == 1)
        response = await service.http.post(GENERATE, content=b"this is no JSON")
        assert response.status_code == 429
        assert [(await task).status_code for task in held] == [200, 200]
