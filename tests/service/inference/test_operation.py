"""/docs examples, /metrics, request ids, settings, what is imported."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from pydantic import ValidationError

from service.schemas.models import ModelList
from service.settings import Settings, unknown_variables
from service.text.tokenizer import Tokenizer
from tests.service.harness import Service, fake_runner, parse_events, running

ROOT = Path(__file__).resolve().parents[3]


async def scrape(service: Service) -> dict[str, Any]:
    response = await service.http.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=")
    families = list(text_string_to_metric_families(response.text))
    return {family.name: family for family in families if not family.name.endswith("_created")}


def value(families: dict[str, Any], sample: str, **labels: str) -> float:
    family = next(
        family for family in families.values() if any(s.name == sample for s in family.samples)
    )
    found = [
        s.value for s in family.samples if s.name == sample and labels.items() <= s.labels.items()
    ]
    assert len(found) == 1, (sample, labels, found)
    return float(found[0])


async def test_metrics(service: Service) -> None:
    request = {"prompts": ["abc"], "max_tokens": 4, "temperature": 0}
    await service.post("/v1/generate", request)
    await service.stream("/v1/generate", {**request, "prompts": ["mno"]})  # not known yet
    await service.post("/v1/completions", {"prompt": "wx", "temperature": 0})
    await service.post("/v1/score", {"texts": ["abcd"]})
    await service.http.post("/v1/generate", json={})
    await service.http.get("/v1/models/no/such/model")
    await service.http.get("/no/such/path")
    await service.http.request("BREW", "/no/such/path")
    families = await scrape(service)
    assert value(families, "minserve_prompt_tokens_total") == 3 + 3 + 2 + 4
    assert value(families, "minserve_generation_tokens_total") == 4 + 4 + 2
    assert value(families, "minserve_request_success_total", finish_reason="length") == 3
    assert value(families, "minserve_request_success_total", finish_reason="stop") == 1
    assert value(families, "minserve_time_to_first_token_seconds_count") == 3
    assert value(families, "minserve_inter_token_latency_seconds_count") >= 2
    assert value(families, "minserve_e2e_request_latency_seconds_count") == 3
    assert value(families, "minserve_score_latency_seconds_count") == 1
    assert value(families, "minserve_request_prompt_tokens_sum") == 3 + 3 + 2 + 4
    assert value(families, "minserve_request_queue_time_seconds_count") == 4
    assert value(families, "minserve_request_prefill_time_seconds_count") == 4
    assert value(families, "minserve_request_decode_time_seconds_count") == 3
    assert value(families, "minserve_request_generation_tokens_count") == 3
    assert value(families, "minserve_step_batch_size_count") >= 4 + 4 + 2 + 1
    assert value(families, "minserve_engine_step_seconds_count", phase="prefill") == 4
    # A prompt's step draws the first token; "wx" ends with a third one that is no text.
    assert value(families, "minserve_engine_step_seconds_count", phase="decode") == 3 + 3 + 2
    assert value(families, "minserve_state_slots_total") == 8
    assert value(families, "minserve_state_usage_ratio") == 0
    assert value(families, "minserve_requests_running") == 0
    assert value(families, "minserve_engine_restarts_total") == 0
    assert value(families, "minserve_state_bytes", tier="device") >= 0
    assert value(families, "minserve_model_info", name="fake", cell="mingru") == 1
    outcomes = {"endpoint": "generate", "outcome": "ok"}
    assert value(families, "minserve_requests_total", **outcomes) == 2
    outcomes["outcome"] = "invalid"
    assert value(families, "minserve_requests_total", **outcomes) == 1
    http = "minserve_http_requests_total"
    assert value(families, http, method="POST", path="/v1/generate", status="200") == 2
    assert value(families, http, method="POST", path="/v1/generate", status="400") == 1
    path = "/v1/models/{model:path}"
    assert value(families, http, method="GET", path=path, status="404") == 1
    assert value(families, http, method="GET", path="other", status="404") == 1
    assert value(families, http, method="other", path="other", status="404") == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_the_time_to_the_first_token_begins_with_the_request(
    service: Service, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not when its prompt has been tokenised."""
    encode_async = Tokenizer.encode_async

    async def slowly(self: Tokenizer, text: str, **how: bool) -> Any:
        await asyncio.sleep(0.2)
        return await encode_async(self, text, **how)

    monkeypatch.setattr(Tokenizer, "encode_async", slowly)
    request = {"prompts": ["abc"], "max_tokens": 4, "temperature": 0}
    await (service.stream if stream else service.post)("/v1/generate", request)
    families = await scrape(service)
    assert value(families, "minserve_time_to_first_token_seconds_count") == 1
    assert value(families, "minserve_time_to_first_token_seconds_sum") >= 0.2


