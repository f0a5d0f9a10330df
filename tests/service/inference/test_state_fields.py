"""`state`, `return_state` and what is cached, in generate, completions, chat and score."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.reports import log32
from tests.service.harness import (
    Service,
    error_message,
    fake_runner,
    running,
    save_byte_tokenizer,
    until,
    usage_of,
)

GENERATE, COMPLETIONS, SCORE, STATES = (
    f"/v1/{name}" for name in ("generate", "completions", "score", "states")
)
HALF = log32(0.5)


@pytest.fixture
async def service(byte_folder: Path) -> AsyncIterator[Service]:
    async with running(fake_runner(byte_folder, host_rows=64)) as service:
        await service.post(STATES, {"prompt": "abc", "id": "abc"})
        await service.post(STATES, {"prompt": "mno", "id": "mno"})
        yield service


async def tokens_of(service: Service, state: str) -> int:
    response = await service.http.get(f"{STATES}/{state}")
    assert response.status_code == 200, response.text
    return int(response.json()["tokens"])


async def test_each_prompt_has_its_own(service: Service) -> None:
    body = {"prompts": ["", [], "st"], "state": ["abc", "mno", None], "max_tokens": 2}
    answer = await service.post(GENERATE, {**body, "temperature": 0})
    assert [result["text"] for result in answer["results"]] == ["de", "pq", "uv"]
    assert [result["usage"] for result in answer["results"]] == [
        usage_of(0, 2), usage_of(0, 2), usage_of(2, 2),
    ]  # fmt: skip
    assert all("state" not in result for result in answer["results"])


async def test_a_state_that_is_not_there_spoils_no_other(service: Service) -> None:
    body = {"prompts": ["x", "x"], "state": ["nobody", "abc"], "max_tokens": 1, "temperature": 0}
    (missing, _) = (await service.post(GENERATE, {**body, "prompts": ["", "x"]}))["results"]
    assert missing["error"]["code"] == "state_not_found"
    first, second = (await service.post(GENERATE, body))["results"]
    assert (first["error"]["code"], first["error"]["param"]) == ("state_not_found", "state")
    assert second["text"] == "y"
    frames = await service.stream(GENERATE, body)
    assert {frame["index"] for frame in frames if "error" in frame} == {0}


async def test_where_an_answer_ends_another_goes_on(service: Service) -> None:
    body = {"prompts": ["abc"], "max_tokens": 3, "temperature": 0, "return_state": True}
    (result,) = (await service.post(GENERATE, body))["results"]
    assert (result["text"], result["state"]["tokens"]) == ("def", 6)
    again = {**body, "prompts": [""], "state": result["state"]["id"]}
    (after,) = (await service.post(GENERATE, again))["results"]
    assert (after["text"], after["state"]["tokens"]) == ("ghi", 9)
    assert after["state"]["id"] != result["state"]["id"]
    assert await tokens_of(service, result["state"]["id"]) == 6


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_may_hold_its_state(
    service: Service, stream: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Another server of the same model goes on from it."""
    body = {"prompts": ["abc"], "max_tokens": 3, "temperature": 0, "return_state": "snapshot"}
    if stream:
        *others, last = await service.stream(GENERATE, body)
        assert all("state" not in frame for frame in others)
    else:
        (last,) = (await service.post(GENERATE, body))["results"]
    state = last["state"]
    assert (state["id"], state["tokens"]) == (None, 6)
    folder = save_byte_tokenizer(tmp_path_factory.mktemp("other"))
    runner = fake_runner(folder, host_rows=8)
    runner.outside = service.runner.outside  # the fake model's states are names of texts
    async with running(runner) as other:
        body = {"prompt": "", "state": {"snapshot": state["snapshot"]}, "max_tokens": 2}
        answer = await other.post(COMPLETIONS, {**body, "temperature": 0})
        assert answer["choices"][0]["text"] == "gh"


