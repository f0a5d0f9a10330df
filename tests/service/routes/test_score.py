"""POST /v1/score, against the fake model's table of probabilities."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path

import pytest

from tests.reports import log32
from tests.service.harness import (
    Service,
    fake_runner,
    running,
    save_byte_tokenizer,
    until,
    usage_of,
)

PATH = "/v1/score"
HALF, QUARTER, REST = log32(0.5), log32(0.25), log32(0.25 / 255)


async def test_texts(service: Service) -> None:
    body = await service.post(PATH, {"texts": ["abd", [120, 121]]})
    first, second = body["results"]
    assert first == {
        "index": 0,
        "token_ids": [97, 98, 100],
        "token_logprobs": [None, HALF, QUARTER],
        "total_logprob": pytest.approx(HALF + QUARTER),
        "num_scored_tokens": 2,
        "perplexity": pytest.approx(math.sqrt(8)),
        "bits_per_byte": pytest.approx(1.5),
    }
    assert second["token_logprobs"] == [None, HALF]
    assert body["usage"] == usage_of(5, 0)


async def test_a_text_longer_than_a_step(service: Service) -> None:
    text = "abcdefghijklmnopqrstuvwxy" * 100
    (result,) = (await service.post(PATH, {"texts": [text]}))["results"]
    expected = 24 * 100 * HALF + 99 * REST
    assert result["num_scored_tokens"] == len(text) - 1
    assert result["total_logprob"] == pytest.approx(expected)
    assert result["bits_per_byte"] == pytest.approx(-expected / math.log(2) / (len(text) - 1))


async def test_one_token_has_nothing_to_score(service: Service) -> None:
    body = await service.post(PATH, {"texts": ["a", "ab"]})
    assert body["results"][0] == {
        "index": 0,
        "token_ids": [97],
        "token_logprobs": [None],
        "total_logprob": 0,
        "num_scored_tokens": 0,
        "perplexity": None,
        "bits_per_byte": None,
    }
    assert body["results"][1]["num_scored_tokens"] == 1


async def test_continuations_share_their_context(service: Service) -> None:
    context = "xyabc"
    items = [
        {"context": context, "continuations": ["de", "e", [122, 122, 122]]},
        {"context": [97], "continuations": ["b"]},
    ]
    body = await service.post(PATH, {"items": items})
    first, second = body["results"]
    assert first["index"] == 0
    assert first["continuations"] == [
        {
            "logprob": pytest.approx(2 * HALF),
            "num_tokens": 2,
            "token_logprobs": [HALF, HALF],
            "is_greedy": True,
        },
        {
            "logprob": QUARTER,
            "num_tokens": 1,
            "token_logprobs": [QUARTER],
            "is_greedy": False,
        },
        {
            "logprob": pytest.approx(3 * REST),
            "num_tokens": 3,
            "token_logprobs": pytest.approx([REST] * 3),
            "is_greedy": False,
        },
    ]
    assert second["continuations"][0]["logprob"] == HALF
    metrics = (await service.http.get("/metrics")).text
    hits = metrics.split("\nminserve_prefix_cache_hits_tokens_total ")[1].split("\n")[0]
    assert float(hits) == 2 * (len(context) - 1)  # read once, forked twice


async def test_an_empty_context_is_the_end_of_a_text(service: Service) -> None:
    items = [{"context": "", "continuations": [[0], [1]]}]
    ((result,), _) = (await service.post(PATH, {"items": items}))["results"], None
    # The fake model goes on from end-of-text (256) with 0.
    assert [scored["logprob"] for scored in result["continuations"]] == [HALF, QUARTER]


async def test_an_empty_context_without_an_end_of_text(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    folder = save_byte_tokenizer(tmp_path_factory.mktemp("model"))
    async with running(fake_runner(folder, eos=None)) as service:
        items = [{"context": "", "continuations": ["a"]}]
        await service.refused(PATH, {"items": items}, "items[0].context")


async def test_without_a_tokenizer(textless: Service) -> None:
    (result,) = (await textless.post(PATH, {"texts": [[97, 98]]}))["results"]
    assert result["token_logprobs"] == [None, HALF]
    assert result["bits_per_byte"] is None
    await textless.refused(PATH, {"texts": ["ab"]}, "texts[0]")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, None),
        ({"texts": ["a"], "items": [{"context": "a", "continuations": ["b"]}]}, None),
        ({"texts": []}, "texts"),
        ({"texts": [""]}, "texts[0]"),
        ({"texts": [[]]}, "texts[0]"),
        ({"texts": [[257]]}, "texts[0][0]"),
        ({"items": [{"context": "a", "continuations": []}]}, "items[0].continuations"),
        ({"items": [{"context": "a", "continuations": ["b", ""]}]}, "items[0].continuations[1]"),
        ({"items": [{"context": "a"}]}, "items[0].continuations"),
        ({"items": [{"context": 1, "continuations": ["b"]}]}, "items[0].context"),
        ({"texts": ["ab"], "stream": True}, "stream"),
    ],
)
async def test_bad_input(service: Service, body: object, param: str | None) -> None:
    await service.refused(PATH, body, param)


async def test_a_timeout_is_an_error_not_a_shorter_score(byte_folder: Path) -> None:
    runner = fake_runner(byte_folder, step_seconds=0.05)
    async with running(runner, request_timeout=0.6) as service:
        body = await service.post(PATH, {"texts": ["a" * 16384, "ab"]})
        error = body["results"][0]["error"]
        assert (error["type"], error["code"]) == ("timeout_error", "timeout")
        assert "of 16383 tokens were scored" in error["message"]
        assert body["results"][1]["num_scored_tokens"] == 1
        # Where no text was scored, it is the answer's error.
        for request in (
            {"texts": ["a" * 16384]},
            {"items": [{"context": "a", "continuations": ["b" * 16384, "c" * 16384]}]},
        ):
            body = await service.post(PATH, request, status=504)
            assert body["error"]["code"] == "timeout"


async def test_the_drains_end_is_named_too(byte_folder: Path) -> None:
    runner = fake_runner(byte_folder, step_seconds=0.02)
    async with running(runner) as service:
        held = asyncio.create_task(service.http.post(PATH, json={"texts": ["a" * 40_000]}))
        await until(lambda: service.client.stats.running == 1)
        await service.lifecycle.drain(timeout=0.05)
        response = await held
        assert response.status_code == 503
        assert response.json()["error"]["code"] == "draining"