async def test_what_a_request_did_not_come_to_is_no_observation(byte_folder: Path) -> None:
    """Neither a prompt that a timeout cut short, nor one whose answer is empty, has a zero."""
    async with running(fake_runner(byte_folder, max_step_tokens=16)) as service:
        service.runner.step_seconds = 0.02
        long = {"prompts": ["a" * 10_000], "timeout": 0.1}
        for stream in (False, True):
            response = await service.http.post("/v1/generate", json={**long, "stream": stream})
            assert '"finish_reason":"timeout"' in response.text
        await service.post("/v1/generate", {"prompts": ["z"], "temperature": 0})  # ends at once
        families = await scrape(service)
        for name, count in (
            ("time_to_first_token_seconds", 0),
            ("inter_token_latency_seconds", 0),
            ("request_queue_time_seconds", 3),
            ("request_prefill_time_seconds", 1),
            ("request_decode_time_seconds", 0),
            ("request_generation_tokens", 3),
        ):
            assert value(families, f"minserve_{name}_count") == count, name


async def test_every_decode_step_of_a_round_counts(byte_folder: Path) -> None:
    runner = fake_runner(byte_folder, most_steps=8, overlaps=True)
    runner.decode_seconds = 1e-3
    async with running(runner) as service:
        request = {"prompts": ["a"], "max_tokens": 41, "ignore_eos": True, "temperature": 0}
        await service.post("/v1/generate", request)
        assert runner.steps < 40
        families = await scrape(service)
        count = value(families, "minserve_engine_step_seconds_count", phase="decode")
        seconds = value(families, "minserve_engine_step_seconds_sum", phase="decode")
        assert 40 <= count < 40 + 16  # the last rounds may go on after the last token
        assert seconds == pytest.approx(count * 1e-3)


async def test_applications_share_no_metrics(byte_folder: Path) -> None:
    async with running(fake_runner(byte_folder)) as one, running(fake_runner(byte_folder)) as two:
        await one.post("/v1/generate", {"prompts": ["a"]})
        assert value(await scrape(two), "minserve_generation_tokens_total") == 0


async def test_histograms_begin_at_a_tenth_of_a_millisecond(service: Service) -> None:
    text = (await service.http.get("/metrics")).text
    assert 'minserve_time_to_first_token_seconds_bucket{le="0.0001"}' in text


async def test_the_examples_of_the_docs_run_as_they_stand(service: Service) -> None:
    schema = (await service.http.get("/openapi.json")).json()
    ran = 0
    for path, operations in schema["paths"].items():
        content = operations.get("post", {}).get("requestBody", {}).get("content", {})
        for name, example in content.get("application/json", {}).get("examples", {}).items():
            response = await service.http.post(path, json=example["value"])
            assert response.status_code == 200, (path, name, response.text)
            if example["value"].get("stream"):
                assert parse_events(response.text)[-1] == "[DONE]"
            else:
                fields = schema["components"]["schemas"][_answer(schema, path)]["properties"]
                assert set(response.json()) == set(fields)
            ran += 1
    assert ran >= 8
    assert (await service.http.get("/docs")).status_code == 200


async def test_the_docs_tell_of_errors_everywhere(service: Service) -> None:
    schema = (await service.http.get("/openapi.json")).json()
    reference = {"schema": {"$ref": "#/components/schemas/ErrorBody"}}
    for path, operations in schema["paths"].items():
        for method, operation in operations.items():
            responses = operation["responses"]
            told = [responses.get(status, {}) for status in ("503", "5XX")]
            assert {"application/json": reference} in [one.get("content") for one in told], path
            bad = responses.get("4XX", {}).get("content")
            assert method == "get" or bad == {"application/json": reference}, path
            assert "422" not in responses