async def test_completions_start_from_a_state(service: Service) -> None:
    body = {"prompt": None, "state": "abc", "max_tokens": 2, "temperature": 0, "n": 2}
    answer = await service.post(COMPLETIONS, {**body, "return_state": True, "state_ttl": 60})
    states = [choice["state"] for choice in answer["choices"]]
    assert [choice["text"] for choice in answer["choices"]] == ["de", "de"]
    assert [state["tokens"] for state in states] == [5, 5]
    assert states[0]["id"] != states[1]["id"]
    assert states[0]["expires"] == pytest.approx(states[0]["created"] + 60, abs=1)
    assert answer["usage"] == usage_of(0, 4)
    frames = await service.stream(COMPLETIONS, {**body, "n": 1, "return_state": True})
    told = [frame["choices"][0].get("state") for frame in frames]
    assert told[:-1] == [None] * (len(told) - 1) and told[-1]["tokens"] == 5


async def test_after_a_state_the_first_token_is_scored_too(service: Service) -> None:
    body = {"prompt": "de", "state": "abc", "max_tokens": 0, "echo": True, "logprobs": 0}
    for answer in (await service.post(COMPLETIONS, body), *await service.stream(COMPLETIONS, body)):
        if answer["choices"][0]["logprobs"]["tokens"]:
            assert answer["choices"][0]["logprobs"]["token_logprobs"] == [HALF, HALF]
            assert answer["choices"][0]["text"] == "de"
    one = await service.post(COMPLETIONS, {**body, "prompt": "d"})
    assert one["choices"][0]["logprobs"]["token_logprobs"] == [HALF]


async def test_texts_are_scored_after_a_state(service: Service) -> None:
    body = {"texts": ["def", [100]], "state": "abc", "return_state": True}
    first, second = (await service.post(SCORE, body))["results"]
    assert (first["token_logprobs"], first["num_scored_tokens"]) == ([HALF] * 3, 3)
    assert (second["token_logprobs"], second["num_scored_tokens"]) == ([HALF], 1)
    assert first["state"]["tokens"] == 6
    # A long text can be scored in pieces: no token goes without.
    more = {"texts": ["ghi"], "state": first["state"]["id"]}
    (third,) = (await service.post(SCORE, more))["results"]
    assert third["total_logprob"] == pytest.approx(3 * HALF) and "state" not in third


async def test_a_text_of_one_token_leaves_a_state(service: Service) -> None:
    (result,) = (await service.post(SCORE, {"texts": ["a"], "return_state": True}))["results"]
    assert (result["token_logprobs"], result["state"]["tokens"]) == ([None], 1)


@pytest.mark.parametrize("context", ["", "d"])
async def test_continuations_are_scored_after_a_state(service: Service, context: str) -> None:
    items = [{"context": context, "continuations": ["de" if not context else "e", "zz"]}]
    (result,) = (await service.post(SCORE, {"items": items, "state": "abc"}))["results"]
    first, second = result["continuations"]
    assert (first["logprob"], first["is_greedy"]) == (
        pytest.approx(HALF * first["num_tokens"]),
        True,
    )
    assert second["is_greedy"] is False


async def test_usage_tells_what_was_known(service: Service) -> None:
    body = {"prompt": "a long prompt", "max_tokens": 1, "temperature": 0}
    assert (await service.post(COMPLETIONS, body))["usage"] == usage_of(13, 1)
    assert (await service.post(COMPLETIONS, body))["usage"] == usage_of(13, 1, 13)
    longer = {**body, "prompt": "a long prompt, longer"}
    assert (await service.post(COMPLETIONS, longer))["usage"] == usage_of(21, 1, 13)
    generate = {"prompts": ["a long prompt"], "max_tokens": 1, "temperature": 0}
    (result,) = (await service.post(GENERATE, generate))["results"]
    assert result["usage"] == usage_of(13, 1, 13)
    *_, last = await service.stream(GENERATE, generate)
    assert last["usage"] == usage_of(13, 1, 13)


