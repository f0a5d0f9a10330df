"""Structured output over HTTP: every endpoint and way to ask, and what is refused."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from service.inference.inputs import grammar_check as grammars
from tests.engine.texts import ENDLESS_SCHEMA, save_characters
from tests.service.chat import chat_runner
from tests.service.harness import Service, fake_runner, parse_events, running, until
from tests.service.inference.test_lifecycle import Connection
from tests.service.inference.test_operation import scrape, value

POINT = {
    "type": "object",
    "properties": {"x": {"type": "integer", "maximum": 99, "minimum": 0}},
    "required": ["x"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "point", "schema": POINT, "strict": True}}
POINT_TEXT = r'\{\s*"x"\s*:\s*[0-9]{1,2}\s*\}'
ASKED: list[tuple[dict[str, Any], str]] = [
    ({"response_format": FORMAT}, POINT_TEXT),
    ({"response_format": {"type": "json_object"}}, r"\{(?s:.*)\}"),
    ({"structured_outputs": {"json": POINT}}, POINT_TEXT),
    ({"structured_outputs": {"json": json.dumps(POINT)}}, POINT_TEXT),
    ({"structured_outputs": {"json_object": True}}, r"\{(?s:.*)\}"),
    ({"structured_outputs": {"regex": "[0-9]{3}", "json": None}}, "[0-9]{3}"),
    ({"structured_outputs": {"choice": ["yes", "größe"]}}, "yes|größe"),
    ({"structured_outputs": {"grammar": 'start: "a" /[xy]+/ "b"'}}, "a[xy]+b"),
    ({"structured_outputs": {"json": {"const": "<|endoftext|>"}}}, r'"<\|endoftext\|>"'),
]
FORMER: list[tuple[dict[str, Any], str]] = [
    ({"guided_json": POINT}, POINT_TEXT),
    ({"guided_regex": "[0-9]{3}"}, "[0-9]{3}"),
    ({"guided_choice": ["yes", "größe"]}, "yes|größe"),
    ({"guided_grammar": 'root ::= "a" [xy]+ "b"'}, "a[xy]+b"),
]
NEUTRAL = [{"response_format": {"type": "text"}}, {"response_format": None, "guided_json": None}]


@pytest.fixture
async def chat(tmp_path: Path) -> AsyncIterator[Service]:
    async with running(chat_runner(tmp_path)) as service:
        yield service


@pytest.mark.parametrize(("fields", "pattern"), ASKED + FORMER)
async def test_completions(fields: dict[str, Any], pattern: str, service: Service) -> None:
    body = {"prompt": "abc", "max_tokens": 300, "seed": 1, **fields}
    for more in ({}, {"n": 3}, {"best_of": 3}, {"logprobs": 1}):
        for choice in (await service.post("/v1/completions", {**body, **more}))["choices"]:
            assert choice["finish_reason"] == "stop"
            assert re.fullmatch(pattern, choice["text"]), choice
    frames = await service.stream("/v1/completions", body)
    assert re.fullmatch(pattern, "".join(frame["choices"][0]["text"] for frame in frames))
    assert frames[-1]["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize(("fields", "pattern"), ASKED + FORMER)
async def test_chat(fields: dict[str, Any], pattern: str, chat: Service) -> None:
    body = {
        "messages": [{"role": "user", "content": "hello"}],
        "max_tokens": 300,
        "seed": 1,
        "n": 2,
    }
    for choice in (await chat.post("/v1/chat/completions", {**body, **fields}))["choices"]:
        assert choice["finish_reason"] == "stop"
        assert re.fullmatch(pattern, choice["message"]["content"]), choice


@pytest.mark.parametrize(("fields", "pattern"), ASKED)
async def test_generate(fields: dict[str, Any], pattern: str, service: Service) -> None:
    body = {"prompts": ["abc", "xyz"], "max_tokens": 300, "seed": 1}
    for result in (await service.post("/v1/generate", {**body, **fields}))["results"]:
        assert result["finish_reason"] == "stop" and re.fullmatch(pattern, result["text"])
    [(field, wanted)] = fields.items()
    mixed = (await service.post("/v1/generate", {**body, field: [None, wanted]}))["results"]
    free = (await service.post("/v1/generate", body))["results"]
    assert mixed[0] == free[0] and re.fullmatch(pattern, mixed[1]["text"])
    events = (await service.http.post("/v1/generate", json={**body, **fields, "stream": True})).text
    frames = [json.loads(frame[6:]) for frame in events.strip().split("\n\n")[:-1]]
    for index in range(2):
        text = "".join(frame["text"] for frame in frames if frame["index"] == index)
        assert re.fullmatch(pattern, text)


@pytest.mark.parametrize("fields", NEUTRAL)
async def test_neutral_values_change_nothing(fields: dict[str, Any], service: Service) -> None:
    body = {"prompt": "abc", "temperature": 0}
    answered = await service.post("/v1/completions", {**body, **fields})
    assert answered["choices"] == (await service.post("/v1/completions", body))["choices"]


async def test_a_turn_ends_by_its_own_token(chat: Service) -> None:
    """That is not the model's end of text."""
    body = {
        "messages": [{"role": "user", "content": "hello"}], "max_tokens": 50, "temperature": 0,
        "structured_outputs": {"regex": "[a-z]{2,30}"},
        "logit_bias": {str(chat.lifecycle.runtime.chat.end_id): 50},
    }  # fmt: skip
    [choice] = (await chat.post("/v1/chat/completions", body))["choices"]
    assert choice["finish_reason"] == "stop" and len(choice["message"]["content"]) == 2