def _answer(schema: Any, path: str) -> str:
    content = schema["paths"][path]["post"]["responses"]["200"]["content"]
    reference: str = content["application/json"]["schema"]["$ref"]
    return reference.rsplit("/", 1)[-1]


async def test_answers_are_what_the_docs_say(service: Service) -> None:
    from service.schemas.completions import CompletionResponse
    from service.schemas.generate import GenerateResponse
    from service.schemas.score import ScoreResponse

    service.runner.spoiled = {1}  # one prompt fails
    for model, path, body in (
        (GenerateResponse, "/v1/generate", {"prompts": ["a"] * 3, "logprobs": 1}),
        (
            CompletionResponse,
            "/v1/completions",
            {"prompt": "ab", "logprobs": 1, "echo": True, "return_token_ids": True},
        ),
        (ScoreResponse, "/v1/score", {"texts": ["ab", "a"]}),
        (ScoreResponse, "/v1/score", {"items": [{"context": "a", "continuations": ["b"]}]}),
    ):
        model.model_validate(await service.post(path, body), extra="forbid")


async def test_request_ids(service: Service) -> None:
    response = await service.http.get("/health", headers={"x-request-id": "abc-1"})
    assert response.headers["x-request-id"] == "abc-1"
    made = [(await service.http.get("/health")).headers["x-request-id"] for _ in range(2)]
    assert made[0] != made[1]
    response = await service.http.get("/health", headers={"x-request-id": "x" * 1000})
    assert len(response.headers["x-request-id"]) == 32
    response = await service.http.post(
        "/v1/generate", json={"prompts": ["a"]}, headers={"x-request-id": "mine"}
    )
    assert response.json()["id"] == "gen-mine"
    response = await service.http.post("/v1/generate", json={})
    assert "x-request-id" in response.headers


async def test_models(service: Service) -> None:
    body = (await service.http.get("/v1/models")).json()
    assert body["object"] == "list"
    (model,) = body["data"]
    assert (model["id"], model["object"], model["owned_by"]) == ("fake", "model", "minserve")
    assert model["created"] > 1_600_000_000
    assert model["root"] == "fake"
    assert model["deterministic"] is False
    assert (await service.http.get("/v1/models/fake")).json() == model
    ModelList.model_validate(body, extra="forbid")


def test_settings_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINSERVE_PORT", "1234")
    monkeypatch.setenv("MINSERVE_MAX_SLOTS", "7")
    assert Settings().port == 1234
    assert Settings(port=99).port == 99
    assert Settings().engine_config().max_slots == 7
    monkeypatch.setenv("MINSERVE_PORT", "70000")
    with pytest.raises(ValidationError, match="65535"):
        Settings()


def test_torch_is_not_imported() -> None:
    code = (
        "import sys, service.app.app, service.server.server; "
        "print(sorted({'torch', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True
    )
    assert done.stdout.strip() == "[]"


def test_a_slip_in_the_name_of_a_variable_is_told() -> None:
    """The keys of a server must not depend on it."""
    given = {
        "MINSERVE_PORT": "1",
        "minserve_model": "m",
        "MINSERVE_API_KEY": "name:key",
        "MINSERVE_MAX_STOPS": "2",
        "MINSERVE_SERVICE_HOST": "10.0.0.1",
        "MINSERVE_CPU_ISA": "avx2",
        "PATH": "/bin",
    }
    assert unknown_variables(given) == {
        "MINSERVE_API_KEY": "MINSERVE_API_KEYS",
        "MINSERVE_MAX_STOPS": "MINSERVE_MAX_STOP",
        "MINSERVE_SERVICE_HOST": None,
    }


@pytest.mark.parametrize("origin", ["https://a.example/", "https://A.example", "a.example", "null"])
def test_an_origin_is_told_how_it_has_to_be(origin: str) -> None:
    with pytest.raises(ValidationError, match="without a path and without a slash"):
        Settings(cors_origin=(origin,))


def test_a_time_that_no_request_may_have_is_no_default() -> None:
    assert Settings(request_timeout=7200, max_request_timeout=7200).request_timeout == 7200
    assert Settings(max_request_timeout=10).max_request_timeout == 10
    for given in ({"request_timeout": 7200.0}, {"request_timeout": 20, "max_request_timeout": 10}):
        with pytest.raises(ValidationError, match="at least --request-timeout"):
            Settings(**given)
