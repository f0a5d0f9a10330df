"""`turn` of requests, and the `turns` of states: where they may stand, and what the engine gets."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from engine.errors import StateConflict, StoreUnavailable, TurnAhead, TurnDone
from engine.protocol.state_calls import StateInfo
from service.http.errors import from_engine
from service.inference.inputs.states import state_object
from tests.service.harness import Service, fake_runner, running

GENERATE, COMPLETIONS, STATES = "/v1/generate", "/v1/completions", "/v1/states"
GREEDY = {"max_tokens": 3, "temperature": 0}


@pytest.fixture
async def service(byte_folder: Path) -> AsyncIterator[Service]:
    async with running(fake_runner(byte_folder, host_rows=64)) as service:
        yield service


def turns(service: Service, count: int = 1) -> list[int]:
    """Of the last requests that the engine has admitted."""
    return [one.turn for one in service.runner.admitted[-count:]]


async def test_a_session_s_turn_gets_to_the_engine(service: Service) -> None:
    body = {"prompt": "abc", "session_id": "talk", **GREEDY}
    for turn, text in ((1, "def"), (2, "def"), (None, "def")):
        answer = await service.post(COMPLETIONS, {**body, "turn": turn})
        assert answer["choices"][0]["text"] == text
        assert turns(service) == [turn or 0]
    frames = await service.stream(COMPLETIONS, {**body, "turn": 4})
    assert frames[-1]["choices"][0]["state"]["tokens"] == 24
    assert turns(service) == [4]


async def test_each_prompt_has_its_own(service: Service) -> None:
    body = {"prompts": ["abc", "x", "st"], "session_id": ["a", None, "b"], "turn": [1, None, 1]}
    assert len((await service.post(GENERATE, {**body, **GREEDY}))["results"]) == 3
    by_prompt = {bytes(one.prompt[::4]): one.turn for one in service.runner.admitted[-3:]}
    assert by_prompt == {b"abc": 1, b"x": 0, b"st": 1}
    body = {"prompts": ["abc", "st"], "session_id": ["c", "d"], "turn": 1}
    await service.post(GENERATE, {**body, **GREEDY})
    assert turns(service, 2) == [1, 1]


async def test_what_goes_on_from_a_state_may_have_a_turn(service: Service) -> None:
    await service.post(STATES, {"prompt": "abc", "id": "s"})
    body = {"prompt": "", "state": "s", "turn": 2, "n": 2, **GREEDY}
    answer = await service.post(COMPLETIONS, body)
    assert [choice["text"] for choice in answer["choices"]] == ["def"] * 2
    assert turns(service, 2) == [2, 2]
    await service.post(GENERATE, {"prompts": ["x"], "state": "s", "turn": [2], **GREEDY})
    assert turns(service) == [2]
    await service.post(STATES, {"prompt": "d", "state": "s", "turn": 2})
    assert turns(service) == [2]


@pytest.mark.parametrize(
    ("path", "body", "param", "says"),
    [
        (COMPLETIONS, {"prompt": "a", "turn": 1}, "turn", "session_id or state only"),
        (GENERATE, {"prompts": ["a"], "turn": 1}, "turn", "session_id or state only"),
        (
            GENERATE,
            {"prompts": ["a", "b"], "session_id": ["s", None], "turn": [1, 1]},
            "turn[1]",
            "session_id or state only",
        ),
        (GENERATE, {"prompts": ["a"], "session_id": "s", "turn": [1, 2]}, "turn", "2 values"),
        (STATES, {"prompt": "a", "turn": 1}, "turn", "state only"),
        (STATES, {"prompt": "a", "id": "s", "turn": 1}, "turn", "state only"),
        (COMPLETIONS, {"prompt": "a", "session_id": "s", "turn": 0}, "turn", "1"),
        (COMPLETIONS, {"prompt": "a", "session_id": "s", "turn": "1"}, "turn", "integer"),
        (COMPLETIONS, {"prompt": "a", "session_id": "s", "turn": True}, "turn", "integer"),
        (COMPLETIONS, {"prompt": "a", "session_id": "s", "turn": 2**31}, "turn", "2147483647"),
        (GENERATE, {"prompts": ["a"], "session_id": "s", "turn": [0]}, "turn[0]", "1"),
        ("/v1/score", {"texts": ["ab"], "turn": 1}, "turn", "unknown field"),
    ],
)
async def test_bad_input(service: Service, path: str, body: Any, param: str, says: str) -> None:
    assert says in await service.refused(path, body, param)
    assert not service.runner.admitted


@pytest.mark.parametrize("stream", [False, True])
async def test_a_turn_is_carried_out_once(service: Service, stream: bool) -> None:
    """Also where the first event of a stream would be."""
    body = {"prompt": "abc", "session_id": "talk", "stream": stream, **GREEDY}

    async def refused(turn: int, code: str) -> str:
        answer = await service.post(COMPLETIONS, {**body, "turn": turn}, 409)
        assert (answer["error"]["code"], answer["error"]["param"]) == (code, "turn")
        message: str = answer["error"]["message"]
        return message

    await refused(2, "turn_ahead")
    for turn in (1, 2):
        response = await service.http.post(COMPLETIONS, json={**body, "turn": turn})
        assert response.status_code == 200
        for earlier in range(1, turn + 1):
            assert f"{6 * turn} tokens" in await refused(earlier, "turn_done")
        await refused(turn + 2, "turn_ahead")
        state = (await service.http.get(f"{STATES}/session:talk")).json()
        assert (state["turns"], state["tokens"]) == (turn, 6 * turn), "nothing was done"


async def test_a_turn_that_is_done_spoils_no_other_prompt(service: Service) -> None:
    body = {"prompts": ["abc", "st"], "session_id": ["a", "b"], "turn": 1, **GREEDY}
    await service.post(GENERATE, {**body, "session_id": ["a", None], "turn": [1, None]})
    done, fresh = (await service.post(GENERATE, body))["results"]
    assert (done["error"]["code"], done["error"]["param"]) == ("turn_done", "turn")
    assert (fresh["text"], fresh["state"]["turns"]) == ("uvw", 1)


async def test_states_go_on_by_turns(service: Service) -> None:
    await service.post(STATES, {"prompt": "abc", "id": "s"})
    body = {"prompt": "d", "state": "s", "id": "s", "turn": 2}
    made = await service.post(STATES, body)
    assert (made["turns"], made["tokens"]) == (2, 4)
    answer = await service.post(STATES, body, 409)
    assert (answer["error"]["code"], answer["error"]["param"]) == ("turn_done", "turn")


async def test_states_tell_their_turns(service: Service) -> None:
    info = StateInfo("s", "", 9, 100, "store", "f", 1.0, 2.0, stored=True, turns=3)
    told = state_object(info)
    assert (told["turns"], told["tier"]) == (3, "store")
    body = {"prompt": "abc", "return_state": "snapshot", **GREEDY}
    (choice,) = (await service.post(COMPLETIONS, body))["choices"]
    kept = await service.post(STATES, {"prompt": "abc", "id": "s"})
    seen = (await service.http.get(f"{STATES}/s")).json()
    (listed,) = (await service.http.get(STATES)).json()["data"]
    assert [state["turns"] for state in (choice["state"], kept, seen, listed)] == [1, 1, 1, 1]


@pytest.mark.parametrize(
    ("kind", "status", "code"),
    [
        (TurnDone, 409, "turn_done"),
        (TurnAhead, 409, "turn_ahead"),
        (StateConflict, 409, "state_conflict"),
        (StoreUnavailable, 503, "state_store_unavailable"),
    ],
)
def test_what_a_shared_store_may_answer(kind: Any, status: int, code: str) -> None:
    error = from_engine(kind("why", param="turn"))
    assert (error.status_code, error.body["error"]["code"]) == (status, code)
    assert error.body["error"]["param"] == "turn"