async def test_only_a_cut_leaves_a_text_unfinished(service: Service) -> None:
    body = {"prompt": "abc", "structured_outputs": {"regex": "[a-m]{9}n{9}"}, "max_tokens": 18}
    [whole] = (await service.post("/v1/completions", body))["choices"]
    assert whole["finish_reason"] == "stop" and re.fullmatch("[a-m]{9}n{9}", whole["text"])
    [cut] = (await service.post("/v1/completions", {**body, "max_tokens": 17}))["choices"]
    assert cut["finish_reason"] == "length" and re.fullmatch("[a-m]{9}n{8}", cut["text"])
    [stopped] = (await service.post("/v1/completions", {**body, "stop": "nn"}))["choices"]
    assert stopped["finish_reason"] == "stop" and re.fullmatch("[a-m]{9}", stopped["text"])


# What is refused.

REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"response_format": "json"}, "response_format", "type text, json_object or json_schema"),
    ({"response_format": {"type": "xml"}}, "response_format", "type text, json_object or"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "required"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
        "response_format.json_schema.schema",
        "required",
    ),
    (
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "x", "schema": {"type": "x"}},
            }
        },
        "response_format.json_schema.schema",
        "Invalid type",
    ),
    ({"structured_outputs": {}}, "structured_outputs", "one of json, regex"),
    ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex", "unclosed"),
    ({"structured_outputs": {"regex": ""}}, "structured_outputs.regex", "empty"),
    ({"structured_outputs": {"regexp": "a"}}, "structured_outputs.regexp", "Extra"),
    ({"structured_outputs": {"json": 1}}, "structured_outputs.json", "JSON schema"),
    ({"structured_outputs": {"choice": []}}, "structured_outputs.choice", "at least 1"),
    ({"structured_outputs": {"choice": [""]}}, "structured_outputs.choice", "empty"),
    ({"structured_outputs": {"grammar": "start: b"}}, "structured_outputs.grammar", "b"),
    ({"structured_outputs": {"regex": "a" * 70_000}}, "structured_outputs.regex", "65536"),
    (
        {
            "structured_outputs": {
                "json": {
                    "type": "object",
                    "properties": {f"property_{i}": {"type": "integer"} for i in range(600)},
                }
            }
        },
        "structured_outputs.json",
        "max is 2000",
    ),
    (
        {"structured_outputs": {"regex": "a", "choice": ["a"]}},
        "structured_outputs.choice",
        "together with structured_outputs.regex",
    ),
]


@pytest.mark.parametrize(("fields", "param", "reason"), REFUSED)
async def test_refusals_name_the_field(
    fields: dict[str, Any], param: str, reason: str, service: Service
) -> None:
    for stream in (False, True):
        body = {"prompts": ["abc"], "stream": stream, **fields}
        message = await service.refused("/v1/generate", body, param)
        assert reason in message
    assert service.runner.steps == 0


