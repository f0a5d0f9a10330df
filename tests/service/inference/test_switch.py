"""One application, one engine after the other: who is answered by which."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec

from engine.client.client import EngineClient
from engine.client.router import EngineRouter
from engine.engine import Engine
from engine.errors import EngineDead
from engine.inline import InlineTransport
from engine.protocol.events import ModelInfo
from engine.supervisor.supervisor_client import Event, NoEngine, Restarting, Serving
from service.app.app import create_app
from service.settings import Settings
from tests.service.harness import Service, error_message, fake_runner, http_client, until
from tests.service.inference.test_lifecycle import GENERATE, LONG, Connection

SHORT = {"prompts": ["a"], "max_tokens": 2, "temperature": 0}


class Script:
    """Engines that come and go as a test says."""

    def __init__(self) -> None:
        self.events: asyncio.Queue[Event] = asyncio.Queue()
        self.used: list[int] = []
        self.left: list[int] = []
        self.clients: list[EngineClient] = []

    async def start(self, collect: Callable[[], bytes]) -> None:
        assert isinstance(collect(), bytes)

    async def next(self) -> Event:
        return await self.events.get()

    def use(self, generation: int) -> None:
        self.used.append(generation)

    async def leave(self, generation: int) -> None:
        self.left.append(generation)
        await self.clients[generation].close()

    async def reload(self, model: str | None) -> ModelInfo:
        raise NotImplementedError

    async def gather(self, own: bytes) -> list[bytes]:
        return []

    def hold(self) -> None:
        """Nothing is ever started."""

    async def close(self) -> None:
        for client in self.clients:
            await client.close()

    async def serve(
        self, name: str, folder: Path, *, dead: bool = False, **options: Any
    ) -> EngineClient:
        """Tells of another engine, which may be dead by then."""
        runner = fake_runner(folder, **options)
        runner.info = msgspec.structs.replace(runner.info, name=name)
        client = EngineClient(InlineTransport(Engine(runner)))
        await client.start()
        self.clients.append(client)
        if dead:
            await client.close()
        self.events.put_nowait(Serving(EngineRouter([client]), (len(self.clients) - 1,)))
        return client


@asynccontextmanager
async def switching(on_failure: Any = None) -> AsyncIterator[tuple[Service, Script]]:
    script = Script()
    app = create_app(script, Settings(model="fake"), on_failure)
    async with app.router.lifespan_context(app), http_client(app) as http:
        yield Service(app, http, None, None), script  # type: ignore[arg-type]


async def test_a_request_keeps_the_model_that_it_began_with(byte_folder: Path) -> None:
    """From its arrival on, also while its body is on its way."""
    async with switching() as (service, script):
        await script.serve("old", byte_folder)
        await until(lambda: script.used == [0])
        connection = Connection(GENERATE, SHORT)
        connection.uploaded.clear()
        held = asyncio.create_task(
            service.app(connection.scope, connection.receive, connection.send)
        )
        await until(lambda: service.lifecycle.requests)
        await script.serve("new", byte_folder)
        await until(lambda: script.used == [0, 1])
        assert (await service.post(GENERATE, SHORT))["model"] == "new"
        assert script.left == []  # for one request it is needed
        connection.uploaded.set()
        await held
        answer = json.loads(connection.sent[1]["body"])
        assert (answer["model"], answer["results"][0]["text"]) == ("old", "bc")
        await until(lambda: script.left == [0])


async def test_a_drain_waits_for_what_an_old_engine_has_in_flight(byte_folder: Path) -> None:
    async with switching() as (service, script):
        await script.serve("old", byte_folder, step_seconds=0.002)
        await until(lambda: script.used == [0])
        held = asyncio.create_task(
            service.post(GENERATE, {**SHORT, "max_tokens": 100, "ignore_eos": True})
        )
        await until(lambda: service.lifecycle.requests)
        await script.serve("new", byte_folder)
        await until(lambda: script.used == [0, 1])
        await service.lifecycle.drain(timeout=30)
        (result,) = (await held)["results"]
        assert (len(result["token_ids"]), result["finish_reason"]) == (100, "length")


async def test_an_engine_that_is_dead_on_arrival_changes_nothing(byte_folder: Path) -> None:
    failures: list[Any] = []
    async with switching(failures.append) as (service, script):
        await script.serve("first", byte_folder)
        await until(lambda: script.used == [0])
        await script.serve("dead", byte_folder, dead=True)
        script.events.put_nowait(Restarting(EngineDead("it was killed")))
        await until(lambda: service.lifecycle.state == "restarting")
        assert (script.used, script.left) == ([0], [1])
        refused = await service.post(GENERATE, SHORT, 503)
        assert "it was killed; it is being started again" in error_message(refused, None)
        await script.serve("third", byte_folder)
        await until(lambda: service.lifecycle.state == "ready")
        assert (await service.post(GENERATE, SHORT))["model"] == "third"
        assert failures == []


async def test_gauges_are_of_the_engines_that_live(byte_folder: Path) -> None:
    async with switching() as (service, script):
        old = await script.serve("old", byte_folder, slots=2, step_seconds=0.002)
        await until(lambda: script.used == [0])
        held = asyncio.create_task(service.http.post(GENERATE, json={"prompts": ["a"], **LONG}))
        await until(lambda: service.lifecycle.load().running == 1)
        await script.serve("new", byte_folder, slots=3)
        await until(lambda: script.used == [0, 1])
        await service.post(GENERATE, SHORT)
        load = service.lifecycle.load()
        assert (load.running, load.slots_total) == (1, 2 + 3)
        await old.close()  # its last word is that it runs one
        assert (await held).status_code in (200, 503)
        await until(lambda: script.left == [0])
        load = service.lifecycle.load()
        assert (load.running, load.slots_total) == (0, 3)


async def test_when_there_is_no_engine_any_more(byte_folder: Path) -> None:
    failures: list[Any] = []
    async with switching(failures.append) as (service, script):
        await script.serve("old", byte_folder)
        await until(lambda: script.used == [0])
        script.events.put_nowait(Restarting(EngineDead("killed")))
        script.events.put_nowait(NoEngine(EngineDead("killed too often")))
        await until(lambda: failures)
        assert [error.message for error in failures] == ["killed too often"]
        for answer in (
            await service.http.get("/health"),
            await service.http.get("/ready"),
            await service.http.post(GENERATE, json=SHORT),
        ):
            assert answer.status_code == 503
            assert error_message(answer.json(), None) == "killed too often"
