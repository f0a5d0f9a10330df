"""Several tokens of a request at once, as an engine that decodes in rounds sends them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.engine.fake import FakeRunner
from tests.service.harness import fake_runner, parse_events, running, save_byte_tokenizer

REQUEST: dict[str, Any] = {
    "prompts": ["abc", "fgh", "x"],
    "max_tokens": [20, 9, 1],
    "temperature": 0,
    "stream": True,
    "ignore_eos": True,
}


async def frames_of(runner: FakeRunner, request: dict[str, Any]) -> list[Any]:
    async with running(runner) as service:
        response = await service.http.post("/v1/generate", json=request)
        assert response.status_code == 200
        return parse_events(response.text)


@pytest.mark.parametrize("overlaps", [False, True])
async def test_there_is_still_one_event_per_token(tmp_path: Path, overlaps: bool) -> None:
    """The same events in the same order for each prompt, whatever came together."""
    folder = save_byte_tokenizer(tmp_path)

    def by_prompt(frames: list[Any]) -> list[list[Any]]:
        assert frames[-1] == "[DONE]"
        kept = ("text", "token_ids", "finish_reason", "index", "usage")
        events = [{name: frame.get(name) for name in kept} for frame in frames[:-1]]
        return [[one for one in events if one["index"] == index] for index in range(3)]

    expected = by_prompt(await frames_of(fake_runner(folder), REQUEST))
    assert [len(events) for events in expected] == [20, 9, 1]
    runner = fake_runner(folder, most_steps=8, overlaps=overlaps)
    assert by_prompt(await frames_of(runner, REQUEST)) == expected
    assert runner.steps < 20, "several tokens came at once"


async def test_a_stop_string_in_the_middle_of_a_round_ends_the_answer_there(tmp_path: Path) -> None:
    folder = save_byte_tokenizer(tmp_path)
    request = {**REQUEST, "stop": ["mno"], "stream": False}
    texts = []
    for steps in (1, 8):
        async with running(fake_runner(folder, most_steps=steps, overlaps=steps > 1)) as service:
            response = await service.http.post("/v1/generate", json=request)
            texts.append([one["text"] for one in response.json()["results"]])
    assert texts[0] == texts[1] and texts[0][0] == "defghijkl"
