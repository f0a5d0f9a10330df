"""The header that names a request's session, or only says which requests belong together."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from engine.protocol.placement import engine_of_state
from service.settings import Settings
from tests.service.harness import Service, error_message, fake_runner, running, until
from tests.service.inference.test_several_engines import together

GENERATE, COMPLETIONS, SCORE, STATES = (
    f"/v1/{name}" for name in ("generate", "completions", "score", "states")
)
CHAT = "/v1/chat/completions"
GREEDY = {"max_tokens": 3, "temperature": 0}
NAME = "X-Session-Id"


@pytest.fixture
async def service(byte_folder: Path) -> AsyncIterator[Service]:
    """With the option."""
    runner = fake_runner(byte_folder, host_rows=64)
    async with running(runner, session_header=NAME) as service:
        yield service


async def post(
    service: Service, path: str, body: Any, *values: str, status: int = 200, name: str = NAME
) -> Any:
    """The answer to a request with the header, as often as there are values."""
    headers = [(name, value) for value in values]
    response = await service.http.post(path, json=body, headers=headers)
    assert response.status_code == status, response.text
    return response.json()


async def refused(service: Service, path: str, body: Any, param: str, *values: str) -> str:
    return error_message(await post(service, path, body, *values, status=400), param)


async def test_it_is_the_session_of_a_completion(service: Service) -> None:
    (choice,) = (await post(service, COMPLETIONS, {"prompt": "abc", **GREEDY}, "talk"))["choices"]
    assert (choice["text"], choice["state"]["id"]) == ("def", "session:talk")
    (choice,) = (await post(service, COMPLETIONS, {"prompt": None, **GREEDY}, "talk"))["choices"]
    assert (choice["text"], choice["state"]["tokens"]) == ("ghi", 9)
    body = {"prompt": "", "session_id": "talk", **GREEDY}
    assert (await service.post(COMPLETIONS, body))["choices"][0]["text"] == "jkl"
    (choice,) = (await post(service, COMPLETIONS, body, "talk"))["choices"]
    assert choice["text"] == "mno", "the body may name the same one"


async def test_it_is_the_session_of_a_prompt(service: Service) -> None:
    for body, text in (
        ({"prompts": ["abc"]}, "def"),
        ({"prompts": [""], "session_id": None}, "ghi"),
        ({"prompts": [""], "session_id": [None]}, "jkl"),
        ({"prompts": [""], "session_id": ["talk"]}, "mno"),
    ):
        (result,) = (await post(service, GENERATE, {**body, **GREEDY}, "talk"))["results"]
        assert (result["text"], result["state"]["id"]) == (text, "session:talk")


@pytest.mark.parametrize(
    ("path", "body", "param", "says"),
    [
        (COMPLETIONS, {"prompt": "a", "session_id": "b"}, "session_id", "'b'"),
        (GENERATE, {"prompts": ["a"], "session_id": "b"}, "session_id", "'b'"),
        (GENERATE, {"prompts": ["a", "b"], "session_id": [None, "b"]}, "session_id", "'b'"),
        (GENERATE, {"prompts": ["a", "b"]}, "x-session-id", "one prompt for each session"),
        (GENERATE, {"prompts": ["a"], "session_id": [None] * 2}, "session_id", "2 values"),
        (GENERATE, {"prompts": ["a"], "state": "s"}, "x-session-id", "together with state"),
        (COMPLETIONS, {"prompt": "a", "state": "s"}, "x-session-id", "together with state"),
        (COMPLETIONS, {"prompt": "a", "n": 2}, "x-session-id", "one prompt, n 1"),
        (COMPLETIONS, {"prompt": ["a", "b"]}, "x-session-id", "one prompt, n 1"),
        (COMPLETIONS, {"prompt": "a", "cache_points": [1]}, "cache_points", "x-session-id"),
        (CHAT, {"messages": [{"role": "user", "content": "a"}]}, "x-session-id", "whole"),
    ],
)
async def test_it_has_the_rules_of_the_field(
    service: Service, path: str, body: Any, param: str, says: str
) -> None:
    assert says in await refused(service, path, body, param, "talk")


@pytest.mark.parametrize("value", ["", "a b", "a/b", "é", "x" * 121])
async def test_it_must_be_a_name(service: Service, value: str) -> None:
    for path, body in ((COMPLETIONS, {"prompt": "a"}), (GENERATE, {"prompts": ["a"]})):
        headers = [(NAME.encode(), value.encode("latin-1"))]
        response = await service.http.post(path, json=body, headers=headers)
        assert response.status_code == 400
        assert "1 to 120" in error_message(response.json(), "x-session-id")


async def test_it_may_be_there_twice_with_one_value(service: Service) -> None:
    body = {"prompt": "abc", **GREEDY}
    (choice,) = (await post(service, COMPLETIONS, body, "talk", "talk"))["choices"]
    assert choice["state"]["id"] == "session:talk"
    assert "several times" in await refused(service, COMPLETIONS, body, "x-session-id", "a", "b")


async def test_errors_of_the_engine_name_it(service: Service, byte_folder: Path) -> None:
    answer = await post(service, COMPLETIONS, {"prompt": "", **GREEDY}, "nobody", status=400)
    assert answer["error"]["param"] == "prompt"
    runner = fake_runner(byte_folder, host_rows=64, step_seconds=0.002)
    async with running(runner, session_header="X-Talk") as other:
        body = {"prompt": "abc", "temperature": 0, "max_tokens": 300, "ignore_eos": True}
        held = asyncio.create_task(post(other, COMPLETIONS, body, "talk", name="x-talk"))
        await until(lambda: other.client.stats.running == 1)
        answer = await post(other, COMPLETIONS, body, "talk", name="x-talk", status=409)
        assert (answer["error"]["code"], answer["error"]["param"]) == ("state_busy", "x-talk")
        await held


async def test_other_requests_are_answered_as_without_it(service: Service) -> None:
    await post(service, STATES, {"prompt": "abc", "id": "s"}, "talk")
    body = {"texts": ["abc"], "state": "s"}
    assert (await post(service, SCORE, body, "talk"))["results"][0]["num_scored_tokens"] == 3
    for path in ("/v1/models", "/health", f"{STATES}/s"):
        assert (await service.http.get(path, headers={NAME: "talk"})).status_code == 200
    (listed,) = (await service.http.get(STATES)).json()["data"]
    assert listed["id"] == "s", "there is no session"


async def test_without_the_option_it_is_no_session(byte_folder: Path) -> None:
    """Any text will do, also beside a session of another name."""
    async with running(fake_runner(byte_folder, host_rows=64)) as service:
        for value in ("talk", "a b/c", "", "x" * 128):
            (choice,) = (await post(service, COMPLETIONS, {"prompt": "abc", **GREEDY}, value))[
                "choices"
            ]
            assert choice["text"] == "def" and "state" not in choice
            assert service.runner.admitted[-1].placement == value
        long = set()
        for value in ("x" * 5000, "x" * 5000, "x" * 5001):
            await post(service, COMPLETIONS, {"prompt": "abc", **GREEDY}, value)
            long.add(service.runner.admitted[-1].placement)
        assert len(long) == 2 and max(map(len, long)) <= 128, "what is longer travels as a digest"
        body = {"prompts": ["abc", "x"], "session_id": ["one", None], **GREEDY}
        first, second = (await post(service, GENERATE, body, "two"))["results"]
        assert first["state"]["id"] == "session:one" and "state" not in second
        assert {one.placement for one in service.runner.admitted[-2:]} == {"two"}
        await service.post(COMPLETIONS, {"prompt": "abc", **GREEDY})
        assert service.runner.admitted[-1].placement == ""
        # The header that an option of its own would name says nothing here.
        await post(service, COMPLETIONS, {"prompt": "abc", **GREEDY}, "talk", name="x-talk")
        assert service.runner.admitted[-1].placement == ""


async def test_all_that_reads_a_prompt_is_placed(byte_folder: Path) -> None:
    async with running(fake_runner(byte_folder, host_rows=64)) as service:
        for path, body, count in (
            (GENERATE, {"prompts": ["abc", "x"]}, 2),
            (COMPLETIONS, {"prompt": "abc", "n": 3}, 3),
            (SCORE, {"items": [{"context": "a", "continuations": ["b", "c"]}]}, 2),
            (STATES, {"prompt": "abc"}, 1),
        ):
            await post(service, path, body, "talk")
            assert {one.placement for one in service.runner.admitted[-count:]} == {"talk"}
        response = await service.http.post(
            f"{STATES}/text", content=b"a text", headers={NAME: "talk"}
        )
        assert response.status_code == 200, response.text
        assert service.runner.admitted[-1].placement == "talk"


@pytest.mark.parametrize("option", [None, "x-session-id"])
async def test_it_chooses_one_of_several_engines(byte_folder: Path, option: str | None) -> None:
    """With the option, as the id of the session's state."""
    options: dict[str, Any] = {"slots": 8, "host_rows": 64, "session_header": option}
    async with together(byte_folder, 3, **options) as (service, script):
        for name in ("emma", "anne", "fanny", "jane"):
            id = name if option is None else f"session:{name}"
            home = script.clients[engine_of_state("", id, 3)]
            for prompt in ("abc", "st"):
                before = [client.event_messages for client in script.clients]
                await post(service, COMPLETIONS, {"prompt": prompt, **GREEDY}, name)
                moved = [
                    client.event_messages > count
                    for client, count in zip(script.clients, before, strict=True)
                ]
                assert moved == [client is home for client in script.clients]


@pytest.mark.parametrize(
    "name", ["", "x session", "a:b", "Authorization", "x-api-key", "content-type", "host"]
)
def test_names_that_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=r"allowed: .*such as x-session-id"):
        Settings(session_header=name)
    assert Settings(session_header="X-My-Chat").session_header == "X-My-Chat"


async def test_the_schema_describes_it(service: Service, byte_folder: Path) -> None:
    async with running(fake_runner(byte_folder)) as other:
        for one, begins in (
            (service, {"generate": "The request's session_id", "chat/completions": "Not allowed"}),
            (other, {"generate": "Requests with the same", "chat/completions": "Requests with"}),
        ):
            paths = (await one.http.get("/openapi.json")).json()["paths"]
            for path, text in begins.items():
                (told,) = paths[f"/v1/{path}"]["post"]["parameters"]
                assert (told["name"], told["in"], told["required"]) == (
                    "x-session-id",
                    "header",
                    False,
                )
                assert told["description"].startswith(text)
            names = {one["name"] for one in paths["/v1/states/text"]["post"]["parameters"]}
            assert names >= {"x-session-id", "id"}