async def test_a_salt_keeps_what_is_cached_apart(service: Service) -> None:
    body = {"prompt": "a long prompt", "max_tokens": 1, "temperature": 0}
    known = []
    for salt in ("one", "one", "two", None, None, "two"):
        answer = await service.post(COMPLETIONS, {**body, "cache_salt": salt})
        known.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
    assert known == [0, 13, 0, 0, 13, 13]


async def test_a_declared_point_is_cached(service: Service) -> None:
    body = {"max_tokens": 1, "temperature": 0}
    await service.post(COMPLETIONS, {**body, "prompt": "the same and one", "cache_points": [8]})
    answer = await service.post(COMPLETIONS, {**body, "prompt": "the same or another"})
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] >= 8


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (GENERATE, {"prompts": ["a", "b"], "state": ["abc"]}, "state"),
        (GENERATE, {"prompts": [""], "state": None}, "prompts[0]"),
        (GENERATE, {"prompts": ["a"], "state": "abc", "session_id": "s"}, "session_id"),
        (GENERATE, {"prompts": ["a"], "state_ttl": 9}, "state_ttl"),
        (GENERATE, {"prompts": ["ab", "ab"], "cache_points": [[1], [3]]}, "cache_points[1][0]"),
        (GENERATE, {"prompts": ["a"], "return_state": [1]}, "return_state[0]"),
        (COMPLETIONS, {"prompt": "a", "return_state": True, "best_of": 2}, "return_state"),
        (COMPLETIONS, {"prompt": ["a", "b"], "session_id": "s"}, "session_id"),
        (COMPLETIONS, {"prompt": "a", "n": 2, "session_id": "s"}, "session_id"),
        (COMPLETIONS, {"prompt": "a", "session_id": "a/b"}, "session_id"),
        (
            COMPLETIONS,
            {"prompt": "a", "session_id": "s", "echo": True, "logprobs": 0},
            "session_id",
        ),
        (SCORE, {"texts": ["a"], "state": "abc", "session_id": "s"}, "session_id"),
        (
            SCORE,
            {"items": [{"context": "a", "continuations": ["b"]}], "return_state": True},
            "return_state",
        ),
    ],
)
async def test_bad_input(service: Service, path: str, body: Any, param: str) -> None:
    await service.refused(path, body, param)


async def test_one_snapshot_for_several_prompts_is_brought_in_once(service: Service) -> None:
    body = {"prompts": ["abc"], "max_tokens": 1, "temperature": 0, "return_state": "snapshot"}
    (result,) = (await service.post(GENERATE, body))["results"]
    state = {"snapshot": result["state"]["snapshot"]}
    asked: list[str] = []
    ask = service.engine.ask
    service.engine.ask = lambda client, call: (  # type: ignore[method-assign]
        asked.append(call.action), ask(client, call),
    )[1]  # fmt: skip
    body = {"prompts": ["", "x", "y"], "state": state, "max_tokens": 1, "temperature": 0}
    answer = await service.post(GENERATE, body)
    assert [result["text"] for result in answer["results"]] == ["e", "y", "z"]
    await until(lambda: asked.count("delete") == 1)
    assert asked.count("import") == 1


async def test_a_snapshot_is_borrowed_for_no_longer_than_states_may_stay(
    byte_folder: Path,
) -> None:
    async with running(fake_runner(byte_folder, host_rows=8), max_request_timeout=1e9) as service:
        made = await service.post(STATES, {"prompt": "abc", "return_state": "snapshot"})
        body = {"prompts": [""], "state": {"snapshot": made["snapshot"]}, "timeout": 1e9}
        answer = await service.post(GENERATE, {**body, "max_tokens": 1, "temperature": 0})
        assert answer["results"][0]["text"] == "d"