async def test_refusals_of_lists_and_former_names(service: Service) -> None:
    fields = [{"regex": "a"}, {"regex": "("}]
    body = {"prompts": ["a", "b"], "structured_outputs": fields}
    await service.refused("/v1/generate", body, "structured_outputs[1].regex")
    await service.refused(
        "/v1/generate", {**body, "structured_outputs": fields[:1]}, "structured_outputs"
    )
    both = {"prompt": "a", "guided_regex": "a", "response_format": {"type": "json_object"}}
    message = await service.refused("/v1/completions", both, "guided_regex")
    assert "response_format" in message
    await service.refused("/v1/completions", {"prompt": "a", "guided_json": "{"}, "guided_json")


async def test_a_model_without_texts(textless: Service) -> None:
    body = {"prompts": [[1]], "structured_outputs": {"regex": "a"}}
    message = await textless.refused("/v1/generate", body, "structured_outputs.regex")
    assert "tokenizer.json" in message


async def test_a_dead_end_is_told(tmp_path: Path) -> None:
    """The vocabulary lacks X, but the model may begin what ends with it."""
    size = save_characters(tmp_path, "abcd")
    runner = fake_runner(tmp_path, vocab_size=size, eos=None)
    async with running(runner) as service:
        body = {
            "prompts": [[2], [2]],
            "structured_outputs": [{"regex": "a[bc]X|ad{5}"}, {"regex": "ad{5}"}],
            "logit_bias": {"1": 100},
        }
        failed, right = (await service.post("/v1/generate", body))["results"]
        assert failed["error"]["type"] == "invalid_request_error"
        assert "cannot be met" in failed["error"]["message"] and right["text"] == "addddd"
        assert failed["error"]["param"] == "structured_outputs[0].regex"
        only = {**body, "prompts": [[2]], "structured_outputs": {"regex": "a[bc]X|ad{5}"}}
        field = "structured_outputs.regex"
        assert "cannot be met" in await service.refused("/v1/generate", only, field)
        response = await service.http.post("/v1/generate", json={**only, "stream": True})
        assert "cannot be met" in response.text and "[DONE]" not in response.text
        assert parse_events(response.text)[-1]["error"]["param"] == field
        hopeless = {**only, "structured_outputs": {"regex": "a[bc]X"}}
        await service.refused("/v1/generate", hopeless, "structured_outputs.regex")


async def test_limits_are_settings(byte_folder: Path) -> None:
    async with running(fake_runner(byte_folder), max_grammars=2, max_grammar_bytes=12) as service:
        several = [{"regex": "a" * (i + 1)} for i in range(3)]
        body = {"prompts": ["a"] * 3, "structured_outputs": several}
        message = await service.refused("/v1/generate", body, "structured_outputs[0].regex")
        assert "3 different grammars" in message
        body["structured_outputs"] = [several[0], several[1], several[0]]
        assert len((await service.post("/v1/generate", body))["results"]) == 3
        long = {"prompts": ["a"], "structured_outputs": {"regex": "größe-größe"}}
        message = await service.refused("/v1/generate", long, "structured_outputs.regex")
        assert "15 bytes" in message and "12" in message


async def test_grammars_of_all_samples_count(byte_folder: Path) -> None:
    async with running(fake_runner(byte_folder), max_body_bytes=1000) as service:
        body = {"prompt": ["a", "b"], "guided_regex": "[a-z]{4}" * 20, "max_tokens": 1}
        assert len((await service.post("/v1/completions", {**body, "n": 3}))["choices"]) == 6
        message = await service.refused("/v1/completions", {**body, "n": 4}, "guided_regex")
        assert "1280 characters" in message and "1000" in message


