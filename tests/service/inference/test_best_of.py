"""best_of: more samples are drawn than are answered with, and the likeliest of them stay."""

from __future__ import annotations

import math
from typing import Any

import pytest

from engine.errors import StepFailed
from engine.protocol.logprobs import TokenLogprobs
from service.inference.generation import Outcome, choose
from service.inference.output_text import OutputText, Piece
from tests.service.harness import Service, usage_of

PATH = "/v1/completions"


def _mean(choice: Any) -> float:
    logprobs = choice["logprobs"]["token_logprobs"]
    return math.fsum(logprobs) / len(logprobs)


async def test_the_likeliest_samples_stay_best_first(service: Service) -> None:
    request = {"prompt": ["ab", "xx"], "max_tokens": 6, "seed": 11, "logprobs": 0}
    request |= {"return_token_ids": True, "ignore_eos": True}
    drawn = (await service.post(PATH, {**request, "n": 7}))["choices"]
    body = await service.post(PATH, {**request, "n": 2, "best_of": 7})
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
    for first, chosen in ((0, body["choices"][:2]), (7, body["choices"][2:])):
        ranked = sorted(drawn[first : first + 7], key=_mean, reverse=True)
        assert _mean(ranked[0]) > _mean(ranked[-1])
        assert [one["token_ids"] for one in chosen] == [one["token_ids"] for one in ranked[:2]]
        assert [one["text"] for one in chosen] == [one["text"] for one in ranked[:2]]
        prompts = {tuple(one["prompt_token_ids"]) for one in chosen}
        assert prompts == {tuple(drawn[first]["prompt_token_ids"])}
    # All that was drawn is counted, each prompt once.
    assert body["usage"] == usage_of(4, 2 * 7 * 6)


async def test_no_logprobs_are_shown_that_were_not_asked_for(service: Service) -> None:
    request = {"prompt": "ab", "max_tokens": 4, "seed": 3, "best_of": 5, "echo": True}
    (plain,) = (await service.post(PATH, request))["choices"]
    (told,) = (await service.post(PATH, {**request, "logprobs": 0}))["choices"]
    assert plain["logprobs"] is None
    assert plain["text"] == told["text"]
    assert len(told["logprobs"]["tokens"]) == 6


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"n": 3, "best_of": 2}, "at least n (3)"),
        ({"best_of": 0}, "greater than or equal to 1"),
        ({"best_of": 129}, "at most 128"),
        ({"best_of": 2, "stream": True}, "allowed with stream: null or n (1)"),
    ],
)
async def test_refusals(service: Service, body: Any, words: str) -> None:
    assert words in await service.refused(PATH, {"prompt": "a", **body}, "best_of")


async def test_as_many_as_are_drawn_may_be_streamed(service: Service) -> None:
    request = {"prompt": "a", "n": 2, "best_of": 2, "max_tokens": 1, "temperature": 0}
    frames = await service.stream(PATH, request)
    assert [frame["choices"][0]["text"] for frame in frames] == ["b", "b"]


async def test_one_that_fails_is_not_chosen(service: Service) -> None:
    service.runner.spoiled = {1}
    request = {"prompt": "ab", "max_tokens": 2, "ignore_eos": True}
    body = await service.post(PATH, {**request, "n": 2, "best_of": 3})
    assert [choice["finish_reason"] for choice in body["choices"]] == ["length"] * 2
    assert all("error" not in choice for choice in body["choices"])


def _outcome(*logprobs: float, error: StepFailed | None = None) -> Outcome:
    pieces = [Piece("x", 0, 1, 1, TokenLogprobs(value)) for value in logprobs]
    outcome = Outcome(OutputText(None, [1]), wants_pieces=True)
    outcome.told, outcome.error = pieces, error
    return outcome


def test_the_order_of_merit() -> None:
    failed = _outcome(error=StepFailed("failed"))
    empty, poor = _outcome(), _outcome(-9999.0)
    long, short, equal = _outcome(-1.0, -1.0, -1.0), _outcome(-1.5), _outcome(-1.0)
    drawn = [failed, empty, poor, short, long, equal]
    assert choose(drawn, 6, 5) == [long, equal, short, poor, empty]
    assert choose(drawn, 6, 6) is drawn
    assert choose(drawn, 3, 1) == [poor, long]
