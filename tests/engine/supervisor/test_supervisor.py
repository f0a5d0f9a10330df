"""The supervisor's decisions: engines do what a test says, and API processes are ends of memory
pipes."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from engine.config import EngineConfig
from engine.errors import (
    CheckpointError,
    Draining,
    EngineDead,
    EngineError,
    EngineLoading,
    ReloadUnderWay,
)
from engine.protocol.events import ModelInfo
from engine.supervisor import api_process_pool as pool_module
from engine.supervisor import supervisor as supervisor_module
from engine.supervisor.api_process_pool import ApiProcessPool, Command
from engine.supervisor.channel import MemoryPipe, memory_pipe
from engine.supervisor.control_messages import (
    Call,
    Down,
    EngineEndpoint,
    Left,
    Reply,
    Serve,
    Using,
    Welcome,
)
from engine.supervisor.supervisor import Supervisor, SupervisorConfig
from engine.supervisor.supervisor_client import NoEngine, SupervisorClient
from tests.engine.fake import FakeRunner


class FakeProcess:
    """An engine that loads when it is let, and dies when it is told to."""

    all: list[FakeProcess]

    def __init__(self, generation: int, config: EngineConfig, engine: str | None) -> None:
        self.generation, self.config = generation, config
        self.info = FakeRunner().info
        self.load_seconds = 7.0
        self.loaded: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.dead: asyncio.Future[EngineError] = asyncio.get_running_loop().create_future()
        self.closed = False
        self.forgotten: list[str] = []
        FakeProcess.all.append(self)

    @property
    def serves(self) -> bool:
        return self.loaded.done() and not self.dead.done() and not self.closed

    @property
    def rank(self) -> int:
        return self.config.rank

    @property
    def endpoint(self) -> EngineEndpoint:
        return EngineEndpoint(self.generation, f"ipc://{self.generation}")

    async def load(self, timeout: float) -> None:
        await asyncio.shield(self.loaded)

    async def death(self, hang_timeout: float) -> EngineError:
        return await asyncio.shield(self.dead)

    def forget(self, name: str) -> None:
        self.forgotten.append(name)

    async def close(self) -> None:
        self.closed = True
        if not self.dead.done():
            self.dead.set_result(EngineDead("it was closed"))

    def die(self, reason: str = "killed") -> None:
        self.dead.set_result(EngineDead(reason))


class Engines:
    """The engines of one supervisor, and its API processes' ends of their pipes."""

    def __init__(self, supervisor: Supervisor) -> None:
        self.supervisor = supervisor

    def join(self) -> MemoryPipe:
        mine, theirs = memory_pipe()
        self.supervisor.join(theirs)
        return mine

    async def load(self, number: int, error: EngineError | None = None) -> FakeProcess:
        """Lets the engine of this number load, once it was begun."""
        await until(lambda: len(FakeProcess.all) > number)
        engine = FakeProcess.all[number]
        if error is None:
            engine.loaded.set_result(None)
        else:
            engine.loaded.set_exception(error)
        await settle()
        return engine


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def until(condition: Any) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.001)


def told(pipe: MemoryPipe) -> list[Any]:
    """What has come, but for the welcome."""
    messages = []
    while not pipe._inbox.empty():
        messages.append(pipe._inbox.get_nowait())
    return [one for one in messages if not isinstance(one, Welcome)]


@contextlib.asynccontextmanager
async def supervising(
    monkeypatch: pytest.MonkeyPatch,
    check: Any = None,
    fold: Any = None,
    count: int = 1,
    **rules: Any,
) -> AsyncIterator[tuple[Engines, asyncio.Task[EngineError]]]:
    monkeypatch.setattr(supervisor_module, "EngineProcess", FakeProcess)
    FakeProcess.all = []
    config = EngineConfig(model="one", engines=count)
    supervisor = Supervisor(config, SupervisorConfig(**rules), check=check, fold=fold)
    task = asyncio.create_task(supervisor.run())
    try:
        yield Engines(supervisor), task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await supervisor.close()
        assert all(engine.closed or not engine.loaded.done() for engine in FakeProcess.all)