async def test_what_takes_too_long_is_refused_and_costs_others_nothing(
    byte_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammars, "MEMORY", 2**33)  # so that time runs out before it
    async with running(fake_runner(byte_folder), grammar_timeout=0.4) as service:
        body = {"prompts": ["a"], "structured_outputs": {"json": ENDLESS_SCHEMA}}
        for _ in range(2):
            message = await service.refused("/v1/generate", body, "structured_outputs.json")
            assert "0.4 s" in message
        families = await scrape(service)
        assert value(families, "minserve_grammar_compile_seconds_count") == 1  # remembered
        right = {"prompts": ["a"], "structured_outputs": {"choice": ["b"]}}
        assert (await service.post("/v1/generate", right))["results"][0]["text"] == "b"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_waits_for_no_grammar(byte_folder: Path, stream: bool) -> None:
    """Its places are free at once, and what nobody waits for any more is not compiled."""
    async with running(fake_runner(byte_folder), grammar_timeout=3.0) as service:
        bodies = [
            {"prompts": ["a"], "structured_outputs": wanted, "stream": stream}
            for wanted in ({"json": ENDLESS_SCHEMA}, {"choice": ["b"]})
        ]
        connections = [Connection("/v1/generate", body) for body in bodies]
        tasks = [
            asyncio.create_task(service.app(one.scope, one.receive, one.send))
            for one in connections
        ]
        check = service.app.state.grammars
        await until(lambda: len(check._asked) == 2)
        for one in connections:
            one.gone.set()
        await asyncio.gather(*tasks)
        assert [one.sent for one in connections] == [[], []]
        assert not service.lifecycle.requests
        assert len(check._asked) == 2, "neither has had its turn to the end"
        await until(lambda: not check._asked)
        families = await scrape(service)
        assert value(families, "minserve_grammar_compile_seconds_count") == 1
        left = {"endpoint": "generate", "outcome": "cancelled"}
        assert value(families, "minserve_requests_total", **left) == 2
        assert (await service.post("/v1/generate", {**bodies[1], "stream": False}))["results"]


LATE = {"structured_outputs": {"regex": "late[a-z]"}, "timeout": 0.3}


@pytest.fixture
async def busy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Service]:
    """Another grammar is being compiled all the while."""
    monkeypatch.setattr(grammars, "MEMORY", 2**33)
    async with running(chat_runner(tmp_path), grammar_timeout=60.0) as service:
        body = {"prompts": ["a"], "structured_outputs": {"json": ENDLESS_SCHEMA}}
        other = Connection("/v1/generate", body)
        task = asyncio.create_task(service.app(other.scope, other.receive, other.send))
        check = service.app.state.grammars
        await until(lambda: check._asked)
        yield service
        assert check._asked, "the other one is still being compiled"
        other.gone.set()
        await task


@pytest.mark.parametrize("more", [{}, {"n": 3}, {"best_of": 2}, {"logprobs": 1, "min_tokens": 4}])
async def test_a_grammar_is_waited_for_no_longer_than_the_timeout(
    more: dict[str, Any], busy: Service
) -> None:
    body = {"prompt": "abc", **LATE, **more}
    for choice in (await busy.post("/v1/completions", body))["choices"]:
        assert (choice["finish_reason"], choice["text"]) == ("timeout", "")


async def test_a_late_grammar_costs_its_prompts_only(busy: Service) -> None:
    body = {
        "prompts": ["abc", "abc", "abc"],
        "structured_outputs": [LATE["structured_outputs"], None, LATE["structured_outputs"]],
        "timeout": [0.1, 30, 0.3],
        "max_tokens": 4,
        "ignore_eos": True,
    }
    late, free, also = (await busy.post("/v1/generate", body))["results"]
    assert [one["finish_reason"] for one in (late, free, also)] == ["timeout", "length", "timeout"]
    assert (late["text"], also["text"], late["token_ids"]) == ("", "", [])
    events = await busy.http.post("/v1/generate", json={"prompts": ["abc"], **LATE, "stream": True})
    [event, done] = parse_events(events.text)
    assert event["finish_reason"] == "timeout" and event["text"] == "" and done == "[DONE]"
    messages = [{"role": "user", "content": "hello"}]
    [choice] = (await busy.post("/v1/chat/completions", {"messages": messages, **LATE}))["choices"]
    assert choice["finish_reason"] == "timeout" and not choice["message"]["content"]


async def test_compile_times_are_counted_once(service: Service) -> None:
    body = {"prompts": ["a"], "structured_outputs": {"choice": ["b"]}}
    for _ in range(3):
        await service.post("/v1/generate", body)
    families = await scrape(service)
    assert value(families, "minserve_grammar_compile_seconds_count") == 1
