"""POST /v1/completions: OpenAI's shapes, and its own client."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from engine.protocol.requests import Request
from service.inference.logprobs import LogprobArrays
from tests.reports import log32
from tests.service.harness import Service, fake_runner, running, usage_of

PATH = "/v1/completions"
HALF, QUARTER = log32(0.5), log32(0.25)


async def test_plain(service: Service) -> None:
    body = await service.post(PATH, {"prompt": "abc", "max_tokens": 3, "temperature": 0})
    assert set(body) == {"id", "object", "created", "model", "choices", "usage"}
    assert body["id"].startswith("cmpl-")
    assert body["object"] == "text_completion"
    assert body["model"] == "fake"
    assert body["choices"] == [
        {"index": 0, "text": "def", "logprobs": None, "finish_reason": "length"}
    ]
    assert body["usage"] == usage_of(3, 3)


async def test_sixteen_tokens_unless_told(service: Service) -> None:
    body = await service.post(PATH, {"prompt": "a", "temperature": 0, "max_tokens": None})
    assert body["usage"]["completion_tokens"] == 16


@pytest.mark.parametrize(
    ("prompt", "texts"),
    [
        ("ab", ["c"]),
        (["ab", "x"], ["c", "y"]),
        ([97, 98], ["c"]),
        ([[97, 98], [120]], ["c", "y"]),
    ],
)
async def test_the_four_kinds_of_prompt(service: Service, prompt: Any, texts: list[str]) -> None:
    body = await service.post(PATH, {"prompt": prompt, "max_tokens": 1, "temperature": 0})
    assert [choice["text"] for choice in body["choices"]] == texts
    assert [choice["index"] for choice in body["choices"]] == list(range(len(texts)))


async def test_samples_of_one_prompt_share_its_reading(service: Service) -> None:
    request = {"prompt": ["a" * 100, "b"], "n": 3, "max_tokens": 8, "seed": 5, "best_of": 3}
    body = await service.post(PATH, request)
    texts = [choice["text"] for choice in body["choices"]]
    assert len(texts) == 6
    assert len(set(texts[:3])) > 1  # each sample has draws of its own
    assert body["usage"]["prompt_tokens"] == 101
    assert await service.post(PATH, request) | {"id": 0, "created": 0} == body | {
        "id": 0,
        "created": 0,
    }
    metrics = (await service.http.get("/metrics")).text
    hits = metrics.split("\nminserve_prefix_cache_hits_tokens_total ")[1].split("\n")[0]
    assert float(hits) >= 99


async def test_samples_of_one_prompt_share_its_bytes(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = []
    add = service.engine.add

    def note(client: Any, request: Request) -> None:
        prompts.append(request.prompt)
        add(client, request)

    monkeypatch.setattr(service.engine, "add", note)
    await service.post(PATH, {"prompt": "a" * 100, "n": 3, "max_tokens": 1})
    assert len(prompts) == 3
    assert prompts[0] is prompts[1] is prompts[2]


async def test_echo_with_logprobs_is_openais_arrays(service: Service) -> None:
    body = await service.post(
        PATH,
        {"prompt": "abd", "max_tokens": 1, "temperature": 0, "echo": True, "logprobs": 1},
    )
    (choice,) = body["choices"]
    assert choice["text"] == "abde"
    assert choice["logprobs"] == {
        "tokens": ["a", "b", "d", "e"],
        "token_logprobs": [None, HALF, QUARTER, HALF],
        "top_logprobs": [None, {"b": HALF}, {"c": HALF, "d": QUARTER}, {"e": HALF}],
        "text_offset": [0, 1, 2, 3],
    }


async def test_echo_without_generation_scores(service: Service) -> None:
    request = {"prompt": ["abd", "x"], "max_tokens": 0, "echo": True, "logprobs": 0}
    body = await service.post(PATH, request)
    first, second = body["choices"]
    assert (first["text"], first["finish_reason"]) == ("abd", "length")
    assert first["logprobs"]["token_logprobs"] == [None, HALF, QUARTER]
    assert (second["text"], second["logprobs"]["token_logprobs"]) == ("x", [None])
    assert body["usage"]["completion_tokens"] == 0
    frames = await service.stream(PATH, {**request, "prompt": "abd"})
    assert [frame["choices"][0]["text"] for frame in frames] == ["abd", ""]
    assert frames[0]["choices"][0]["logprobs"] == first["logprobs"]
    assert frames[1]["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("stream", [False, True])
async def test_large_answers_are_rendered_beside_the_event_loop(
    service: Service, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = set()
    add_prompt = LogprobArrays.add_prompt

    def noted(self: LogprobArrays, *given: Any, **how: Any) -> None:
        threads.add(threading.current_thread())
        add_prompt(self, *given, **how)

    monkeypatch.setattr(LogprobArrays, "add_prompt", noted)
    request = {"max_tokens": 1, "temperature": 0, "echo": True, "logprobs": 0}
    long, short = {**request, "prompt": "ab" * 2000}, {**request, "prompt": "ab" * 20}
    for body, beside in ((short, False), (long, True)):
        threads.clear()
        if stream:
            frames = await service.stream(PATH, body)
            text = "".join(frame["choices"][0]["text"] for frame in frames)
            logprobs = frames[0]["choices"][0]["logprobs"]["token_logprobs"]
        else:
            (choice,) = (await service.post(PATH, body))["choices"]
            text, logprobs = choice["text"], choice["logprobs"]["token_logprobs"][:-1]
        assert text == body["prompt"] + "c"
        assert logprobs[:2] == [None, HALF] and len(logprobs) == len(body["prompt"])
        assert threads
        assert (threading.main_thread() not in threads) == beside


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("forced", "text", "tokens"),
    [
        # The answer's first byte ends the character that the prompt began, or it does not.
        (0xA9, "aé", {"a": 0, "bytes:\\xc3": 1, "bytes:\\xa9": 1}),
        (ord("x"), "a\ufffdx", {"a": 0, "bytes:\\xc3": 1, "x": 2}),
        (None, "a\ufffd", {"a": 0, "bytes:\\xc3": 1}),
    ],
)
async def test_echo_of_a_prompt_that_ends_inside_a_character(
    service: Service, stream: bool, forced: int | None, text: str, tokens: dict[str, int]
) -> None:
    request: dict[str, Any] = {"prompt": [97, 0xC3], "echo": True, "logprobs": 0, "max_tokens": 0}
    if forced is not None:
        request |= {"max_tokens": 1, "logit_bias": {str(forced): 100}, "temperature": 0}
    if stream:
        choices = [frame["choices"][0] for frame in await service.stream(PATH, request)]
    else:
        choices = (await service.post(PATH, request))["choices"]
    assert "".join(choice["text"] for choice in choices) == text
    arrays = [choice["logprobs"] for choice in choices]
    assert [token for array in arrays for token in array["tokens"]] == list(tokens)
    offsets = [offset for array in arrays for offset in array["text_offset"]]
    assert offsets == list(tokens.values())


async def test_echo_counts_characters_not_bytes(service: Service) -> None:
    body = await service.post(PATH, {"prompt": "é", "max_tokens": 0, "echo": True, "logprobs": 0})
    (choice,) = body["choices"]
    assert choice["text"] == "é"
    assert choice["logprobs"]["tokens"] == ["bytes:\\xc3", "bytes:\\xa9"]
    assert choice["logprobs"]["text_offset"] == [0, 0]


async def test_stream_and_usage_chunk(service: Service) -> None:
    frames = await service.stream(
        PATH,
        {
            "prompt": "ab",
            "max_tokens": 3,
            "temperature": 0,
            "logprobs": 0,
            "stream_options": {"include_usage": True},
        },
    )
    *chunks, last = frames
    assert [chunk["choices"][0]["text"] for chunk in chunks] == ["c", "d", "e"]
    assert [chunk["usage"] for chunk in chunks] == [None] * 3
    assert [chunk["choices"][0]["logprobs"]["text_offset"] for chunk in chunks] == [[0], [1], [2]]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None, None, "length"]
    assert last["choices"] == []
    assert last["usage"] == usage_of(2, 3)
    assert {frame["id"] for frame in frames} == {last["id"]}


async def test_usage_on_every_chunk(service: Service) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    request = {"prompt": "ab", "max_tokens": 2, "temperature": 0, "stream_options": options}
    frames = await service.stream(PATH, request)
    assert [frame["usage"]["total_tokens"] for frame in frames] == [3, 4, 4]


async def test_token_ids_where_asked_for(service: Service) -> None:
    request = {"prompt": "ab", "max_tokens": 2, "temperature": 0, "return_token_ids": True}
    (choice,) = (await service.post(PATH, request))["choices"]
    assert (choice["prompt_token_ids"], choice["token_ids"]) == ([97, 98], [99, 100])
    frames = await service.stream(PATH, request)
    choices = [frame["choices"][0] for frame in frames]
    assert [choice["token_ids"] for choice in choices] == [[99], [100]]
    assert ["prompt_token_ids" in choice for choice in choices] == [True, False]
    echoed = await service.stream(PATH, {**request, "echo": True})
    choices = [frame["choices"][0] for frame in echoed]
    assert [choice["text"] for choice in choices] == ["ab", "c", "d"]
    assert ["prompt_token_ids" in choice for choice in choices] == [True, False, False]


NEUTRAL = {
    "best_of": 1,
    "suffix": "",
    "frequency_penalty": 0,
    "presence_penalty": 0,
    "logit_bias": None,
    "user": "somebody",
    "stop": None,
    "logprobs": None,
    "stream_options": None,
    "n": 1,
    "top_p": 1,
    "echo": False,
    "seed": None,
    "stream": False,
    "no_stop_trim": False,
    "skip_special_tokens": True,
    "return_hidden_states": False,
}


async def test_every_openai_field_is_accepted(service: Service) -> None:
    request = {"model": "fake", "prompt": "a", "max_tokens": 1, "temperature": 0, **NEUTRAL}
    assert (await service.post(PATH, request))["choices"][0]["text"] == "b"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("suffix", "x"),
        ("stream_options", {}),
        ("best_of", 1),
        ("no_stop_trim", True),
        ("skip_special_tokens", False),
        ("return_hidden_states", True),
    ],
)
async def test_what_is_not_supported_says_so(service: Service, field: str, value: Any) -> None:
    message = await service.refused(PATH, {"prompt": "a", "n": 2, field: value}, field)
    assert "allowed" in message


async def test_no_prompt_stands_for_the_end_of_text(service: Service) -> None:
    request = {"max_tokens": 1, "temperature": 0, "return_token_ids": True}
    (choice,) = (await service.post(PATH, {**request, "prompt": None}))["choices"]
    assert (choice["prompt_token_ids"], choice["token_ids"]) == ([256], [0])
    await service.refused(PATH, request, "prompt")


async def test_no_prompt_and_no_end_of_text(tmp_path: Path) -> None:
    async with running(fake_runner(tmp_path, eos=None)) as service:
        assert "no end-of-text" in await service.refused(PATH, {"prompt": None}, "prompt")


@pytest.fixture
def client(service: Service) -> openai.AsyncOpenAI:
    http = httpx.AsyncClient(transport=httpx.ASGITransport(service.app))
    return openai.AsyncOpenAI(base_url="http://test/v1", api_key="none", http_client=http)


async def test_the_openai_client(service: Service, client: openai.AsyncOpenAI) -> None:
    answer = await client.completions.create(
        model="fake", prompt="ab", max_tokens=3, temperature=0, logprobs=1, echo=True
    )
    assert answer.choices[0].text == "abcde"
    assert answer.choices[0].logprobs is not None
    assert answer.choices[0].logprobs.token_logprobs == [None, HALF, HALF, HALF, HALF]
    assert answer.usage is not None and answer.usage.total_tokens == 5
    assert [model.id async for model in client.models.list()] == ["fake"]
    assert (await client.models.retrieve("fake")).id == "fake"


async def test_the_openai_client_streams(client: openai.AsyncOpenAI) -> None:
    stream = await client.completions.create(
        model="fake",
        prompt="ab",
        max_tokens=3,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"top_k": 5, "min_p": 0.0, "repetition_penalty": 1.0, "ignore_eos": True},
    )
    chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == "cde"
    assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens == 3


async def test_the_openai_client_understands_errors(client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        await client.completions.create(model="fake", prompt="a", temperature=-1)
    assert bad.value.param == "temperature"
    with pytest.raises(openai.NotFoundError) as unknown:
        await client.completions.create(model="gpt-4", prompt="a")
    assert unknown.value.code == "model_not_found"
