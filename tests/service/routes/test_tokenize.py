"""POST /tokenize and /detokenize."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.service.chat import END, START, chat_runner, prompt_ids
from tests.service.harness import Service, fake_runner, running
from tests.service.text.test_tokenizer import metaspace_with_bytes

TOKENIZE, DETOKENIZE = "/tokenize", "/detokenize"


async def test_there_and_back(service: Service) -> None:
    text = "né <|endoftext|>\n"
    body = await service.post(TOKENIZE, {"prompt": text})
    assert body == {"count": 18, "tokens": list(text.encode()), "token_strs": None}
    assert await service.post(DETOKENIZE, {"tokens": body["tokens"]}) == {"prompt": text}
    request = {"prompt": "né", "return_token_strs": True, "model": "fake"}
    names = (await service.post(TOKENIZE, request))["token_strs"]
    assert names == ["n", "bytes:\\xc3", "bytes:\\xa9"]


async def test_what_is_put_around_a_text(tmp_path: Path) -> None:
    metaspace_with_bytes().save(str(tmp_path / "tokenizer.json"))
    async with running(fake_runner(tmp_path, vocab_size=300)) as service:
        tokens = (await service.post(TOKENIZE, {"prompt": "the"}))["tokens"]
        assert tokens[0] == 256
        bare = await service.post(TOKENIZE, {"prompt": "the", "add_special_tokens": False})
        assert bare["tokens"] == tokens[1:]
        assert (await service.post(DETOKENIZE, {"tokens": tokens}))["prompt"] == "the"


async def test_no_text(service: Service) -> None:
    assert (await service.post(TOKENIZE, {"prompt": ""}))["tokens"] == []
    assert (await service.post(DETOKENIZE, {"tokens": []}))["prompt"] == ""


async def test_a_conversation(tmp_path: Path) -> None:
    async with running(chat_runner(tmp_path)) as service:
        messages = [{"role": "user", "content": "hello"}]
        body = await service.post(TOKENIZE, {"messages": messages, "return_token_strs": True})
        assert body["tokens"] == prompt_ids(("user", "hello"))
        assert body["token_strs"][0] == "<|start|>"


async def test_how_the_template_makes_a_text(tmp_path: Path) -> None:
    async with running(chat_runner(tmp_path)) as service:
        request: dict[str, Any] = {"messages": [{"role": "assistant", "content": "hello<|end|>"}]}
        request["add_generation_prompt"] = False
        turn = [START, *b"assistant:hello<|end|>", END]
        assert (await service.post(TOKENIZE, request))["tokens"] == turn
        request["continue_final_message"] = True
        assert (await service.post(TOKENIZE, request))["tokens"] == turn[:-1]
        request["chat_template_kwargs"] = {"thinking": True}
        assert (await service.post(TOKENIZE, request))["tokens"] == turn[:-1]
        for wrong, param in (
            ({"add_generation_prompt": True}, "continue_final_message"),
            ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
        ):
            await service.refused(TOKENIZE, {**request, **wrong}, param)


@pytest.mark.parametrize(
    ("path", "body", "param", "words"),
    [
        (TOKENIZE, {}, None, "exactly one"),
        (
            TOKENIZE,
            {"prompt": "a", "messages": [{"role": "user", "content": "a"}]},
            None,
            "exactly",
        ),
        (TOKENIZE, {"messages": [{"role": "user", "content": "a"}]}, "messages", "chat template"),
        *(
            (TOKENIZE, {"prompt": "a", field: value}, None, f"{field} is allowed with messages")
            for field, value in [
                ("add_generation_prompt", False),
                ("continue_final_message", False),
                ("chat_template_kwargs", {}),
            ]
        ),
        (TOKENIZE, {"prompt": ["a"]}, "prompt", "string"),
        (TOKENIZE, {"prompt": "a" * 1001}, "prompt", "1001 tokens, but at most 1000"),
        (DETOKENIZE, {}, "tokens", "required"),
        (DETOKENIZE, {"tokens": "a"}, "tokens", "list"),
        (DETOKENIZE, {"tokens": [1, 257]}, "tokens", "0 to 256"),
        (DETOKENIZE, {"tokens": [-1]}, "tokens[0]", "greater than or equal to 0"),
        (DETOKENIZE, {"tokens": [1] * 1001}, "tokens", "1001 tokens, but at most 1000"),
        (DETOKENIZE, {"tokens": [1], "text": 1}, "text", "unknown field"),
    ],
)
async def test_refusals(
    byte_folder: Path, path: str, body: Any, param: str | None, words: str
) -> None:
    async with running(fake_runner(byte_folder), max_reports=1000) as service:
        assert words in await service.refused(path, body, param)


@pytest.mark.parametrize(
    ("path", "body"), [(TOKENIZE, {"prompt": "a"}), (DETOKENIZE, {"tokens": [1]})]
)
async def test_when_it_cannot_be_answered(
    textless: Service, service: Service, path: str, body: Any
) -> None:
    assert "tokenizer.json" in await textless.refused(path, body, next(iter(body)))
    await service.refused(path, {**body, "model": "gpt-4"}, "model", 404)
    response = await service.http.post(
        path, content=b"{", headers={"content-type": "application/json"}
    )
    assert response.status_code == 400 and response.json()["error"]["code"] == "invalid_json"
    service.lifecycle.draining = True
    await service.refused(path, body, None, 503)


async def test_it_costs_no_place_in_the_queue(byte_folder: Path) -> None:
    async with running(fake_runner(byte_folder, slots=1, max_waiting=0)) as service:
        with service.lifecycle.runtime.begin(0.0, "", 0) as inference:
            inference.reserve(1)
            await service.refused("/v1/completions", {"prompt": "a"}, None, 429)
            assert (await service.post(TOKENIZE, {"prompt": "a"}))["tokens"] == [97]
