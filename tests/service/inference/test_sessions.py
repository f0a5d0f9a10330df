"""Sessions: turns that go on where the one before stopped, one at a time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.service.harness import Service, fake_runner, running, until

GENERATE, COMPLETIONS, STATES = "/v1/generate", "/v1/completions", "/v1/states"


@pytest.fixture
async def service(byte_folder: Path) -> AsyncIterator[Service]:
    async with running(fake_runner(byte_folder, host_rows=64, step_seconds=0.002)) as service:
        yield service


async def turn(service: Service, prompt: str, **more: Any) -> Any:
    """A turn's choice."""
    body = {"prompt": prompt, "session_id": "talk", "max_tokens": 3, "temperature": 0, **more}
    (choice,) = (await service.post(COMPLETIONS, body))["choices"]
    return choice


async def state(service: Service, session: str = "talk", status: int = 200) -> Any:
    response = await service.http.get(f"{STATES}/session:{session}")
    assert response.status_code == status, response.text
    return response.json()


async def test_turns_follow_each_other(service: Service) -> None:
    first = await turn(service, "abc")
    assert (first["text"], first["state"]["id"]) == ("def", "session:talk")
    assert first["state"]["tokens"] == 6
    assert (await turn(service, ""))["text"] == "ghi"
    last = await turn(service, "st")
    assert (last["text"], last["state"]["tokens"]) == ("uvw", 14)
    assert (await state(service))["tokens"] == 14


async def test_a_new_session_needs_a_prompt(service: Service) -> None:
    body = {"prompt": "", "session_id": "talk"}
    assert "empty" in await service.refused(COMPLETIONS, body, "prompt")
    assert "empty" in await service.refused(COMPLETIONS, {**body, "prompt": None}, "prompt")
    await state(service, status=404)


async def test_several_sessions_in_one_batch(service: Service) -> None:
    body = {"prompts": ["abc", "mno", "x"], "session_id": ["a", "b", None], "temperature": 0}
    body["max_tokens"] = 1
    first, second, third = (await service.post(GENERATE, body))["results"]
    assert (first["state"]["id"], second["state"]["id"]) == ("session:a", "session:b")
    assert "state" not in third
    body = {**body, "prompts": ["", "", "y"]}
    results = (await service.post(GENERATE, body))["results"]
    assert [result["text"] for result in results] == ["e", "q", "z"]
    body = {**body, "session_id": ["a", "a", None]}
    await service.refused(GENERATE, body, "session_id")


@pytest.mark.parametrize("stream", [False, True])
async def test_one_turn_at_a_time(service: Service, stream: bool) -> None:
    await turn(service, "abc")
    long = {"prompt": "a", "session_id": "talk", "max_tokens": 300, "ignore_eos": True}
    held = asyncio.create_task(
        service.http.post(COMPLETIONS, json={**long, "stream": stream, "temperature": 0})
    )
    await until(lambda: service.client.stats.running == 1)
    body = {"prompt": "b", "session_id": "talk"}
    for request in (body, {**body, "stream": True}):
        answer = await service.post(COMPLETIONS, request, 409)
        assert answer["error"]["code"] == "state_busy"
        assert answer["error"]["param"] == "session_id"
    assert (await service.http.delete(f"{STATES}/session:talk")).status_code == 409
    answer = await service.post(STATES, {"prompt": "a", "id": "session:talk"}, 409)
    assert answer["error"]["param"] == "id"
    assert (await state(service))["busy"] is True
    # Others are not held up, not even those that go on from where the session stood.
    body = {"prompt": "", "state": "session:talk", "max_tokens": 3, "temperature": 0}
    assert (await service.post(COMPLETIONS, body))["choices"][0]["text"] == "ghi"
    assert (await held).status_code == 200
    assert (await state(service))["tokens"] == 6 + 301
    await turn(service, "x")


async def test_a_turn_that_nobody_waits_for_has_not_been(service: Service) -> None:
    await turn(service, "abc")
    long = {"prompt": "a", "session_id": "talk", "max_tokens": 10**5, "ignore_eos": True}
    held = asyncio.create_task(service.http.post(COMPLETIONS, json=long))
    await until(lambda: service.client.stats.running == 1)
    held.cancel()
    await asyncio.gather(held, return_exceptions=True)
    await until(lambda: service.client.stats.running == 0)
    assert (await turn(service, ""))["text"] == "ghi"


async def test_a_timeout_keeps_what_came(service: Service) -> None:
    first = await turn(
        service, "a", max_tokens=10**5, ignore_eos=True, timeout=0.2, return_token_ids=True
    )
    assert first["finish_reason"] == "timeout"
    assert first["state"]["tokens"] == 1 + len(first["token_ids"])
    assert (await turn(service, "a"))["text"] == "bcd"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_stop_string_is_not_in_the_state(service: Service, stream: bool) -> None:
    body = {"prompt": "abc", "session_id": "talk", "max_tokens": 20, "temperature": 0}
    body["stop"] = ["gh"]
    if stream:
        frames = await service.stream(COMPLETIONS, body)
        text = "".join(frame["choices"][0]["text"] for frame in frames)
        choice = frames[-1]["choices"][0]
    else:
        choice = await turn(service, "abc", max_tokens=20, stop=["gh"])
        text = choice["text"]
    assert (text, choice["finish_reason"]) == ("def", "stop")
    assert choice["state"]["tokens"] == 6
    assert (await turn(service, ""))["text"] == "ghi"


async def test_a_stop_string_at_the_very_end_is_not_in_the_state(service: Service) -> None:
    """The engine has ended the answer before the stop string is found."""
    for length in (4, 5, 6):
        session = {"session_id": f"talk-{length}"}
        choice = await turn(service, "abc", max_tokens=length, stop=["fg"], **session)
        assert (choice["text"], choice["finish_reason"]) == ("de", "stop")
        assert choice["state"]["tokens"] == 5
        assert (await turn(service, "", **session))["text"] == "fgh"


@pytest.mark.parametrize("stop", ["zzz", "yzz"])
async def test_other_ends_are_what_they_were(service: Service, stop: str) -> None:
    """With stop strings that do not come, end-of-text, stop ids and max_tokens end a turn."""
    for session, more, text, reason in (
        ("eos", {"max_tokens": 20}, "uvwxyz", "stop"),
        ("id", {"max_tokens": 20, "stop_token_ids": [ord("w")]}, "uv", "stop"),
        ("length", {"max_tokens": 2}, "uv", "length"),
        ("late", {"max_tokens": 7, "min_tokens": 7}, None, "length"),
    ):
        choice = await turn(service, "st", stop=[stop], session_id=session, **more)
        assert choice["finish_reason"] == reason
        assert text is None or (choice["text"], choice["state"]["tokens"]) == (text, 2 + len(text))


async def test_a_session_can_be_forked_and_forgotten(service: Service) -> None:
    await turn(service, "abc")
    await service.post(f"{STATES}/session:talk/fork", {"id": "session:other"})
    await turn(service, "xy")
    assert (await turn(service, "", session_id="other"))["text"] == "ghi"
    assert (await service.http.delete(f"{STATES}/session:talk")).status_code == 200
    assert (await turn(service, "k"))["state"]["tokens"] == 4
