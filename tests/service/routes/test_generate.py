"""POST /v1/generate. The fake model recites the alphabet and stops after "z"."""

from __future__ import annotations

import threading

import pytest

from engine.client.request_stream import Update
from service.inference.generation import Outcome
from service.inference.inputs.sampling import _stop_strings
from service.schemas.generate import GenerateRequest
from service.text import stop as stop_module
from tests.reports import log32
from tests.service.harness import Service, usage_of

PATH = "/v1/generate"


async def test_one_prompt(service: Service) -> None:
    body = await service.post(PATH, {"prompts": ["abc"], "max_tokens": 3, "temperature": 0})
    assert body["model"] == "fake"
    assert body["results"] == [
        {
            "index": 0,
            "text": "def",
            "token_ids": [100, 101, 102],
            "finish_reason": "length",
            "logprobs": None,
            "usage": usage_of(3, 3),
        }
    ]
    assert body["usage"] == usage_of(3, 3)


async def test_end_of_text_stops_and_is_no_text(service: Service) -> None:
    body = await service.post(PATH, {"prompts": ["wx"], "temperature": 0})
    (result,) = body["results"]
    assert result["finish_reason"] == "stop"
    assert result["text"] == "yz"
    assert result["token_ids"] == [121, 122]


async def test_null_is_as_good_as_nothing(service: Service) -> None:
    request = {"prompts": ["ab"], "max_tokens": 2, "temperature": 0}
    plain = await service.post(PATH, request)
    optional = dict.fromkeys(GenerateRequest.model_fields.keys() - request.keys())
    assert "stream" in optional
    told = await service.post(PATH, {**request, **optional})
    assert told["results"][0]["text"] == plain["results"][0]["text"] == "cd"


async def test_values_for_all_and_lists_for_each(service: Service) -> None:
    body = await service.post(
        PATH,
        {
            "prompts": ["a", [98], "c"],
            "max_tokens": [1, 2, 5],
            "temperature": 0,
            "stop": [None, "zzz", ["ef"]],
            "logprobs": [None, 0, 1],
        },
    )
    assert [result["text"] for result in body["results"]] == ["b", "cd", "d"]
    assert [result["finish_reason"] for result in body["results"]] == ["length", "length", "stop"]
    assert [result["index"] for result in body["results"]] == [0, 1, 2]
    assert body["results"][0]["logprobs"] is None
    assert body["results"][1]["logprobs"]["tokens"] == ["c", "d"]
    assert body["usage"]["prompt_tokens"] == 3


@pytest.mark.parametrize("stream", [False, True])
async def test_stop_string_over_token_boundaries(service: Service, stream: bool) -> None:
    request = {"prompts": ["ab"], "max_tokens": 20, "temperature": 0, "stop": ["xyz", "fgh"]}
    if stream:
        frames = await service.stream(PATH, request)
        text = "".join(frame["text"] for frame in frames)
        finish = frames[-1]["finish_reason"]
        # "f" and "g" were held back until it was known what they begin.
        assert [frame["text"] for frame in frames] == ["c", "d", "e", "", "", ""]
    else:
        (result,) = (await service.post(PATH, request))["results"]
        text, finish = result["text"], result["finish_reason"]
        assert result["token_ids"] == list(b"cdefgh")
        assert result["usage"]["completion_tokens"] == 6
    assert (text, finish) == ("cde", "stop")


async def test_a_beginning_of_a_stop_string_is_kept_at_the_end(service: Service) -> None:
    request = {"prompts": ["ab"], "max_tokens": 3, "temperature": 0, "stop": "dex"}
    (result,) = (await service.post(PATH, request))["results"]
    assert (result["text"], result["finish_reason"]) == ("cde", "length")
    frames = await service.stream(PATH, request)
    assert "".join(frame["text"] for frame in frames) == "cde"
    assert frames[-1]["finish_reason"] == "length"


async def test_a_stream_is_one_event_per_token_tagged_by_index(service: Service) -> None:
    frames = await service.stream(
        PATH, {"prompts": ["a", "j"], "max_tokens": [3, 2], "temperature": 0, "logprobs": 1}
    )
    for index, text in ((0, "bcd"), (1, "kl")):
        mine = [frame for frame in frames if frame["index"] == index]
        assert [frame["text"] for frame in mine] == list(text)
        assert [frame["token_ids"] for frame in mine] == [[ord(letter)] for letter in text]
        assert [frame["finish_reason"] for frame in mine] == [None] * (len(text) - 1) + ["length"]
        assert mine[-1]["usage"]["completion_tokens"] == len(text)
        assert [frame["logprobs"]["text_offset"] for frame in mine] == [
            [offset] for offset in range(len(text))
        ]


async def test_logprobs(service: Service) -> None:
    request = {"prompts": ["a"], "max_tokens": 2, "temperature": 0, "logprobs": 2}
    (result,) = (await service.post(PATH, request))["results"]
    half, quarter = log32(0.5), log32(0.25)
    assert result["logprobs"] == {
        "tokens": ["b", "c"],
        "token_logprobs": [half, half],
        "top_logprobs": [{"b": half, "c": quarter}, {"c": half, "d": quarter}],
        "text_offset": [0, 1],
    }


