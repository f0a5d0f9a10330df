"""The `openai` package, unmodified, over a real socket: blocking, asynchronous, streaming, and each
error as the exception that its users catch."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import openai
import pydantic
import pytest

from tests.engine.fake import FakeRunner
from tests.reports import log32
from tests.service.chat import chat_runner, prompt_ids
from tests.service.harness import fake_runner, save_byte_tokenizer
from tests.service.live import listening

HALF = log32(0.5)
HELLO: Any = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with listening(chat_runner(tmp_path_factory.mktemp("chat"))) as (url, _):
        yield url


def connect(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=30)


@pytest.fixture
def client(url: str) -> Iterator[openai.OpenAI]:
    with connect(url) as client:
        yield client


def test_completions(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model="fake", prompt=["ab", "x"], max_tokens=2, temperature=0, n=2, best_of=3, logprobs=1,
        echo=True, presence_penalty=0.5, frequency_penalty=0.5, logit_bias={"1": 1},
        seed=7, stop=["~"], suffix=None, user="somebody", top_p=1.0,
    )  # fmt: skip
    assert [choice.text for choice in answer.choices] == ["abcd", "abcd", "xyz", "xyz"]
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens == ["a", "b", "c", "d"]
    assert logprobs.token_logprobs == [None, HALF, HALF, HALF]
    assert logprobs.text_offset == [0, 1, 2, 3]
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (3, 12)


@pytest.mark.parametrize("prompt", ["ab", ["ab"], [97, 98], [[97, 98]]])
def test_the_kinds_of_prompt(client: openai.OpenAI, prompt: Any) -> None:
    answer = client.completions.create(model="fake", prompt=prompt, max_tokens=1, temperature=0)
    assert answer.choices[0].text == "c"


def test_streamed_completions(client: openai.OpenAI) -> None:
    stream = client.completions.create(
        model="fake", prompt="ab", max_tokens=3, temperature=0, stream=True,
        stream_options={"include_usage": True, "include_obfuscation": False},
    )  # fmt: skip
    *chunks, last = stream
    assert [chunk.choices[0].text for chunk in chunks] == ["c", "d", "e"]
    assert last.choices == [] and last.usage is not None and last.usage.completion_tokens == 3


def test_a_raw_response_has_the_request_id(client: openai.OpenAI) -> None:
    raw = client.completions.with_raw_response.create(
        model="fake", prompt="a", max_tokens=1, extra_headers={"x-request-id": "mine"}
    )
    assert raw.headers["x-request-id"] == "mine"
    answer = raw.parse()
    assert (answer.id, answer._request_id) == ("cmpl-mine", "mine")


def test_models(client: openai.OpenAI) -> None:
    (model,) = client.models.list().data
    assert (model.id, model.object) == ("fake", "model")
    assert client.models.retrieve("fake") == model


def test_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="fake", messages=HELLO, max_completion_tokens=3, temperature=0, logprobs=True,
        top_logprobs=1,
    )  # fmt: skip
    (choice,) = answer.choices
    assert (choice.message.content, choice.finish_reason) == ("bcd", "length")
    assert choice.logprobs is not None and choice.logprobs.content is not None
    assert [token.logprob for token in choice.logprobs.content] == [HALF] * 3
    assert choice.logprobs.content[0].top_logprobs[0].bytes == [ord("b")]
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(prompt_ids(("user", "hello")))
    # The answer goes back as it came.
    messages: Any = [*HELLO, choice.message, {"role": "user", "content": "more"}]
    again = client.chat.completions.create(model="fake", messages=messages, max_tokens=1)
    assert again.usage is not None
    assert again.usage.prompt_tokens == len(
        prompt_ids(("user", "hello"), ("assistant", "bcd"), ("user", "more"))
    )


def test_streamed_chat(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(
        model="fake", messages=HELLO, stop="e", temperature=0, logprobs=True,
        stream_options={"include_usage": True},
    ) as stream:  # fmt: skip
        deltas = [event.delta for event in stream if event.type == "content.delta"]
        final = stream.get_final_completion()
    assert "".join(deltas) == "bcd"
    assert (final.choices[0].message.role, final.choices[0].message.content) == ("assistant", "bcd")
    assert final.choices[0].finish_reason == "stop"
    assert final.usage is not None and final.usage.completion_tokens == 4


def test_asynchronous(url: str) -> None:
    async def ask() -> None:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as client:
            answers = await asyncio.gather(
                *(
                    client.completions.create(
                        model="fake", prompt=letter, max_tokens=1, temperature=0
                    )
                    for letter in "abcdef"
                )
            )
            assert "".join(answer.choices[0].text for answer in answers) == "bcdefg"
            stream = await client.completions.create(
                model="fake", prompt="a", max_tokens=3, temperature=0, stream=True
            )
            assert "".join([chunk.choices[0].text async for chunk in stream]) == "bcd"
            chat = await client.chat.completions.create(
                model="fake", messages=HELLO, max_tokens=3, temperature=0, stream=True
            )
            assert "".join([chunk.choices[0].delta.content or "" async for chunk in chat]) == "bcd"
            assert [model.id async for model in client.models.list()] == ["fake"]

    asyncio.run(ask())


def test_bad_requests(client: openai.OpenAI) -> None:
    bad: list[tuple[dict[str, Any], str]] = [
        ({"temperature": -1}, "temperature"),
        ({"suffix": "x"}, "suffix"),
        ({"extra_body": {"nonsense": 1}}, "nonsense"),
        ({"n": 2, "best_of": 1}, "best_of"),
        ({"prompt": [[1], [300]]}, "prompt[1][0]"),
    ]
    for fields, param in bad:
        with pytest.raises(openai.BadRequestError) as refused:
            client.completions.create(**{"model": "fake", "prompt": "a", **fields})
        assert refused.value.status_code == 400
        assert (refused.value.param, refused.value.type) == (param, "invalid_request_error")
        assert refused.value.request_id
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(
            model="fake",
            messages=HELLO,
            response_format={
                "type": "json_schema",
                "json_schema": {"name": "wrong", "schema": {"type": "objekt"}},
            },
        )
    assert refused.value.param == "response_format.json_schema.schema"


class Verdict(pydantic.BaseModel):
    """What an answer is to be."""

    right: bool
    kind: Literal["short", "long"]
    scores: Annotated[
        list[Annotated[int, pydantic.Field(ge=0, le=99)]], pydantic.Field(max_length=3)
    ]


def test_structured_output(client: openai.OpenAI) -> None:
    for seed in range(5):
        answer = client.chat.completions.parse(
            model="fake", messages=HELLO, response_format=Verdict, seed=seed, max_tokens=500, n=2
        )
        assert all(isinstance(choice.message.parsed, Verdict) for choice in answer.choices)
    completion = client.completions.create(
        model="fake", prompt="a", extra_body={"structured_outputs": {"choice": ["yes", "no"]}}
    )
    assert completion.choices[0].text in ("yes", "no")


def test_unknown_models_and_paths(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as unknown:
        client.completions.create(model="gpt-4", prompt="a")
    assert (unknown.value.code, unknown.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-4")
    with pytest.raises(openai.NotFoundError) as path:
        client.embeddings.create(model="fake", input="a")
    assert path.value.code == "not_found"


def serving(folder: Path, **options: Any) -> FakeRunner:
    return fake_runner(save_byte_tokenizer(folder), **options)


def test_no_chat_template(tmp_path: Path) -> None:
    with (
        listening(serving(tmp_path)) as (url, _),
        connect(url) as client,
        pytest.raises(openai.BadRequestError, match="chat template"),
    ):
        client.chat.completions.create(model="fake", messages=HELLO)


def test_a_body_that_is_too_large(tmp_path: Path) -> None:
    with listening(serving(tmp_path), max_body_bytes=1000) as (url, _), connect(url) as client:
        with pytest.raises(openai.APIStatusError) as refused:
            client.completions.create(model="fake", prompt="a" * 2000)
        assert (refused.value.status_code, refused.value.code) == (413, "body_too_large")


def test_a_full_queue(tmp_path: Path) -> None:
    runner = serving(tmp_path, slots=1, max_waiting=0, step_seconds=0.01)
    with listening(runner) as (url, _), connect(url) as client:
        request: Any = {"model": "fake", "prompt": "a", "extra_body": {"ignore_eos": True}}
        stream = client.completions.create(**request, max_tokens=100_000, stream=True)
        next(stream)
        with pytest.raises(openai.RateLimitError) as refused:
            client.completions.create(**request)
        assert int(refused.value.response.headers["retry-after"]) >= 1
        # Who leaves gives the place back; the package then tries again by itself.
        stream.close()
        assert client.with_options(max_retries=5).completions.create(**request).choices[0].text


def test_a_server_that_drains(tmp_path: Path) -> None:
    with listening(serving(tmp_path)) as (url, service), connect(url) as client:
        service.lifecycle.draining = True
        with pytest.raises(openai.InternalServerError) as refused:
            client.completions.create(model="fake", prompt="a")
        assert refused.value.status_code == 503


def test_an_engine_that_fails(tmp_path: Path) -> None:
    runner = serving(tmp_path, failures=[RuntimeError("boom")])
    request: Any = {"model": "fake", "prompt": "a", "max_tokens": 1, "temperature": 0}
    with listening(runner) as (url, _), connect(url) as client:
        with pytest.raises(openai.InternalServerError) as failed:
            client.completions.create(**request)
        assert failed.value.status_code == 500
        assert client.completions.create(**request).choices[0].text


@pytest.mark.parametrize("chat", [False, True])
def test_a_stream_that_fails(tmp_path: Path, chat: bool) -> None:
    runner = chat_runner(tmp_path, step_seconds=0.005)
    with listening(runner) as (url, service), connect(url) as client:
        with pytest.raises(openai.APIError) as failed:
            for seen, _ in enumerate(stream(client, chat)):
                if seen == 1:
                    service.runner.failures.append(RuntimeError("boom"))
        assert not isinstance(failed.value, openai.APIStatusError)
        assert failed.value.type == "server_error"


def stream(client: openai.OpenAI, chat: bool) -> Iterator[Any]:
    common: Any = {"model": "fake", "max_tokens": 5000, "stream": True}
    common["extra_body"] = {"ignore_eos": True}
    if chat:
        return iter(client.chat.completions.create(messages=HELLO, **common))
    return iter(client.completions.create(prompt="a", **common))


def test_nobody_listens() -> None:
    with connect("http://127.0.0.1:9") as client, pytest.raises(openai.APIConnectionError):
        client.models.list()