async def test_api_processes_are_told_of_the_engine_whenever_they_join(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with supervising(monkeypatch) as (engines, _):
        early = engines.join()
        await settle()
        assert told(early) == []
        await engines.load(0)
        late = engines.join()
        for api in (early, late):
            (order,) = told(api)
            assert (order.generations, order.restarts) == ([1], 0)


async def test_a_first_engine_that_cannot_be_loaded_is_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with supervising(monkeypatch) as (engines, task):
        api = engines.join()
        await engines.load(0, CheckpointError("no weights"))
        assert isinstance(await task, CheckpointError)
        (down,) = told(api)
        assert down.final and isinstance(down.error.decode(), CheckpointError)
        assert len(FakeProcess.all) == 1


async def test_api_processes_hear_of_a_death_and_of_the_next_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with supervising(monkeypatch, restarts=1) as (engines, task):
        api = engines.join()
        (await engines.load(0)).die()
        await engines.load(1)
        first, *downs, second = told(api)
        assert (first.generations, second.generations, second.restarts) == ([1], [2], 1)
        assert downs and all(
            (down.generation, down.current, down.final) == (1, True, False) for down in downs
        )
        assert downs[-1].error.retry_after == 7  # as long as the load took
        FakeProcess.all[1].die("killed again")
        assert "killed again, after 1 restart" in (await task).message
        assert told(api)[-1].final


async def test_an_old_engine_ends_when_every_api_process_has_left_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with supervising(monkeypatch) as (engines, _):
        apis = [engines.join() for _ in range(3)]
        old = await engines.load(0)
        reload = asyncio.create_task(engines.supervisor.reload("two"))
        new = await engines.load(1)
        assert (old.config.model, new.config.model) == ("one", "two")
        assert not reload.done()
        for api in apis:
            api.send(Using(2))
        assert isinstance(await reload, ModelInfo)
        apis[0].send(Left(1))
        apis[1].send(Left(1))
        await settle()
        assert not old.closed
        apis[2].close()  # gone is gone
        await until(lambda: old.closed)
        assert new.forgotten == ["api-2"] and not new.closed
        new.die()
        again = await engines.load(2)
        assert again.config.model == "two"


async def test_a_reload_that_fails_leaves_all_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    unfit: list[str] = []

    async def check(info: ModelInfo) -> None:
        if unfit:
            raise CheckpointError(unfit[0])

    async with supervising(monkeypatch, check=check) as (engines, _):
        api = engines.join()
        with pytest.raises(EngineLoading):
            await engines.supervisor.reload(None)
        old = await engines.load(0)
        told(api)
        reload = asyncio.create_task(engines.supervisor.reload("two"))
        await settle()
        with pytest.raises(ReloadUnderWay):
            await engines.supervisor.reload(None)
        await engines.load(1, CheckpointError("no such folder"))
        with pytest.raises(CheckpointError, match="no such folder"):
            await reload
        unfit.append("no tokenizer")
        reload = asyncio.create_task(engines.supervisor.reload("two"))
        third = await engines.load(2)
        with pytest.raises(CheckpointError, match="no tokenizer"):
            await reload
        assert third.closed and old.serves and told(api) == []
        old.die()
        unfit.clear()
        assert (await engines.load(3)).config.model == "one"


async def test_a_reload_goes_on_when_who_asked_for_it_is_cancelled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with supervising(monkeypatch) as (engines, _):
        api = engines.join()
        old = await engines.load(0)
        for number, error in ((1, CheckpointError("no such folder")), (2, None)):
            reload = asyncio.create_task(engines.supervisor.reload("two"))
            await until(lambda count=number: len(FakeProcess.all) == count + 1)
            reload.cancel()
            with pytest.raises(asyncio.CancelledError):
                await reload
            with pytest.raises(ReloadUnderWay):
                await engines.supervisor.reload("three")
            assert old.serves and len(FakeProcess.all) == number + 1
            await engines.load(number, error)
        assert [one.generations for one in told(api) if isinstance(one, Serve)] == [[1], [3]]
        again = asyncio.create_task(engines.supervisor.reload("three"))
        assert (await engines.load(3)).config.model == "three"
        api.send(Using(4))
        await again


async def test_an_engine_that_dies_as_another_takes_its_place_is_told_of(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Both in one turn of the loop, in either order: what API processes have there must end."""
    for death_first in (True, False):
        async with supervising(monkeypatch) as (engines, _):
            api = engines.join()
            old = await engines.load(0)
            reload = asyncio.create_task(engines.supervisor.reload("two"))
            await until(lambda: len(FakeProcess.all) == 2)
            await settle()
            told(api)
            if death_first:
                old.die()
                FakeProcess.all[1].loaded.set_result(None)
            else:
                FakeProcess.all[1].loaded.set_result(None)
                old.die()
            api.send(Using(2))
            await reload
            await settle()
            messages = told(api)
            downs = [one for one in messages if isinstance(one, Down)]
            assert {one.generation for one in downs} == {1}
            for down in downs:  # another engine serves already, or will
                assert (down.error.retry_after is not None) == down.current
            assert [one.generations for one in messages if isinstance(one, Serve)] == [[2]]
            # Whoever reads them in order ends up with the new engine.
            last = next(
                one
                for one in reversed(messages)
                if isinstance(one, Serve) or (isinstance(one, Down) and one.current)
            )
            assert isinstance(last, Serve)
            assert len(FakeProcess.all) == 2  # nothing was started besides


async def test_a_death_during_a_reload_waits_for_what_is_being_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Memory may not suffice for a third engine."""
    for fails in (False, True):
        async with supervising(monkeypatch) as (engines, _):
            (await engines.load(0)).die()
            await engines.load(1)
            reload = asyncio.create_task(engines.supervisor.reload("two"))
            await until(lambda: len(FakeProcess.all) == 3)
            FakeProcess.all[1].die()
            await asyncio.sleep(0.05)
            assert len(FakeProcess.all) == 3
            await engines.load(2, CheckpointError("no such folder") if fails else None)
            await asyncio.gather(reload, return_exceptions=True)
            if not fails:
                assert FakeProcess.all[2].serves and len(FakeProcess.all) == 3
            else:
                assert (await engines.load(3)).config.model == "one"


async def test_while_it_shuts_down_nothing_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    async with supervising(monkeypatch) as (engines, task):
        old = await engines.load(0)
        reload = asyncio.create_task(engines.supervisor.reload("two"))
        await until(lambda: len(FakeProcess.all) == 2)
        engines.supervisor.hold()
        with pytest.raises(Draining):
            await reload
        assert FakeProcess.all[1].closed and old.serves
        with pytest.raises(Draining):
            await engines.supervisor.reload(None)
        old.die()
        assert "killed" in (await task).message
        assert len(FakeProcess.all) == 2


async def test_what_api_processes_count_is_gathered_and_never_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("engine.supervisor.api_registry.COLLECT_SECONDS", 0.2)

    def fold(samples: list[bytes]) -> bytes:
        return b"+".join(samples)

    async with supervising(monkeypatch, fold=fold) as (engines, _):
        asker, other, silent = (engines.join() for _ in range(3))
        told(asker)

        async def ask(number: int, own: bytes) -> list[bytes]:
            asker.send(Call(number, "gather", own=own))
            answer = await asker.receive()
            assert answer.id == number
            return sorted(answer.samples)

        async def answer(samples: bytes) -> None:
            while not isinstance(collect := await other.receive(), Call):
                pass
            other.send(Reply(collect.id, samples=[samples]))

        asking = asyncio.create_task(ask(1, b"mine"))
        await answer(b"other 1")
        assert await asking == [b"other 1"]  # the silent one is not waited for
        asking = asyncio.create_task(ask(2, b"mine"))
        assert await asking == [b"other 1"]  # as it told last
        other.close()
        silent.close()
        await settle()
        assert await ask(3, b"mine") == [b"other 1"]  # though it is no more
        asker.close()
        last = engines.join()
        await settle()
        told(last)
        last.send(Call(1, "gather"))
        assert (await last.receive()).samples == [b"other 1+mine"]


async def test_a_process_that_ends_again_and_again_is_given_up(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(pool_module, "LONGEST_WAIT", 0.01)
    supervisor = Supervisor(EngineConfig(), SupervisorConfig())
    command = Command("no.such.module", (), b"", ())
    processes = ApiProcessPool(supervisor, [command, command], hang=0)
    await asyncio.wait_for(processes.keep(), 60)
    assert "keeps ending right after its start (exit code 1)" in caplog.text
    await asyncio.wait_for(processes.finish(5), 60)
    await supervisor.close()


async def test_a_process_that_cannot_be_started_is_given_up(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(pool_module, "LONGEST_WAIT", 0.01)
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    supervisor = Supervisor(EngineConfig(), SupervisorConfig())
    processes = ApiProcessPool(supervisor, [Command("x", (), b"", ())], hang=0)
    await asyncio.wait_for(processes.keep(), 60)
    assert "/no/such/python: No such file" in caplog.text
    await processes.finish(5)
    await supervisor.close()


async def test_one_that_ends_again_and_again_does_not_end_a_steady_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(pool_module, "STEADY_SECONDS", 3.0)
    monkeypatch.setattr(pool_module, "LONGEST_WAIT", 1.0)
    (tmp_path / "steady_api.py").write_text("import time; time.sleep(600)")
    monkeypatch.syspath_prepend(tmp_path)
    supervisor = Supervisor(EngineConfig(), SupervisorConfig())
    commands = [Command(module, (), b"", ()) for module in ("steady_api", "no.such.module")]
    processes = ApiProcessPool(supervisor, commands, hang=0)
    keeping = asyncio.create_task(processes.keep())
    async with asyncio.timeout(60):
        while caplog.text.count("starting another") < pool_module.MOST_QUICK_ENDS + 1:
            await asyncio.sleep(0.05)
    assert not keeping.done()
    await asyncio.wait_for(processes.finish(0), 60)
    await asyncio.wait_for(keeping, 60)
    await supervisor.close()


async def test_calls_bring_back_values_and_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.supervisor.api_registry.COLLECT_SECONDS", 0.2)
    async with supervising(monkeypatch) as (engines, _):
        mine, theirs = memory_pipe()
        client = SupervisorClient(mine)
        await client.start(lambda: b"mine")
        name = engines.supervisor.join(theirs)
        with pytest.raises(EngineLoading, match="no engine serves"):
            await client.reload("two")
        assert await engines.supervisor.api_processes.answers(name, 10)
        other = engines.join()
        told(other)
        other.send(Call(7, "gather", own=b"theirs"))
        assert (await other.receive()) == Reply(7, samples=[b"mine"])
        assert await client.gather(b"mine too") == [b"theirs"]  # it does not answer, but has told
        told(other)  # the call that it has not answered
        other.send(Call(8, "collect"))
        assert (await other.receive()).error.code == EngineError.code
        await client.close()


async def test_a_call_that_is_open_when_the_other_end_goes_ends_with_it() -> None:
    mine, theirs = memory_pipe()
    client = SupervisorClient(mine)
    await client.start()
    waiting = [asyncio.create_task(client.reload("two")), asyncio.create_task(client.gather(b""))]
    assert {(await theirs.receive()).method for _ in waiting} == {"reload", "gather"}
    theirs.close()
    for task in waiting:
        with pytest.raises(EngineDead, match="the supervising process has ended"):
            await task
    assert isinstance(await client.next(), NoEngine)
    await client.close()