@pytest.mark.parametrize("kept", [False, True])
async def test_samples_after_a_state_read_their_prompt_once(service: Service, kept: bool) -> None:
    body = {"prompt": "x" * 30, "state": "abc", "n": 4, "max_tokens": 2, "temperature": 0}
    chunks: list[Any] = []
    start = service.runner.start
    service.runner.start = lambda plan: (  # type: ignore[method-assign]
        chunks.extend(chunk.tokens for chunk in plan.prefill), start(plan),
    )[1]  # fmt: skip
    answer = await service.post(COMPLETIONS, {**body, "return_state": kept})
    assert [choice["text"] for choice in answer["choices"]] == ["yz"] * 4
    assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}, "of the first sample"
    read = sum(map(len, chunks))
    assert read == 1 + 30 + (3 if kept else 0), "who leaves a state reads the last token itself"
    if kept:
        states = [choice["state"] for choice in answer["choices"]]
        assert [state["tokens"] for state in states] == [35] * 4
        assert len({state["id"] for state in states}) == 4


async def test_a_bad_snapshot_is_told(service: Service) -> None:
    body = {"prompts": ["a"], "state": {"snapshot": "YWJj"}}
    answer = await service.post(GENERATE, body, 400)
    assert answer["error"]["code"] == "state_malformed"
    assert "3 bytes" in error_message(answer, "state.snapshot")


async def test_a_character_may_be_cut_by_a_state(service: Service) -> None:
    """What its first byte began, in the state, ends in the answer."""
    first, second = "é".encode()
    await service.post(STATES, {"prompt": [97, first], "id": "open"})
    for prompt in ("", []):
        body = {"prompts": [prompt], "state": "open", "max_tokens": 1}
        body["logit_bias"] = {second: 100}
        (result,) = (await service.post(GENERATE, body))["results"]
        assert (result["text"], result["token_ids"]) == ("é", [second])


@pytest.mark.parametrize("ruled", [{}, {"min_tokens": 1}])
async def test_a_stream_leaves_what_a_plain_answer_leaves(
    byte_folder: Path, ruled: dict[str, int]
) -> None:
    body = {"prompts": ["abc"], "max_tokens": 15, "temperature": 0, "stop": "kl", **ruled}
    async with running(fake_runner(byte_folder, host_rows=64, step_seconds=0.002)) as service:
        (plain,) = (await service.post(GENERATE, {**body, "return_state": True}))["results"]
        frames = await service.stream(GENERATE, {**body, "return_state": True})
        assert "".join(frame.get("text", "") for frame in frames) == plain["text"] == "defghij"
        assert frames[-1]["state"]["tokens"] == plain["state"]["tokens"] == 10
        again = {"prompts": [""], "state": frames[-1]["state"]["id"], "max_tokens": 2}
        (after,) = (await service.post(GENERATE, {**again, "temperature": 0}))["results"]
        assert after["text"] == "kl"


async def test_a_kept_answer_ends_at_its_end_token_whatever_stop_says(service: Service) -> None:
    body = {"prompt": "abc", "max_tokens": 1, "temperature": 0, "echo": True, "logprobs": 0}
    asked = {**body, "stop_token_ids": [ord("d")], "return_state": "id"}
    for stop in ({}, {"stop": "@@"}):
        answer = await service.post(COMPLETIONS, {**asked, **stop})
        assert answer["choices"][0]["finish_reason"] == "stop"


async def test_the_most_tokens_may_be_asked_for_with_a_stop_string(byte_folder: Path) -> None:
    most = 2**31 - 1
    body = {"prompts": ["abc"], "max_tokens": most, "temperature": 0, "stop": "ef"}
    async with running(fake_runner(byte_folder, host_rows=64), max_tokens=most) as service:
        (result,) = (await service.post(GENERATE, {**body, "return_state": True}))["results"]
        assert (result["text"], result["finish_reason"]) == ("d", "stop")
