"""What lm-eval's `local-completions` sends, and what it makes of the answer."""

from __future__ import annotations

from typing import Any

import pytest

from tests.reports import log32
from tests.service.harness import Service

PATH = "/v1/completions"
HALF, QUARTER = log32(0.5), log32(0.25)
EOS = 256


async def loglikelihoods(
    service: Service, pairs: list[tuple[list[int], list[int]]], **fields: Any
) -> list[tuple[float, bool]]:
    """Of continuations after contexts, (sum of log-probabilities, is greedy): one token is drawn
    after the echo, whose entry is cut off; a token is greedy where its log-probability is the very
    float of the best alternative."""
    request = {
        "model": "fake",
        "prompt": [context + continuation for context, continuation in pairs],
        "temperature": 0,
        "max_tokens": 1,
        "logprobs": 1,
        "seed": 1234,
        "echo": True,
        **fields,
    }
    body = await service.post(PATH, request)
    found = []
    choices = sorted(body["choices"], key=lambda choice: choice["index"])
    for choice, (context, continuation) in zip(choices, pairs, strict=True):
        own = choice["logprobs"]["token_logprobs"][len(context) : -1]
        tops = choice["logprobs"]["top_logprobs"][len(context) : -1]
        assert len(own) == len(tops) == len(continuation)
        greedy = all(one == max(top.values()) for one, top in zip(own, tops, strict=True))
        found.append((sum(own), greedy))
    return found


async def test_continuations(service: Service) -> None:
    pairs = [([97, 98], [99, 101]), ([97, 98], [98]), ([120], [121, 122])]
    found = await loglikelihoods(service, pairs)
    assert found[0] == (HALF + QUARTER, False)
    assert found[1] == (pytest.approx(log32(0.25 / 255)), False)
    # After z the model ends the text, and still the last token of the continuation is scored.
    assert found[2] == (HALF + HALF, True)


async def test_a_drawn_end_of_text_stands_in_the_arrays(service: Service) -> None:
    request = {"prompt": "xyz", "temperature": 0, "max_tokens": 1, "echo": True, "logprobs": 1}
    request["return_token_ids"] = True
    body = await service.post(PATH, request)
    (choice,) = body["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("xyz", "stop")
    assert choice["token_ids"] == [EOS]
    assert choice["logprobs"]["token_logprobs"] == [None, HALF, HALF, HALF]
    assert choice["logprobs"]["text_offset"] == [0, 1, 2, 3]
    assert body["usage"]["completion_tokens"] == 1
    choices = [frame["choices"][0] for frame in await service.stream(PATH, request)]
    assert "".join(one["text"] for one in choices) == "xyz"
    assert choices[-1]["finish_reason"] == "stop"
    logprobs = [value for one in choices for value in one["logprobs"]["token_logprobs"]]
    assert logprobs == [None, HALF, HALF, HALF]


async def test_so_does_a_stop_token(service: Service) -> None:
    pairs = [([97], [98])]
    assert await loglikelihoods(service, pairs, stop_token_ids=[99]) == [(HALF, True)]


@pytest.mark.parametrize(
    "fields", [{"max_tokens": 2}, {"logprobs": None}, {"echo": False}, {"ignore_eos": True}]
)
async def test_elsewhere_it_does_not(service: Service, fields: dict[str, Any]) -> None:
    request = {"prompt": "z", "temperature": 0, "max_tokens": 1, "echo": True, "logprobs": 1}
    body = await service.post(PATH, {**request, "return_token_ids": True, **fields})
    (choice,) = body["choices"]
    ignored = fields == {"ignore_eos": True}  # then it is a token like any other
    assert choice["token_ids"] == ([EOS] if ignored else [])
    assert choice["finish_reason"] == ("length" if ignored else "stop")


async def test_scoring_without_a_drawn_token(service: Service) -> None:
    """The same by max_tokens 0, without the cut."""
    request = {"prompt": [97, 98, 99, 101], "max_tokens": 0, "echo": True, "logprobs": 1}
    (choice,) = (await service.post(PATH, request))["choices"]
    assert choice["logprobs"]["token_logprobs"] == [None, HALF, HALF, QUARTER]


async def test_generation_until(service: Service) -> None:
    request = {
        "model": "fake", "prompt": [[97, 98], [100]], "max_tokens": 256, "temperature": 0,
        "stop": ["\n\n", "gh"], "seed": 1234,
    }  # fmt: skip
    choices = (await service.post(PATH, request))["choices"]
    texts: list[Any] = [None] * 2
    for choice in choices:
        texts[choice["index"]] = choice["text"]
    assert texts == ["cdef", "ef"]
