"""Bad input: a clear error in the one shape, and the service goes on."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from engine import errors
from service.http.errors import from_engine, parameter_path
from service.schemas.completions import CompletionRequest
from service.schemas.generate import GenerateRequest
from service.schemas.score import ScoreRequest
from tests.service.harness import Service, error_message, fake_runner, running

GENERATE, COMPLETIONS = "/v1/generate", "/v1/completions"


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({}, "prompts", "required"),
        ({"prompts": []}, "prompts", "at least 1"),
        ({"prompts": [""]}, "prompts[0]", "empty"),
        ({"prompts": ["a", []]}, "prompts[1]", "empty"),
        ({"prompts": "a"}, "prompts", "list"),
        ({"prompts": [1]}, "prompts[0]", "string or a list of token ids"),
        ({"prompts": [["a"]]}, "prompts[0][0]", "integer"),
        ({"prompts": [[True]]}, "prompts[0][0]", "integer"),
        ({"prompts": [[1, 257]]}, "prompts[0][1]", "0 to 256"),
        ({"prompts": [[-1]]}, "prompts[0][0]", "greater than or equal to 0"),
        ({"prompts": [[2**40]]}, "prompts[0][0]", "less than or equal to"),
        ({"prompts": ["a"], "max_token": 3}, "max_token", "max_tokens"),
        ({"prompts": ["a"], "max_tokens": 0}, "max_tokens", "greater than or equal to 1"),
        ({"prompts": ["a"], "max_tokens": "5"}, "max_tokens", "integer"),
        ({"prompts": ["a"], "max_tokens": 1.5}, "max_tokens", "integer"),
        ({"prompts": ["a"], "max_tokens": 10**9}, "max_tokens", "up to 1000000"),
        ({"prompts": ["a"], "max_tokens": [1, 2]}, "max_tokens", "2 values for 1 prompts"),
        ({"prompts": ["a", "b"], "max_tokens": [1, 0]}, "max_tokens[1]", "greater"),
        ({"prompts": ["a"], "min_tokens": 20}, "min_tokens", "max_tokens (16)"),
        ({"prompts": ["a"], "temperature": -0.1}, "temperature", "greater than or equal to 0"),
        ({"prompts": ["a"], "temperature": True}, "temperature", "number"),
        ({"prompts": ["a"], "top_p": -0.1}, "top_p", "greater than or equal to 0"),
        ({"prompts": ["a"], "top_p": 1.1}, "top_p", "less than or equal to 1"),
        ({"prompts": ["a"], "min_p": 2}, "min_p", "less than or equal to 1"),
        ({"prompts": ["a"], "top_k": -2}, "top_k", "greater than or equal to -1"),
        ({"prompts": ["a"], "repetition_penalty": 0}, "repetition_penalty", "greater than 0"),
        ({"prompts": ["a"], "presence_penalty": 3}, "presence_penalty", "less than or equal to 2"),
        ({"prompts": ["a"], "logit_bias": {"257": 1}}, "logit_bias", "0 to 256"),
        ({"prompts": ["a"], "logit_bias": {"x": 1}}, "logit_bias.x", "integer"),
        ({"prompts": ["a"], "logit_bias": {"1": 101}}, "logit_bias.1", "100"),
        ({"prompts": ["a"], "seed": 2**63}, "seed", "less than"),
        ({"prompts": ["a"], "stop": ""}, "stop", "at least 1"),
        ({"prompts": ["a"], "stop": ["x", ""]}, "stop[1]", "at least 1"),
        ({"prompts": ["a"], "stop": 5}, "stop", "string"),
        ({"prompts": ["a"], "stop": ["x"] * 17}, "stop", "at most 16"),
        ({"prompts": ["a"], "stop": "x" * 1025}, "stop", "at most 1024"),
        ({"prompts": ["a"], "stop_token_ids": [300]}, "stop_token_ids", "0 to 256"),
        ({"prompts": ["a"], "stop_token_ids": [1] * 129}, "stop_token_ids", "at most 128"),
        (
            {"prompts": ["a"], "logit_bias": {str(i): 1 for i in range(1025)}},
            "logit_bias",
            "at most 1024",
        ),
        ({"prompts": ["a"], "logprobs": 21}, "logprobs", "up to 20"),
        ({"prompts": ["a"], "timeout": 0}, "timeout", "greater than 0"),
        ({"prompts": ["a"], "timeout": 10**6}, "timeout", "up to 3600"),
        ({"prompts": ["a"], "stream": 1}, "stream", "boolean"),
        ({"prompts": ["a"] * 1025}, "prompts", "at most 1024"),
        ([1], None, "JSON object"),
    ],
)
async def test_generate(service: Service, body: Any, param: str | None, words: str) -> None:
    assert words in await service.refused(GENERATE, body, param)


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"prompt": []}, "prompt", "empty"),
        ({"prompt": ["a", []]}, "prompt[1]", "empty"),
        ({"prompt": [[1], [300]]}, "prompt[1][0]", "0 to 256"),
        ({"prompt": {"a": 1}}, "prompt", "must be a string"),
        ({"prompt": [1, "a"]}, "prompt[1]", "integer"),
        ({"prompt": ["a", 1]}, "prompt[1]", "must be a string"),
        ({"prompt": "a", "n": 0}, "n", "greater than or equal to 1"),
        ({"prompt": "a", "n": 129}, "n", "at most 128"),
        ({"prompt": "a", "nonsense": 1}, "nonsense", "allowed: model, temperature"),
        (
            {"prompt": "a", "stream": True, "stream_options": {"usage": True}},
            "stream_options.usage",
            "include_usage",
        ),
    ],
)
async def test_completions(service: Service, body: Any, param: str, words: str) -> None:
    assert words in await service.refused(COMPLETIONS, body, param)


N = 20_000


@pytest.mark.parametrize(
    ("model", "body"),
    [
        (GenerateRequest, {"prompts": [["a"] * N]}),
        (GenerateRequest, {"prompts": [1] * N}),
        (GenerateRequest, {"prompts": ["a"], "max_tokens": ["a"] * N}),
        (GenerateRequest, {"prompts": ["a"], "stop": [""] * N}),
        (GenerateRequest, {"prompts": ["a"], "stop": [[""] * N] * 2}),
        (GenerateRequest, {"prompts": ["a"], "stop_token_ids": ["x"] * N}),
        (GenerateRequest, {"prompts": ["a"], "logit_bias": {str(i): "x" for i in range(N)}}),
        (GenerateRequest, {"prompts": ["a"], "logit_bias": {f"x{i}": 1 for i in range(N)}}),
        (GenerateRequest, {"prompts": ["a"], "logit_bias": [{"x": 1}] * N}),
        (CompletionRequest, {"prompt": [1, *["a"] * N]}),
        (CompletionRequest, {"prompt": ["a", *[1] * N]}),
        (CompletionRequest, {"prompt": "a", "stop_token_ids": ["x"] * N}),
        (CompletionRequest, {"prompt": "a", "logit_bias": {str(i): 101 for i in range(N)}}),
        (ScoreRequest, {"texts": [1] * N}),
        (ScoreRequest, {"items": [1] * N}),
        (ScoreRequest, {"items": [{"context": "a", "continuations": [1] * N}]}),
    ],
)
def test_a_million_wrong_entries_are_one_error(model: type[BaseModel], body: Any) -> None:
    with pytest.raises(ValidationError) as caught:
        model.model_validate(body)
    assert caught.value.error_count() == 1


@pytest.mark.parametrize(
    "raw",
    [
        b'{"prompts": ["a"], "temperature": NaN}',
        b'{"prompts": ["a"], "temperature": Infinity}',
        b'{"prompts": ["a"], "temperature": -Infinity}',
        b'{"prompts": ["a"], "temperature": 1e999}',
        b'{"prompts": ["a"]',
        b'{"prompts": ["\xff\xfe"]}',
        b'{"prompts": ["\\ud800"]}',
        b"[" * 100_000,
        b"not json",
        b"",
    ],
)
async def test_a_body_that_is_no_json(service: Service, raw: bytes) -> None:
    for content_type in ("application/json", "application/x-www-form-urlencoded"):
        response = await service.http.post(
            GENERATE, content=raw, headers={"content-type": content_type}
        )
        assert response.status_code == 400, response.text
        error_message(response.json(), response.json()["error"]["param"])


async def test_a_body_sent_as_something_else(service: Service) -> None:
    raw = b'{"prompts": ["a"]}'
    form = {"content-type": "application/x-www-form-urlencoded"}  # what curl -d sends
    response = await service.http.post(GENERATE, content=raw, headers=form)
    assert response.status_code == 400
    assert "content-type: application/json" in error_message(response.json(), None)
    response = await service.http.post(GENERATE, content=raw)  # no type at all is taken as JSON
    assert response.status_code == 200


async def test_integers_of_any_size(service: Service) -> None:
    raw = b'{"prompts": ["a"], "max_tokens": 1' + b"0" * 5000 + b"}"
    response = await service.http.post(GENERATE, content=raw)
    assert response.status_code == 400
    raw = b'{"prompts": ["a"], "temperature": 1' + b"0" * 400 + b"}"
    response = await service.http.post(GENERATE, content=raw)
    assert response.status_code == 400


async def test_unknown_model(service: Service) -> None:
    for path, body in (
        (GENERATE, {"prompts": ["a"]}),
        (COMPLETIONS, {"prompt": "a"}),
        ("/v1/score", {"texts": ["ab"]}),
    ):
        message = await service.refused(path, {**body, "model": "gpt-4"}, "model", status=404)
        assert "'fake'" in message
    response = await service.http.get("/v1/models/gpt-4")
    assert response.status_code == 404


async def test_an_alias_is_the_models_name(byte_folder: Path) -> None:
    async with running(fake_runner(byte_folder), model_name="bard") as service:
        body = await service.post(GENERATE, {"prompts": ["a"], "model": "bard"})
        assert body["model"] == "bard"
        models = (await service.http.get("/v1/models")).json()["data"]
        assert [model["id"] for model in models] == ["bard"]


async def test_unknown_paths_and_methods(service: Service) -> None:
    response = await service.http.get("/v1/nonsense")
    assert response.status_code == 404
    assert "/v1/nonsense" in error_message(response.json(), None)
    response = await service.http.get(GENERATE)
    assert response.status_code == 405
    assert response.headers["allow"] == "POST"
    assert "POST" in error_message(response.json(), None)
    for path, allowed in (("/v1/states", "GET, POST"), ("/v1/states/one", "DELETE, GET")):
        response = await service.http.put(path)
        assert response.status_code == 405 and response.headers["allow"] == allowed
        assert f"allowed: {allowed}" in error_message(response.json(), None)


async def test_an_unexpected_error_is_no_traceback(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(*_: object) -> None:
        raise RuntimeError("secret detail")

    monkeypatch.setattr("service.routes.generate.gather", fail)
    ids = {"x-request-id": "mine"}
    response = await service.http.post(GENERATE, json={"prompts": ["a"]}, headers=ids)
    assert response.status_code == 500
    assert response.headers["x-request-id"] == "mine"
    assert "secret" not in response.text
    error_message(response.json(), None)


async def test_an_error_gives_little_of_the_request_back(service: Service) -> None:
    long = "x" * 1_000_000
    for body in ({"prompts": ["a"], long: 1}, {"prompts": ["a"], "model": long}):
        response = await service.http.post(GENERATE, json=body)
        assert response.status_code in (400, 404)
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}
        assert len(response.content) < 4000


async def test_after_every_error_it_still_serves(service: Service) -> None:
    for body in ({}, {"prompts": [[999]]}, {"prompts": ["a"], "top_p": 2}):
        assert (await service.http.post(GENERATE, json=body)).status_code == 400
    body = await service.post(GENERATE, {"prompts": ["a"], "max_tokens": 1, "temperature": 0})
    assert body["results"][0]["text"] == "b"


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (errors.InvalidRequest("m", param="p"), 400, "invalid_request_error"),
        (errors.QueueFull("m", retry_after=2.1), 429, "rate_limit_error"),
        (errors.ShareFull("m", retry_after=2.1), 429, "rate_limit_error"),
        (errors.TimedOut("m"), 504, "timeout_error"),
        (errors.Draining("m"), 503, "service_unavailable_error"),
        (errors.EngineLoading("m"), 503, "service_unavailable_error"),
        (errors.EngineDead("m"), 503, "service_unavailable_error"),
        (errors.StepFailed("m"), 500, "server_error"),
        (errors.EngineError("m"), 500, "server_error"),
    ],
)
def test_the_table(error: errors.EngineError, status: int, kind: str) -> None:
    api = from_engine(error)
    assert api.status_code == status
    assert api.body["error"] == {
        "message": "m",
        "type": kind,
        "param": error.param,
        "code": error.code,
    }
    assert (dict(api.headers or {}).get("Retry-After") is not None) == (status in (429, 503))
    if status == 429:
        assert dict(api.headers or {})["Retry-After"] == "3"


def test_every_engine_error_has_a_place() -> None:
    for kind in errors.BY_CODE.values():
        assert from_engine(kind("m")).status_code >= 400


def test_parameter_paths() -> None:
    assert parameter_path(("body", "prompts", 3, "<ids>", 7)) == "prompts[3][7]"
    assert parameter_path(("body", "stream_options", "x")) == "stream_options.x"
    assert parameter_path(("body",)) == ""


# Size


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (GENERATE, {"prompts": ["a" * 60, [97] * 41]}, "prompts"),
        (COMPLETIONS, {"prompt": ["a" * 10, "b"], "n": 10}, "prompt"),
        ("/v1/score", {"texts": ["a" * 50, "b" * 51]}, "texts"),
        ("/v1/score", {"items": [{"context": "a" * 49, "continuations": ["b", "cd"]}]}, "items"),
    ],
)
async def test_the_prompts_of_a_request_are_bounded_together(
    byte_folder: Path, path: str, body: Any, param: str
) -> None:
    """Copies count: each sample and each continuation has the whole prompt."""
    async with running(fake_runner(byte_folder), max_prompt_tokens=100) as service:
        assert "more than 100 prompt tokens" in await service.refused(path, body, param)
    async with running(fake_runner(byte_folder), max_prompt_tokens=110) as service:
        await service.post(path, body)


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (GENERATE, {"prompts": ["a"] * 2, "max_tokens": 26, "logprobs": 1}, "prompts"),
        (GENERATE, {"prompts": ["a"] * 2, "max_tokens": [50, 51], "logprobs": 0}, "prompts"),
        (COMPLETIONS, {"prompt": "a", "n": 2, "max_tokens": 26, "logprobs": 1}, "prompt"),
        (COMPLETIONS, {"prompt": "a" * 34, "max_tokens": 0, "echo": True, "logprobs": 2}, "prompt"),
        ("/v1/score", {"texts": ["a" * 50, "b" * 51]}, "texts"),
        ("/v1/score", {"items": [{"context": "a", "continuations": ["b" * 101]}]}, "items"),
    ],
)
async def test_the_log_probabilities_of_an_answer_are_bounded(
    byte_folder: Path, path: str, body: Any, param: str
) -> None:
    async with running(fake_runner(byte_folder), max_reports=100) as service:
        assert "at most 100 are allowed" in await service.refused(path, body, param)
        if path != "/v1/score" and not body.get("echo"):  # a stream is not kept
            await service.stream(path, body)
        await service.post(GENERATE, {"prompts": ["a"] * 8, "max_tokens": 100})  # asks for none
    async with running(fake_runner(byte_folder), max_reports=104) as service:
        await service.post(path, body)


class Upload:
    """A request whose body comes in chunks of a megabyte; what is sent, and how much of the body
    had been read then."""

    def __init__(self, chunks: int, **headers: str) -> None:
        self.scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": "POST",
            "path": GENERATE,
            "raw_path": GENERATE.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": [(b"content-type", b"application/json")]
            + [
                (name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()
            ],
        }
        self.left = chunks
        self.read = 0  # chunks
        self.sent: list[tuple[Any, int]] = []

    async def receive(self) -> Any:
        if not self.left:
            return {"type": "http.disconnect"}
        self.left -= 1
        self.read += 1
        return {"type": "http.request", "body": b"x" * 2**20, "more_body": self.left > 0}

    async def send(self, message: Any) -> None:
        self.sent.append((message, self.read))

    async def refused(self, service: Service) -> list[int]:
        """Runs the request; how much had been read when the answer began, was told, and ended."""
        await service.app(self.scope, self.receive, self.send)
        (start, _), (told, _), (end, _) = self.sent
        assert start["status"] == 413
        assert (b"connection", b"close") in [(name.lower(), at) for name, at in start["headers"]]
        assert "16777216" in error_message(json.loads(told["body"]), None)
        assert told["more_body"] and not end["more_body"] and not end["body"]
        return [read for _, read in self.sent]


async def test_a_large_body_is_refused_before_it_is_read(service: Service) -> None:
    """And then read to its end, so that the answer is not lost with the connection."""
    assert await Upload(40, content_length=str(40 * 2**20)).refused(service) == [0, 0, 40]


async def test_a_body_of_unknown_length_is_cut_at_the_limit(service: Service) -> None:
    assert await Upload(40).refused(service) == [17, 17, 40]


async def test_not_all_of_an_endless_body_is_read(service: Service) -> None:
    began, _, ended = await Upload(10**6).refused(service)
    assert (began, ended) == (17, 17 + 64)


async def test_a_body_that_stops_coming_is_not_waited_for(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Stopping(Upload):
        async def receive(self) -> Any:
            if self.read == 20:
                await asyncio.Event().wait()
            return await super().receive()

    monkeypatch.setattr("service.http.scope.DISCARD_SECONDS", 0.05)
    assert await Stopping(100).refused(service) == [17, 17, 20]


async def test_the_limit_is_inclusive(byte_folder: Path) -> None:
    raw = json.dumps({"prompts": ["a"], "max_tokens": 1}).encode()
    async with running(fake_runner(byte_folder), max_body_bytes=len(raw)) as service:
        assert (await service.http.post(GENERATE, content=raw)).status_code == 200
        assert (await service.http.post(GENERATE, content=raw + b" ")).status_code == 413


class TestStatesInBodies:
    """A state that a client holds makes a body larger, however large the model's states are."""

    @staticmethod
    async def snapshot_of(service: Service) -> str:
        body = {"prompts": ["abc"], "max_tokens": 1, "return_state": "snapshot"}
        result = (await service.post(GENERATE, body))["results"][0]
        return str(result["state"]["snapshot"])

    async def test_they_may_be_larger_than_the_limit(self, byte_folder: Path) -> None:
        async with running(fake_runner(byte_folder), max_body_bytes=100) as service:
            snapshot = await self.snapshot_of(service)
            body = {"prompts": ["d"], "max_tokens": 1, "state": {"snapshot": snapshot}}
            assert len(json.dumps(body)) > 4 * 100
            for path in (GENERATE, "/v1/score", "/v1/completions", "/v1/states"):
                raw = json.dumps(body).encode()
                assert (await service.http.post(path, content=raw)).status_code != 413
            assert (await service.post(GENERATE, body))["results"]

    async def test_other_bodies_may_not(self, byte_folder: Path) -> None:
        async with running(fake_runner(byte_folder), max_body_bytes=100) as service:
            more = service.lifecycle.most_inline_bytes()
            assert more >= 4 / 3 * service.runner.info.state_bytes
            for raw in (b"a" * 101, b'{"prompts": ["%b"]}' % (b"a" * 101)):
                response = await service.http.post(GENERATE, content=raw)
                assert response.status_code == 413
                message = response.json()["error"]["message"]
                assert f"up to 100 bytes, and {more} more for a state" in message
            for extra, status in ((0, 400), (1, 413)):
                raw = b'{"snapshot"' + b"a" * (100 + more - 11 + extra)
                assert (await service.http.post(GENERATE, content=raw)).status_code == status
