"""Several engines behind one port: whatever is asked, they answer as one would."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from engine.client.client import EngineClient
from engine.client.router import EngineRouter
from engine.engine import Engine
from engine.inline import InlineTransport
from engine.protocol.events import ModelInfo
from engine.protocol.placement import engine_of_state
from engine.supervisor.supervisor_client import Event, Serving
from service.app.app import create_app
from service.settings import Settings
from tests.service.harness import Service, fake_runner, http_client, until

GENERATE, STATES = "/v1/generate", "/v1/states"
GREEDY = {"temperature": 0, "ignore_eos": True}


class Together:
    """Engines that serve from the start; `seat` tells of others."""

    def __init__(self, clients: list[EngineClient], count: int) -> None:
        self.clients = clients
        self._count = count
        self.events: asyncio.Queue[Event] = asyncio.Queue()
        self.left: list[int] = []
        self.router: EngineRouter | None = None

    async def start(self, collect: Any) -> None:
        for client in self.clients:
            await client.start()
            await client.ready()
        self.seat(*range(self._count))

    def seat(self, *numbers: int | None) -> None:
        clients = [None if number is None else self.clients[number] for number in numbers]
        there = tuple(number for number in numbers if number is not None)
        self.router = EngineRouter(clients, before=self.router)
        self.events.put_nowait(Serving(self.router, there))

    async def next(self) -> Event:
        return await self.events.get()

    def use(self, generation: int) -> None:
        pass

    async def leave(self, generation: int) -> None:
        self.left.append(generation)

    async def reload(self, model: str | None) -> ModelInfo:
        raise NotImplementedError

    async def gather(self, own: bytes) -> list[bytes]:
        return []

    def hold(self) -> None:
        pass

    async def close(self) -> None:
        for client in self.clients:
            await client.close()


@asynccontextmanager
async def together(
    folder: Path,
    count: int,
    spare: int = 0,
    max_waiting: int = 64,
    session_header: str | None = None,
    **options: Any,
) -> AsyncIterator[tuple[Service, Together]]:
    """So many engines serve; `spare` are there beside them, for the first ranks."""
    outside: dict[bytes, list[int]] = {}
    clients = []
    for number in range(count + spare):
        runner = fake_runner(
            folder, engines=count, rank=number % count, max_waiting=max_waiting, **options
        )
        runner.outside = outside
        clients.append(EngineClient(InlineTransport(Engine(runner))))
    script = Together(clients, count)
    settings = Settings(
        model="fake", engines=count, max_waiting=max_waiting, session_header=session_header
    )
    app = create_app(script, settings)
    async with app.router.lifespan_context(app), http_client(app) as http:
        service = Service(app, http, None, None)  # type: ignore[arg-type]
        await until(lambda: service.lifecycle.state == "ready")
        yield service, script


async def counted(service: Service) -> float:
    """Generated tokens."""
    text = (await service.http.get("/metrics")).text
    (count,) = re.findall(r"^minserve_generation_tokens_total (.*)$", text, re.M)
    return float(count)


async def test_a_copy_that_cannot_get_to_its_place_is_not_kept_elsewhere(byte_folder: Path) -> None:
    async with together(byte_folder, 2, step_seconds=0.01) as (service, script):
        name = next(
            n
            for n in "abcdef"
            if engine_of_state("", f"session:{n}", 2) != engine_of_state("", "one", 2)
        )
        await service.post(STATES, {"prompt": "a", "id": "one"})
        body = {"prompts": ["b"], "session_id": name, "max_tokens": 200, "stream": True, **GREEDY}
        turn = asyncio.create_task(service.http.post(GENERATE, json=body))
        await until(lambda: sum(client.stats.running for client in script.clients) == 1)
        copy = {"prompt": "z", "state": "one", "id": f"session:{name}"}
        for _ in range(2):
            answer = await service.http.post(STATES, json=copy)
            assert (answer.status_code, answer.json()["error"]["param"]) == (409, "id")
        assert (await turn).status_code == 200

        async def listed() -> list[str]:
            return [one["id"] for one in (await service.http.get(STATES)).json()["data"]]

        while len(await listed()) > 2:  # what was borrowed goes a moment later
            await asyncio.sleep(0.01)
        assert await listed() == ["one", f"session:{name}"]
        assert (await service.post(STATES, copy))["tokens"] == 2


async def conversation(service: Service) -> list[Any]:
    """All kinds of calls about states, and what is said of them but for ids and times."""
    said: list[Any] = []

    async def post(path: str, body: Any, status: int = 200) -> Any:
        answer = await service.post(path, body, status)
        for result in answer.get("results", [answer]):
            state = result.get("state", result) or {}
            known = state.get("id") if not str(state.get("id")).startswith("st_") else "new"
            told = {name: result.get(name) for name in ("text", "usage", "error", "finish_reason")}
            said.append((status, known, state.get("tokens"), told))
        return answer

    for name in "abcdef":
        await post(STATES, {"prompt": name, "id": name})
        turn = {"prompts": ["xy"], "session_id": name, "max_tokens": 3, **GREEDY}
        for _ in range(2):
            await post(GENERATE, turn)
        left = await post(
            GENERATE,
            {"prompts": ["q"], "state": name, "return_state": True, "max_tokens": 2, **GREEDY},
        )
        id = left["results"][0]["state"]["id"]
        await post(GENERATE, {"prompts": [""], "state": id, "max_tokens": 2, **GREEDY})
        for other in "uvw":
            await post(f"{STATES}/{name}/fork", {"id": f"{other}-{name}"})
            await post(STATES, {"prompt": "z", "state": name, "id": f"{other}{other}-{name}"})
            body = {"prompts": [""], "state": f"{other}{other}-{name}", "max_tokens": 2, **GREEDY}
            await post(GENERATE, body)
        both = {"prompt": "z", "state": name, "id": f"both-{name}", "return_state": "snapshot"}
        snapshot = (await post(STATES, both))["snapshot"]
        body = {"prompts": ["", "a"], "state": {"snapshot": snapshot}, "max_tokens": 2, **GREEDY}
        await post(GENERATE, body)
        text = await service.http.post(f"{STATES}/text?state={name}&id=text-{name}", content=b"123")
        said.append((text.status_code, text.json()["id"], text.json()["tokens"]))
        file = (await service.http.get(f"{STATES}/text-{name}/content")).content
        for target in (f"?id=file-{name}", ""):
            taken = await service.http.post(
                f"{STATES}/import{target}",
                content=file,
                headers={"content-type": "application/octet-stream"},
            )
            said.append((taken.status_code, taken.json()["tokens"]))
        await service.http.delete(f"{STATES}/u-{name}")
    await post(GENERATE, {"prompts": ["a"], "state": "nobody", "max_tokens": 1}, 404)
    await post(f"{STATES}/nobody/fork", {"id": "x"}, 404)
    after, pages = "", []
    while True:
        params = {"limit": 7, **({"after": after} if after else {})}
        page = (await service.http.get(STATES, params=params)).json()
        pages += [one["id"] for one in page["data"]]
        if not page["has_more"]:
            break
        after = page["last_id"]
    said.append([id for id in pages if not id.startswith("st_")])
    return said


@pytest.mark.parametrize("count", [2, 3])
async def test_all_about_states_is_as_with_one_engine(byte_folder: Path, count: int) -> None:
    options = {"share_slots": 256}
    async with together(byte_folder, 1, **options) as (service, _):
        expected = await conversation(service)
    async with together(byte_folder, count, **options) as (service, script):
        assert await conversation(service) == expected
        assert all(client.event_messages > 1 for client in script.clients)  # one greets


async def test_a_batch_is_shared_and_counted_whole(byte_folder: Path) -> None:
    async with together(byte_folder, 3, slots=4, step_seconds=0.002) as (service, script):
        prompts = [f"{number}a" for number in range(12)]
        body = {"prompts": prompts, "max_tokens": 5, **GREEDY}
        results = (await service.post(GENERATE, body))["results"]
        assert [one["text"] for one in results] == ["bcdef"] * 12
        assert [one["index"] for one in results] == list(range(12))
        frames = await service.stream(GENERATE, body)
        texts = {index: "" for index in range(12)}
        for frame in frames:
            if "index" in frame:
                texts[frame["index"]] += frame.get("text", "")
        assert set(texts.values()) == {"bcdef"}
        assert all(client.event_messages > 1 for client in script.clients)  # one greets
        text = (await service.http.get("/metrics")).text
        for line in (
            "minserve_generation_tokens_total 120.0",
            "minserve_state_slots_total 12.0",
            "minserve_engines_serving 3.0",
            "minserve_engines 3.0",
        ):
            assert line in text.splitlines()
        asking = asyncio.create_task(service.post(GENERATE, {**body, "max_tokens": 200}))
        await until(lambda: sum(client.in_flight for client in script.clients) == 12)
        text = (await service.http.get("/metrics")).text
        for rank in range(3):
            assert f'minserve_engine_requests{{engine="{rank}"}} 4.0' in text.splitlines()
        await asking


async def test_a_batch_is_refused_by_what_all_hold(byte_folder: Path) -> None:
    options = {"slots": 2}
    async with together(byte_folder, 2, max_waiting=1, **options) as (service, script):
        body = {"prompts": ["a"] * 7, "max_tokens": 1}
        assert "this server holds at most 6" in await service.refused(GENERATE, body, None)
        lines = (await service.http.get("/metrics")).text.splitlines()
        assert "minserve_requests_waiting_limit 2.0" in lines
        await service.post(STATES, {"prompt": "a", "id": "one"})
        kept = {"prompts": ["a"] * 4, "max_tokens": 1, "state": "one"}
        told = await service.refused(GENERATE, kept, None)
        assert "the engine that keeps their state holds at most 3" in told
        scored = {"texts": ["ab"] * 4, "state": "one"}
        assert "holds at most 3" in await service.refused("/v1/score", scored, None)
        # While one is missing there is no room for what there will be room for.
        script.seat(None, 1)
        await until(lambda: len(service.lifecycle.runtime.backend.clients) == 1)
        body = {"prompts": ["a"] * 5, "max_tokens": 1}
        refused = await service.http.post(GENERATE, json=body)
        assert (refused.status_code, int(refused.headers["retry-after"]) >= 1) == (503, True)
        assert (
            "room for all 5 prompts is not available right now"
            in refused.json()["error"]["message"]
        )
        lines = (await service.http.get("/metrics")).text.splitlines()
        assert "minserve_requests_waiting_limit 1.0" in lines
        script.seat(0, 1)
        await until(lambda: len(service.lifecycle.runtime.backend.clients) == 2)
        await service.post(GENERATE, body)


async def test_one_that_leaves_and_comes_back_is_noticed_by_its_own_requests_alone(
    byte_folder: Path,
) -> None:
    options = {"step_seconds": 0.005, "share_slots": 32}
    async with together(byte_folder, 2, spare=1, **options) as (service, script):
        service.lifecycle.runtime.loaded_at = 5
        tokenizer = service.lifecycle.runtime.tokenizer
        body = {"max_tokens": 100, "stream": True, **GREEDY}

        async def stream(prompt: str) -> str:
            return (await service.http.post(GENERATE, json={"prompts": [prompt], **body})).text

        streams = [asyncio.create_task(stream(f"{number}a")) for number in range(8)]
        await until(lambda: sum(client.stats.running for client in script.clients) == 8)
        theirs = script.clients[0].in_flight
        assert 0 < theirs < 8
        await script.clients[0].close()
        script.seat(None, 1)
        await until(lambda: len(service.lifecycle.runtime.backend.clients) == 1)
        assert "minserve_engines_serving 1.0" in (await service.http.get("/metrics")).text
        assert (await service.http.get("/ready")).status_code == 200
        assert (await service.post(GENERATE, {"prompts": ["a"], "max_tokens": 2, **GREEDY}))[
            "results"
        ][0]["text"] == "bc"
        for name in "abcdef":
            answer = await service.http.post(STATES, json={"prompt": name, "id": name})
            assert answer.status_code in (200, 503)
            if answer.status_code == 503:
                assert "is not available right now" in answer.json()["error"]["message"]
                assert int(answer.headers["retry-after"]) >= 1
        assert (await service.http.get(STATES)).status_code == 503  # a part would be no list
        script.seat(2, 1)
        await until(lambda: len(service.lifecycle.runtime.backend.clients) == 2)
        for name in "abcdef":
            await service.post(STATES, {"prompt": name, "id": name})
        ended = await asyncio.gather(*streams)
        assert sum('"finish_reason":"abort"' in text for text in ended) == theirs
        assert sum('"finish_reason":"length"' in text for text in ended) == 8 - theirs
        await until(lambda: script.left == [0])
        runtime = service.lifecycle.runtime
        assert runtime.tokenizer is tokenizer  # of the same model
        assert (await service.http.get("/v1/models")).json()["data"][0]["created"] == 5
        before = await counted(service)
        await service.post(GENERATE, {"prompts": ["a", "b", "c"], "max_tokens": 7, **GREEDY})
        assert await counted(service) == before + 21  # each engine's tokens once
