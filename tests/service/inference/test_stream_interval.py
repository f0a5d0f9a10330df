"""Streams of several tokens an event: the same answer, the first tokens at once, nothing held."""

from __future__ import annotations

import asyncio
import json
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest

from engine.client import request_stream
from tests.service.chat import chat_runner
from tests.service.harness import Service, fake_runner, running, until
from tests.service.inference.test_lifecycle import Connection

GENERATE, COMPLETIONS = "/v1/generate", "/v1/completions"
CHAT = "/v1/chat/completions"
TOKENS = 50
SAMPLING = {"max_tokens": TOKENS, "temperature": 1.0, "seed": 3, "ignore_eos": True}
BODIES: list[tuple[str, dict[str, Any]]] = [
    (GENERATE, {"prompts": ["ab", "xy"], "logprobs": 2, **SAMPLING}),
    (COMPLETIONS, {"prompt": "ab", "logprobs": 2, "return_token_ids": True, **SAMPLING}),
    (COMPLETIONS, {"prompt": "ab", "n": 2, "echo": True, "return_token_ids": True, **SAMPLING}),
    (
        CHAT,
        {
            "messages": [{"role": "user", "content": "a"}],
            "logprobs": True,
            "return_token_ids": True,
            **SAMPLING,
        },
    ),
]


def parts(path: str, frames: list[Any]) -> dict[int, list[dict[str, Any]]]:
    """What each event adds, by choice: text, token ids and log-probabilities."""
    found: dict[int, list[dict[str, Any]]] = {}
    for frame in frames:
        for choice in [frame] if path == GENERATE else frame["choices"]:
            text = choice["delta"]["content"] if path == CHAT else choice["text"]
            logprobs = choice["logprobs"]
            if path == CHAT:
                values = [entry["logprob"] for entry in logprobs["content"]]
            else:
                values = logprobs["token_logprobs"] if logprobs else None
            found.setdefault(choice["index"], []).append(
                {
                    "text": text,
                    "ids": choice["token_ids"],
                    "logprobs": values,
                    "finish_reason": choice["finish_reason"],
                }
            )
    return found


def whole(events: list[dict[str, Any]]) -> tuple[str, list[int], list[float], list[Any]]:
    return (
        "".join(event["text"] for event in events),
        [id for event in events for id in event["ids"]],
        [value for event in events for value in event["logprobs"] or []],
        [event["finish_reason"] for event in events if event["finish_reason"]],
    )