async def test_a_character_is_never_split(service: Service) -> None:
    # 0xC2 0xC3 ... are no UTF-8; after 0xC2 only 0x80 to 0xBF would be.
    request = {"prompts": [[0x41]], "logit_bias": {"195": 100}, "max_tokens": 1, "temperature": 0}
    (result,) = (await service.post(PATH, request))["results"]
    assert result["text"] == "\ufffd"  # the first byte of a character that never ended
    frames = await service.stream(
        PATH, {**request, "prompts": [[0xC2]], "logit_bias": {"169": 100}}
    )
    assert [frame["text"] for frame in frames] == ["©"]  # the prompt's last byte begins it
    request = {"prompts": ["a"], "max_tokens": 2, "temperature": 0, "logprobs": 0}
    bias = {"logit_bias": {"195": 100, "196": 0}}
    (result,) = (await service.post(PATH, {**request, **bias}))["results"]
    assert result["text"] == "\ufffd\ufffd"
    assert result["logprobs"]["tokens"] == ["bytes:\\xc3", "bytes:\\xc3"]
    assert result["logprobs"]["text_offset"] == [0, 1]


async def test_seeds_decide_the_draws(service: Service) -> None:
    request = {"prompts": ["a"] * 3, "max_tokens": 12, "ignore_eos": True, "seed": [1, 2, 1]}
    texts = [result["token_ids"] for result in (await service.post(PATH, request))["results"]]
    assert texts[0] == texts[2] != texts[1]
    request["seed"] = [-(2**63), 2**63 - 1, None]
    assert len((await service.post(PATH, request))["results"]) == 3


async def test_special_tokens_in_a_text_are_text(service: Service) -> None:
    request = {"prompts": ["<|endoftext|>"], "max_tokens": 1, "temperature": 0}
    (result,) = (await service.post(PATH, request))["results"]
    assert result["usage"]["prompt_tokens"] == len("<|endoftext|>")


async def test_a_failed_prompt_spoils_no_other(service: Service) -> None:
    service.runner.spoiled = {2, 12}  # the third prompt of each request
    request = {"prompts": ["a"] * 10, "max_tokens": 2, "temperature": 0}
    results = (await service.post(PATH, request))["results"]
    assert [result["index"] for result in results] == list(range(10))
    assert results.pop(2)["error"]["code"] == "step_failed"
    assert [result["text"] for result in results] == ["bc"] * 9
    frames = await service.stream(PATH, request)
    assert [frame["index"] for frame in frames if "error" in frame] == [2]
    assert {frame["index"] for frame in frames} == set(range(10))


@pytest.mark.parametrize("stream", [False, True])
async def test_stop_tables_are_built_once_per_distinct_list(
    service: Service, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    _stop_strings.cache_clear()
    built = []
    make = stop_module._failure_function
    monkeypatch.setattr(
        stop_module, "_failure_function", lambda word: built.append(word) or make(word)
    )
    request = {"prompts": ["a"] * 20, "max_tokens": 8, "temperature": 0, "stream": stream}
    request["stop"] = [["ef", "xy"], "ghi"] * 10
    response = await service.http.post(PATH, json=request)
    assert response.status_code == 200
    assert sorted(built) == ["ef", "ghi", "xy"]
    if not stream:
        texts = [result["text"] for result in response.json()["results"]]
        assert texts == ["bcd", "bcdef"] * 10


async def test_long_stop_strings_are_read_beside_the_event_loop(service: Service) -> None:
    long = [chr(97 + i) * 1024 for i in range(16)]
    request = {"prompts": ["a"] * 3, "max_tokens": 3, "temperature": 0}
    request["stop"] = [[*long[:15], str(i)] for i in range(3)]
    body = await service.post(PATH, request)
    assert [result["text"] for result in body["results"]] == ["bcd"] * 3


async def test_a_long_answer_is_read_beside_the_event_loop(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = []
    take = Outcome.take

    def noted(self: Outcome, update: Update) -> None:
        threads.append(threading.current_thread() is threading.main_thread())
        take(self, update)

    monkeypatch.setattr(Outcome, "take", noted)
    for tokens in (100, 3000):
        request = {"prompts": ["a"], "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
        (result,) = (await service.post(PATH, request))["results"]
        assert len(result["token_ids"]) == tokens
    assert threads == [True, False]


async def test_timeout_gives_the_partial_text(service: Service) -> None:
    service.runner.step_seconds = 0.02
    request = {"prompts": ["a"], "max_tokens": 1000, "temperature": 0, "ignore_eos": True}
    (result,) = (await service.post(PATH, {**request, "timeout": 0.3}))["results"]
    assert result["finish_reason"] == "timeout"
    assert result["text"].startswith("bcd")
    assert result["usage"]["completion_tokens"] == len(result["token_ids"]) < 1000


async def test_without_a_tokenizer(textless: Service) -> None:
    request = {"prompts": [[97, 98]], "max_tokens": 2, "temperature": 0, "logprobs": 1}
    (result,) = (await textless.post(PATH, request))["results"]
    assert result["text"] is None
    assert result["token_ids"] == [99, 100]
    assert result["logprobs"]["tokens"] == ["token_id:99", "token_id:100"]
    frames = await textless.stream(PATH, request)
    assert [frame["text"] for frame in frames] == [None, None]
    message = await textless.refused(PATH, {"prompts": [[1], "text"]}, "prompts[1]")
    assert "tokenizer.json" in message
    await textless.refused(PATH, {"prompts": [[1]], "stop": "x"}, "stop")
