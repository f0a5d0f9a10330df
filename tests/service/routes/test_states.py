"""/v1/states: made, looked at, listed, forked, deleted, taken away and brought back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.service.harness import (
    Service,
    error_message,
    fake_runner,
    running,
    until,
    usage_of,
)

PATH = "/v1/states"
GREEDY = {"temperature": 0, "max_tokens": 3}


@pytest.fixture
async def service(byte_folder: Path) -> AsyncIterator[Service]:
    async with running(fake_runner(byte_folder, host_rows=64)) as service:
        yield service


async def get(service: Service, path: str, status: int = 200) -> Any:
    response = await service.http.get(path)
    assert response.status_code == status, response.text
    return response.json()


async def delete(service: Service, path: str, status: int = 200) -> Any:
    response = await service.http.delete(path)
    assert response.status_code == status, response.text
    return response.json()


async def text_after(service: Service, state: Any, prompt: str = "") -> str:
    """The greedy answer to a prompt after a state."""
    body = {"prompts": [prompt], "state": state, **GREEDY}
    (result,) = (await service.post("/v1/generate", body))["results"]
    return str(result["text"])


async def kept(service: Service, ids: list[str]) -> None:
    """Waits until these are the states: what a request borrows goes after its answer."""
    for _ in range(500):
        found = [state["id"] for state in (await get(service, PATH))["data"]]
        if found == ids:
            return
        await asyncio.sleep(0.01)
    raise AssertionError(f"the states are {found}, not {ids}")


async def test_a_prompt_becomes_a_state(service: Service) -> None:
    made = await service.post(PATH, {"prompt": "abc"})
    assert made["id"].startswith("st_") and len(made["id"]) == 35
    assert (made["object"], made["tokens"], made["model"]) == ("state", 3, "fake")
    assert made["bytes"] == service.runner.info.state_bytes
    assert made["fingerprint"] == service.runner.info.fingerprint
    assert made["expires"] == pytest.approx(made["created"] + 86400, abs=1)
    assert made["usage"] == usage_of(3, 0)
    seen = await get(service, f"{PATH}/{made['id']}")
    assert {name: seen[name] for name in ("id", "tokens", "bytes", "created")} == {
        name: made[name] for name in ("id", "tokens", "bytes", "created")
    }
    assert await text_after(service, made["id"]) == "def"
    assert await text_after(service, made["id"], "xy") == "z"
    assert await text_after(service, made["id"]) == "def", "it is not used up"


async def test_a_state_is_appended_to(service: Service) -> None:
    first = await service.post(PATH, {"prompt": "ab", "id": "mine"})
    assert first["id"] == "mine"
    more = await service.post(PATH, {"prompt": [120, 102], "state": "mine", "id": "mine"})
    assert (more["id"], more["tokens"]) == ("mine", 4)
    assert more["usage"] == usage_of(2, 0)
    assert await text_after(service, "mine") == "ghi"
    other = await service.post(PATH, {"prompt": "c", "state": "mine"})
    assert (await get(service, f"{PATH}/mine"))["tokens"] == 4
    assert (await get(service, f"{PATH}/{other['id']}"))["tokens"] == 5


async def test_a_fork_goes_its_own_way(service: Service) -> None:
    await service.post(PATH, {"prompt": "abc", "id": "one"})
    forked = await service.post(f"{PATH}/one/fork", {"id": "two", "ttl": 60})
    assert (forked["id"], forked["tokens"]) == ("two", 3)
    assert forked["expires"] == pytest.approx(forked["created"] + 60, abs=1)
    response = await service.http.post(f"{PATH}/one/fork")  # without a body
    assert response.status_code == 200 and response.json()["id"].startswith("st_")
    await service.post(PATH, {"prompt": "k", "state": "two", "id": "two"})
    assert await delete(service, f"{PATH}/one") == {"id": "one", "object": "state", "deleted": True}
    assert await text_after(service, "two") == "lmn"
    assert "'one'" in await service.refused(f"{PATH}/one/fork", {}, "id", 404)


async def test_states_are_listed_in_pages(service: Service) -> None:
    assert await get(service, PATH) == {
        "object": "list", "data": [], "first_id": None, "last_id": None, "has_more": False,
    }  # fmt: skip
    for name in ("c", "a", "b"):
        await service.post(PATH, {"prompt": "x", "id": name})
    page = await get(service, f"{PATH}?limit=2")
    assert [state["id"] for state in page["data"]] == ["a", "b"]
    assert (page["first_id"], page["last_id"], page["has_more"]) == ("a", "b", True)
    page = await get(service, f"{PATH}?limit=2&after=b")
    assert [state["id"] for state in page["data"]] == ["c"] and page["has_more"] is False


@pytest.mark.parametrize(
    ("query", "param"),
    [("limit=0", "limit"), ("limit=1001", "limit"), ("limit=x", "limit"), ("after=%20", "after")],
)
async def test_a_bad_page(service: Service, query: str, param: str) -> None:
    error_message(await get(service, f"{PATH}?{query}", 400), param)


async def test_an_unknown_query_is_refused(service: Service) -> None:
    assert "before" in str(await get(service, f"{PATH}?before=a", 400))


async def test_a_download_can_be_imported(service: Service) -> None:
    await service.post(PATH, {"prompt": "abc", "id": "mine"})
    download = await service.http.get(f"{PATH}/mine/content")
    assert download.headers["content-type"] == "application/octet-stream"
    assert 'filename="mine.safetensors"' in download.headers["content-disposition"]
    response = await service.http.post(f"{PATH}/import?id=again&ttl=60", content=download.content)
    assert response.status_code == 200, response.text
    assert (response.json()["id"], response.json()["tokens"]) == ("again", 3)
    await delete(service, f"{PATH}/mine")
    assert await text_after(service, "again") == "def"
    unnamed = await service.http.post(f"{PATH}/import", content=download.content)
    assert unnamed.json()["id"].startswith("st_")


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda content: b"", "snapshot"),
        (lambda content: content[:-1], "snapshot"),
        (lambda content: content[:8], "header"),
        (lambda content: b"\xff" * 8 + content[8:], "header"),
        (lambda content: content.replace(b'"minserve.state.3"', b'"minserve.state.9"'), "format"),
        (lambda content: content.replace(b'"fingerprint":"fake"', b'"fingerprint":"fuke"'), "fuke"),
    ],
)
async def test_what_is_no_state_is_refused(service: Service, damage: Any, reason: str) -> None:
    await service.post(PATH, {"prompt": "abc", "id": "mine"})
    content = (await service.http.get(f"{PATH}/mine/content")).content
    damaged = damage(content)
    assert damaged != content
    response = await service.http.post(f"{PATH}/import", content=damaged)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["code"] in ("state_malformed", "state_mismatch") and reason in error["message"]


async def test_a_body_that_no_state_has_is_refused_before_it_is_read(service: Service) -> None:
    sent = 0

    async def endless() -> AsyncIterator[bytes]:
        nonlocal sent
        while True:
            sent += 2**16
            yield b"x" * 2**16

    response = await service.http.post(f"{PATH}/import", content=b"x" * 2**20)
    assert response.status_code == 413 and response.json()["error"]["code"] == "body_too_large"
    response = await service.http.post(f"{PATH}/import", content=endless())
    assert response.status_code == 413 and sent < 2**27


async def test_a_text_is_read_while_it_comes(service: Service) -> None:
    async def text() -> AsyncIterator[bytes]:
        for _ in range(3):
            yield b"abcdefghijklmno\n" * 4096
        yield "é".encode()[:1]
        yield "é".encode()[1:] + b"p"

    response = await service.http.post(f"{PATH}/text?id=book&ttl=99", content=text())
    assert response.status_code == 200, response.text
    made, length = response.json(), 3 * 4096 * 16 + 3
    assert (made["id"], made["tokens"], made["usage"]) == ("book", length, usage_of(length, 0))
    assert made["expires"] == pytest.approx(made["created"] + 99, abs=1)
    assert await text_after(service, "book") == "qrs"
    more = await service.http.post(f"{PATH}/text?id=book&state=book", content=b"xyz" * 10 + b"a")
    assert more.json()["tokens"] == length + 31
    assert await text_after(service, "book") == "bcd"
    await kept(service, ["book"])


@pytest.mark.parametrize(
    ("content", "reason"), [(b"", "empty"), (b"a\xff", "at byte 1"), (b"a" * 300_000 + b"\xc3", "")]
)
async def test_a_text_that_cannot_be_read_leaves_nothing(
    service: Service, content: bytes, reason: str
) -> None:
    response = await service.http.post(f"{PATH}/text", content=content)
    assert response.status_code == 400
    assert reason in error_message(response.json(), "text")
    await kept(service, [])


async def test_a_text_takes_the_place_of_one_state(byte_folder: Path) -> None:
    runner = fake_runner(byte_folder, host_rows=8, max_states=1)
    async with running(runner) as service:
        response = await service.http.post(f"{PATH}/text?id=book", content=b"abc" * 99)
        assert response.status_code == 200, response.text
        listed = (await service.http.get(PATH)).json()["data"]
        assert [state["id"] for state in listed] == ["book"]
        response = await service.http.post(f"{PATH}/text?id=other", content=b"abc")
        assert response.status_code == 429, response.text


async def test_a_text_under_way_ends_with_the_drain(byte_folder: Path) -> None:
    """Also when the server ends what is left while a piece of it is on its way here."""
    async with running(fake_runner(byte_folder, host_rows=8)) as service:
        first, cut = asyncio.Event(), asyncio.Event()

        async def text() -> AsyncIterator[bytes]:
            yield b"a" * 2**17
            first.set()
            await cut.wait()
            yield b"b" * 2**17

        asked = asyncio.create_task(service.http.post(f"{PATH}/text?id=book", content=text()))
        await first.wait()
        await until(lambda: service.lifecycle.load().states == 1)
        await service.lifecycle.drain(timeout=0.05)
        cut.set()
        response = await asked
        assert response.status_code == 503, response.text
        assert response.json()["error"]["code"] == "draining"


async def test_a_text_may_be_too_long(byte_folder: Path) -> None:
    async with running(fake_runner(byte_folder, host_rows=8), max_text_bytes=10) as service:
        response = await service.http.post(f"{PATH}/text", content=b"a" * 11)
        assert response.status_code == 413


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": [257]}, "prompt[0]"),
        ({"prompt": "a", "id": "a b"}, "id"),
        ({"prompt": "a", "id": ""}, "id"),
        ({"prompt": "a", "id": "."}, "id"),
        ({"prompt": "a", "id": ".."}, "id"),
        ({"prompt": "a", "id": "x" * 129}, "id"),
        ({"prompt": "a", "ttl": 0}, "ttl"),
        ({"prompt": "a", "ttl": "9"}, "ttl"),
        ({"prompt": "a", "state": 7}, "state"),
        ({"prompt": "a", "state": {"snapshot": "no base64"}}, "state.snapshot"),
        ({"prompt": "a", "state": {}}, "state.snapshot"),
        ({"prompt": "a", "return_state": "both"}, "return_state"),
        ({"prompt": "abc", "cache_points": [1, 4]}, "cache_points[1]"),
        ({"prompt": "abc", "cache_points": [0]}, "cache_points[0]"),
        ({"prompt": "a", "cache_salt": "é" * 33}, "cache_salt"),
        ({"prompt": "a", "return_state": "snapshot", "ttl": 9}, "ttl"),
        ({"prompt": "a", "stream": True}, "stream"),
    ],
)
async def test_bad_input(service: Service, body: object, param: str) -> None:
    await service.refused(PATH, body, param)


async def test_what_is_not_there(service: Service) -> None:
    missing = f"{PATH}/nobody"
    for answer in (
        await get(service, missing, 404),
        await get(service, f"{missing}/content", 404),
        await delete(service, missing, 404),
        await service.post(f"{missing}/fork", {}, 404),
    ):
        assert "'nobody'" in error_message(answer, "id")
        assert answer["error"]["code"] == "state_not_found"
    answer = await service.post(PATH, {"prompt": "a", "state": "nobody"}, 404)
    assert "'nobody'" in error_message(answer, "state")


async def test_a_snapshot_is_given_away_and_nothing_kept(service: Service) -> None:
    made = await service.post(PATH, {"prompt": "abc", "return_state": "snapshot"})
    assert (made["id"], made["tokens"], made["tier"]) == (None, 3, None)
    assert made["bytes"] == service.runner.info.state_bytes
    state = {"snapshot": made["snapshot"]}
    assert await text_after(service, state) == "def"
    assert await text_after(service, state, "x") == "yz"
    await kept(service, [])


async def test_a_key_has_so_many_states(byte_folder: Path) -> None:
    async with running(fake_runner(byte_folder, host_rows=8, max_states=2)) as service:
        for name in ("a", "b"):
            await service.post(PATH, {"prompt": "x", "id": name})
        answer = await service.post(PATH, {"prompt": "x", "id": "c"}, 429)
        assert answer["error"]["code"] == "state_quota"
        await service.post(f"{PATH}/a/fork", {}, 429)
        body = {"prompts": ["x"], "max_tokens": 1, "return_state": True}
        await service.refused("/v1/generate", body, None, 429)
        body = {"prompts": ["x"], "max_tokens": 1, "session_id": "new"}
        await service.refused("/v1/generate", body, None, 429)
        await service.post(PATH, {"prompt": "y", "id": "b"})  # in the place of another
        await delete(service, f"{PATH}/a")
        await service.post(PATH, {"prompt": "x", "id": "c"})


async def test_states_belong_to_a_keys_name(byte_folder: Path) -> None:
    keys = "ann:0123456789abcdefA,bob:0123456789abcdefB"
    runner = fake_runner(byte_folder, host_rows=8)
    async with running(runner, api_keys=keys) as service:
        ann, bob = ({"x-api-key": f"0123456789abcdef{name}"} for name in "AB")

        async def ask(method: str, path: str, headers: Any, body: Any = None) -> Any:
            return await service.http.request(method, path, headers=headers, json=body)

        assert (await ask("GET", PATH, {})).status_code == 401
        made = await ask("POST", PATH, ann, {"prompt": "abc", "id": "mine"})
        assert made.status_code == 200
        for method, path in (("GET", "mine"), ("GET", "mine/content"), ("DELETE", "mine")):
            assert (await ask(method, f"{PATH}/{path}", bob)).status_code == 404
        assert (await ask("GET", PATH, bob)).json()["data"] == []
        body = {"prompts": ["x"], "state": "mine"}
        assert (await ask("POST", "/v1/generate", bob, body)).status_code == 404
        # An id is one's own.
        await ask("POST", PATH, bob, {"prompt": "x", "id": "mine"})
        assert (await ask("GET", f"{PATH}/mine", ann)).json()["tokens"] == 3
        assert (await ask("GET", f"{PATH}/mine", bob)).json()["tokens"] == 1


async def test_the_schema_describes_them(service: Service) -> None:
    paths = (await get(service, "/openapi.json"))["paths"]
    assert set(paths[PATH]) == {"get", "post"}
    assert set(paths[f"{PATH}/{{id}}"]) == {"get", "delete"}
    names = {one["name"] for one in paths[PATH]["get"]["parameters"]}
    assert names == {"after", "limit"}
    upload = paths[f"{PATH}/import"]["post"]["requestBody"]["content"]
    assert set(upload) == {"application/octet-stream"}
    download = paths[f"{PATH}/{{id}}/content"]["get"]["responses"]["200"]["content"]
    assert set(download) == {"application/octet-stream"}
    assert "text/plain" in paths[f"{PATH}/text"]["post"]["requestBody"]["content"]