def most_events(interval: int) -> int:
    """The first tokens and the last ones may be fewer; a reader that is behind is given more than
    an interval at once, which can make two events of less than two."""
    return 2 + 2 * TOKENS // interval


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens may be held for as long as it takes."""
    monkeypatch.setattr(request_stream, "MOST_HELD_SECONDS", 1000.0)


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("interval", [2, 7, 16, 1024])
@pytest.mark.parametrize(("path", "body"), BODIES)
async def test_the_answer_is_the_same_in_fewer_events(
    tmp_path: Path, path: str, body: dict[str, Any], interval: int
) -> None:
    async with running(chat_runner(tmp_path)) as service:
        one_by_one = parts(path, await service.stream(path, body))
        joined = parts(path, await service.stream(path, {**body, "stream_interval": interval}))
    for index, events in joined.items():
        assert whole(events) == whole(one_by_one[index])
        sizes = [len(event["ids"]) for event in events if event["ids"]]
        assert max(sizes) <= interval and len(sizes) <= most_events(interval)


@pytest.mark.usefixtures("patient")
async def test_a_server_has_its_interval_and_requests_may_name_another(byte_folder: Path) -> None:
    async with running(fake_runner(byte_folder), stream_interval=10) as service:

        async def events(**fields: Any) -> int:
            return len(await service.stream(GENERATE, {"prompts": ["a"], **SAMPLING, **fields}))

        assert await events() <= most_events(10) < TOKENS
        assert await events(stream_interval=TOKENS) <= most_events(TOKENS) < 5
        assert await events(stream_interval=1) == TOKENS
        for wrong in (0, -1, 1025, "2", 1.5):
            body = {"prompts": ["a"], "stream_interval": wrong}
            await service.refused(GENERATE, body, "stream_interval")


async def test_a_slow_model_is_not_waited_for(byte_folder: Path) -> None:
    """With 20 ms a token, what is held for 50 ms is three or four tokens."""
    async with running(fake_runner(byte_folder, step_seconds=0.02)) as service:
        body = {"prompts": ["a"], **SAMPLING, "stream_interval": 1000}
        frames = await service.stream(GENERATE, body)
    sizes = [len(frame["token_ids"]) for frame in frames]
    assert sum(sizes) == TOKENS
    assert len(frames) >= 5 and max(sizes) < TOKENS - 1


@pytest.mark.usefixtures("patient")
async def test_usage_counts_the_tokens_of_all_events_so_far(service: Service) -> None:
    body = {
        "prompt": "ab", **SAMPLING, "stream_interval": 20, "return_token_ids": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }  # fmt: skip
    frames = await service.stream(COMPLETIONS, body)
    counts = [frame["usage"]["completion_tokens"] for frame in frames]
    sizes = [len(frame["choices"][0]["token_ids"]) for frame in frames if frame["choices"]]
    assert counts == [*accumulate(sizes), TOKENS] and len(sizes) <= most_events(20)


@pytest.mark.usefixtures("patient")
async def test_stop_strings_and_interrupted_characters_end_as_without(service: Service) -> None:
    """The fake model goes on with the alphabet; the text is cut where the stop string begins."""
    for body in (
        {"prompts": ["a"], "max_tokens": 30, "temperature": 0, "stop": ["hij"]},
        {"prompts": [[200]], "max_tokens": 30, "temperature": 0},  # no characters
    ):
        alone = parts(GENERATE, await service.stream(GENERATE, body))[0]
        joined = parts(GENERATE, await service.stream(GENERATE, {**body, "stream_interval": 8}))[0]
        text, _, _, reasons = whole(joined)
        assert (text, reasons) == (whole(alone)[0], whole(alone)[3])


async def test_answers_that_are_not_streamed_take_no_notice(service: Service) -> None:
    body = {"prompts": ["a"], **SAMPLING, "stop": ["never there"], "stream_interval": 5}
    (result,) = (await service.post(GENERATE, body))["results"]
    assert len(result["token_ids"]) == TOKENS


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("end", ["drain", "failed step", "client leaves"])
async def test_what_is_held_when_all_ends(byte_folder: Path, end: str) -> None:
    """It is sent with the end, for whatever reason that comes."""
    body = {"prompts": ["a"], **SAMPLING, "max_tokens": 100_000}
    async with running(fake_runner(byte_folder, step_seconds=0.002)) as service:
        connection = Connection(GENERATE, {**body, "stream_interval": 1024, "stream": True})
        held = asyncio.create_task(
            service.app(connection.scope, connection.receive, connection.send)
        )
        await until(lambda: service.runner.steps > 20)
        assert len(connection.sent) == 2, "the head, and the first tokens"
        if end == "drain":
            await service.lifecycle.drain(timeout=0)
        elif end == "failed step":
            service.runner.failures.append(RuntimeError("a step goes wrong"))
        else:
            connection.gone.set()
        await asyncio.wait_for(held, 10)
        await until(lambda: service.client.stats.slots_used == 0)
        assert not service.lifecycle.requests
        assert not service.client._flush_timer._until
    text = b"".join([message.get("body", b"") for message in connection.sent]).decode()
    frames = [json.loads(line[6:]) for line in text.split("\n\n") if line.startswith("data: {")]
    tokens = [id for frame in frames for id in frame.get("token_ids", [])]
    if end == "client leaves":
        assert len(frames) == 1
        return
    assert len(tokens) > 15
    if end == "drain":
        assert frames[-1]["finish_reason"] == "abort"
        assert frames[-1]["usage"]["completion_tokens"] == len(tokens)
        assert text.endswith("data: [DONE]\n\n")
    else:
        assert frames[-1]["error"]["code"] == "step_failed" and "[DONE]" not in text
