"""A state folder that cannot be written to: who asks for a state is told, an answer is given."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.engine.cache.test_store_waiters import broken
from tests.service.harness import Service, fake_runner, parse_events, running

PATH = "/v1/states"
TURN = {"prompts": ["k"], "max_tokens": 3, "temperature": 0}


@pytest.fixture
async def service(byte_folder: Path, tmp_path: Path) -> AsyncIterator[Service]:
    folder = str(tmp_path / "states")
    async with running(fake_runner(byte_folder, host_rows=64, state_folder=folder)) as service:
        await service.post(PATH, {"prompt": "abc", "id": "mine"})
        yield service


async def errors(service: Service) -> float:
    """What /metrics says of them."""
    name = "minserve_state_store_errors_total "
    lines = (await service.http.get("/metrics")).text.splitlines()
    return sum(float(line.removeprefix(name)) for line in lines if line.startswith(name))


async def ids(service: Service) -> list[str]:
    return [state["id"] for state in (await service.http.get(PATH)).json()["data"]]


async def refused(service: Service, path: str, **request: Any) -> None:
    response = await service.http.post(path, **request)
    assert response.status_code == 507, response.text
    error = response.json()["error"]
    assert (error["code"], error["type"]) == ("state_not_stored", "server_error")
    assert error["param"] is None and "No space left on device" in error["message"]


async def test_who_asks_for_a_state_gets_507(service: Service) -> None:
    content = (await service.http.get(f"{PATH}/mine/content")).content
    assert await errors(service) == 0
    with broken():
        await refused(service, PATH, json={"prompt": "xyz"})
        await refused(service, PATH, json={"prompt": "xyz", "id": "mine"})
        await refused(service, PATH, json={"prompt": "xyz", "id": "n", "return_state": "snapshot"})
        await refused(service, f"{PATH}/import?id=mine", content=content)
        await refused(service, f"{PATH}/mine/fork", json={"id": "other"})
        assert await errors(service) == 5
        # A snapshot that nobody asked to keep is no matter of the disk.
        told = await service.post(PATH, {"prompt": "xyz", "return_state": "snapshot"})
        assert told["snapshot"] and told["stored"] is None
        assert await errors(service) == 5
        await refused(service, f"{PATH}/text?id=mine", content=b"a text")
    for _ in range(500):  # what a request borrows goes after its answer
        if await ids(service) == ["mine"]:
            break
        await asyncio.sleep(0.01)
    assert await ids(service) == ["mine"]
    told = (await service.http.get(f"{PATH}/mine")).json()
    assert told["tokens"] == 3 and told["stored"] is True
    assert (await service.post(PATH, {"prompt": "xyz", "id": "mine"}))["stored"] is True


@pytest.mark.parametrize(
    ("fields", "id"), [({"session_id": "s"}, "session:s"), ({"return_state": True}, "st_")]
)
async def test_an_answer_says_that_its_state_is_not_stored(
    service: Service, fields: dict[str, Any], id: str
) -> None:
    body = {**TURN, **fields}
    for stored in (False, True):
        results = []
        if stored:
            results += (await service.post("/v1/generate", body))["results"]
        else:
            with broken():
                results += (await service.post("/v1/generate", body))["results"]
                events = await service.stream("/v1/generate", {**body, "stream": True})
                results += [one for one in events if isinstance(one, dict) and one.get("state")]
        for result in results:
            assert result["state"]["stored"] is stored
            assert result["state"]["id"].startswith(id)
    assert await errors(service) == 2


async def test_other_answers_say_it_too(service: Service) -> None:
    with broken():
        body = {"prompt": "k", "max_tokens": 1, "session_id": "s"}
        (choice,) = (await service.post("/v1/completions", body))["choices"]
        assert choice["text"] and choice["state"]["stored"] is False
        body = {"texts": ["abc"], "return_state": True}
        (result,) = (await service.post("/v1/score", body))["results"]
        assert result["token_logprobs"] and result["state"]["stored"] is False
        response = await service.http.post("/v1/completions", json={
            "prompt": "k", "max_tokens": 1, "session_id": "s", "stream": True,
        })  # fmt: skip
        told = [one for one in parse_events(response.text) if isinstance(one, dict)]
        states = [choice["state"] for one in told for choice in one["choices"] if "state" in choice]
        assert [state["stored"] for state in states if state] == [False]


async def test_what_a_client_brings_itself_needs_no_disk(service: Service) -> None:
    body = {"prompt": "abc", "return_state": "snapshot"}
    snapshot = (await service.post(PATH, body))["snapshot"]
    with broken():
        body = {**TURN, "prompts": [""], "state": {"snapshot": snapshot}}
        (result,) = (await service.post("/v1/generate", body))["results"]
    assert result["text"] == "def" and result.get("state") is None


async def test_without_a_folder_nothing_is_said(byte_folder: Path) -> None:
    async with running(fake_runner(byte_folder, host_rows=64)) as service:
        assert (await service.post(PATH, {"prompt": "abc"}))["stored"] is None
        (result,) = (await service.post("/v1/generate", {**TURN, "return_state": True}))["results"]
        assert result["state"]["stored"] is None


async def test_a_file_that_cannot_be_removed_is_told(service: Service) -> None:
    def fails(self: Path, missing_ok: bool = False) -> None:
        raise OSError(30, "Read-only file system", str(self))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "unlink", fails)
        response = await service.http.delete(f"{PATH}/mine")
    assert response.status_code == 507, response.text
    assert response.json()["error"]["code"] == "state_not_stored"
    assert await errors(service) == 1
    assert await ids(service) == ["mine"]
    assert (await service.http.delete(f"{PATH}/mine")).status_code == 200
    assert await ids(service) == []
