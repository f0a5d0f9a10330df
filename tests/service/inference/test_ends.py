"""Several tokens that end a text, from a model's folder to the answers: each of them ends."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from engine.config import EngineConfig
from engine.models.loader import save_model
from engine.runner.model_runner import ModelRunner
from tests.models.folders import edit_config
from tests.models.variants import build
from tests.service.harness import Service, running, save_byte_tokenizer

FIRST, SECOND, OTHER = 256, 258, 259
A = ord("a")
# What is drawn first, where it is allowed.
ORDER = {str(SECOND): 100, str(FIRST): 90, str(A): 80}


def make_folder(folder: Path, **config: Any) -> Path:
    model = build({"cell": "mingru", "vocab_size": 260, "eos_token_id": FIRST, **config})
    save_model(folder, model, model.config, "float32")
    return save_byte_tokenizer(folder)


@pytest.fixture(params=["generation_config.json", "config.json"])
async def service(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Service]:
    folder = make_folder(tmp_path / "model")
    if request.param == "config.json":
        edit_config(folder, eos_token_id=[FIRST, SECOND])
    else:
        ids = {"eos_token_id": [FIRST, SECOND], "temperature": 0.6}
        (folder / request.param).write_text(json.dumps(ids))
    runner: Any = ModelRunner(
        EngineConfig(model=str(folder), device="cpu", threads=1, max_slots=4, share_slots=4)
    )
    async with running(runner) as running_service:
        yield running_service


async def write(service: Service, **fields: Any) -> Any:
    body = {"prompts": ["x"], "logit_bias": ORDER, "temperature": 0, "max_tokens": 6, **fields}
    (result,) = (await service.post("/v1/generate", body))["results"]
    return result


async def test_the_card_names_all(service: Service) -> None:
    (card,) = (await service.http.get("/v1/models")).json()["data"]
    assert (card["eos_token_id"], card["eos_token_ids"]) == (FIRST, [FIRST, SECOND])


@pytest.mark.parametrize("end", [FIRST, SECOND])
async def test_each_ends_a_text_and_is_no_part_of_it(service: Service, end: int) -> None:
    bias = {str(end): 100}
    result = await write(service, logit_bias=bias)
    assert (result["token_ids"], result["finish_reason"]) == ([], "stop")
    asked = {"prompt": "x", "logit_bias": bias, "max_tokens": 6, "return_token_ids": True}
    (choice,) = (await service.post("/v1/completions", asked))["choices"]
    assert (choice["token_ids"], choice["finish_reason"]) == ([], "stop")
    *_, last = await service.stream("/v1/completions", asked)
    assert last["choices"][0]["finish_reason"] == "stop"
    # Ids of the request's own end it beside these, also more than the device looks for.
    for stops in ([OTHER], [*range(128)]):
        result = await write(service, logit_bias=bias, stop_token_ids=stops)
        assert (result["token_ids"], result["finish_reason"]) == ([], "stop")
        own = await write(service, logit_bias={str(stops[-1]): 100}, stop_token_ids=stops)
        assert (own["token_ids"], own["finish_reason"]) == ([], "stop")


async def test_a_token_that_ends_nothing_goes_on(service: Service) -> None:
    result = await write(service, logit_bias={str(OTHER): 100})
    assert (result["token_ids"], result["finish_reason"]) == ([OTHER] * 6, "length")


@pytest.mark.parametrize("more", [{}, {"structured_outputs": {"regex": "a+"}}])
async def test_min_tokens_rules_out_each(service: Service, more: dict[str, Any]) -> None:
    result = await write(service, min_tokens=3, **more)
    assert (result["token_ids"], result["finish_reason"]) == ([A] * 3, "stop")
    whole = await write(service, min_tokens=6, ignore_eos=True, **more)
    assert (whole["token_ids"], whole["finish_reason"]) == ([A] * 6, "length")


async def test_ignore_eos_lets_each_pass(service: Service) -> None:
    for end in (FIRST, SECOND):
        result = await write(service, logit_bias={str(end): 100}, ignore_eos=True)
        assert (result["token_ids"], result["finish_reason"]) == ([end] * 6, "length")


async def test_a_text_that_matches_may_end_with_each(service: Service) -> None:
    for end in (FIRST, SECOND):
        grammar = {"structured_outputs": {"regex": "ab*"}, "logit_bias": {str(end): 100}}
        result = await write(service, **grammar)
        assert (result["text"], result["finish_reason"]) == ("a", "stop")
        ignored = await write(service, **grammar, ignore_eos=True)
        assert (ignored["text"], ignored["finish_reason"]) == ("abbbbb", "length")


async def test_who_scores_by_an_echo_sees_the_token_that_ends_it(service: Service) -> None:
    asked = {"prompt": "x", "echo": True, "logprobs": 0, "max_tokens": 1, "temperature": 0}
    for end in (FIRST, SECOND):
        body = {**asked, "logit_bias": {str(end): 100}, "return_token_ids": True}
        (choice,) = (await service.post("/v1/completions", body))["choices"]
        assert (choice["token_ids"], choice["finish_reason"]) == ([end], "stop")


async def test_where_the_service_looks_for_the_end_each_is_one(service: Service) -> None:
    """With stop strings and a state that is kept."""
    for end in (FIRST, SECOND):
        kept = {"return_state": True, "stop": "never", "logit_bias": {str(end): 100}}
        result = await write(service, **kept)
        assert (result["token_ids"], result["finish_reason"]) == ([], "stop")
        assert result["state"]["tokens"] == 1
        ignored = await write(service, **kept, ignore_eos=True)
        assert (ignored["token_ids"], ignored["finish_reason"]) == ([end] * 6, "length")


async def test_an_empty_prompt_is_the_first_of_them(service: Service) -> None:
    body = {"prompt": None, "max_tokens": 1, "return_token_ids": True}
    (choice,) = (await service.post("/v1/completions", body))["choices"]
    assert choice["prompt_token_ids"] == [FIRST]
