"""The supervisor's decisions where several engines serve together."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from msgspec import structs

from engine.config import EngineConfig
from engine.errors import CheckpointError, ConfigError, EngineError, EngineLoading
from engine.supervisor.channel import MemoryPipe
from engine.supervisor.control_messages import Down, Left, Serve, Using
from engine.supervisor.supervisor import Supervisor, SupervisorConfig
from tests.engine.supervisor.test_supervisor import (
    Engines,
    FakeProcess,
    settle,
    supervising,
    told,
    until,
)


def served(messages: list[Any]) -> list[list[int]]:
    """The engines that an API process is told of, 0 for one that is missing, at each change."""
    orders = [one for one in messages if isinstance(one, Serve)]
    found = [
        [0 if one_engine is None else one_engine.generation for one_engine in one.endpoints]
        for one in orders
    ]
    return [one for one, _ in itertools.groupby(found)]


@asynccontextmanager
async def two(
    monkeypatch: pytest.MonkeyPatch, **rules: Any
) -> AsyncIterator[tuple[Engines, asyncio.Task[EngineError], MemoryPipe]]:
    """Engines that serve, and an API process."""
    async with supervising(monkeypatch, count=2, **rules) as (engines, task):
        api = engines.join()
        for number in range(2):
            await engines.load(number)
        yield engines, task, api


def test_a_gpu_of_a_number_is_no_gpu_for_each() -> None:
    with pytest.raises(ConfigError, match='allowed: "auto", "cpu" or "cuda" with several engines'):
        Supervisor(EngineConfig(device="cuda:0", engines=2), SupervisorConfig())


async def test_they_serve_when_all_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    async with supervising(monkeypatch, count=3) as (engines, _):
        api = engines.join()
        await until(lambda: len(FakeProcess.all) == 3)
        assert [one.config.rank for one in FakeProcess.all] == [0, 1, 2]
        assert {one.config.engines for one in FakeProcess.all} == {3}
        await engines.load(2)
        await engines.load(0)
        assert told(api) == []
        await engines.load(1)
        for one in (api, engines.join()):
            assert served(told(one)) == [[1, 2, 3]]


async def test_where_one_cannot_be_loaded_none_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    async with supervising(monkeypatch, count=3) as (engines, task):
        api = engines.join()
        first = await engines.load(0)
        await engines.load(1, CheckpointError("no weights"))
        assert isinstance(await task, CheckpointError)
        (down,) = told(api)
        assert down.final and first.closed and FakeProcess.all[2].closed


async def test_the_others_go_on_when_one_dies(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with two(monkeypatch, restarts=1) as (engines, task, api):
        FakeProcess.all[1].die()
        await until(lambda: len(FakeProcess.all) == 3)
        assert FakeProcess.all[2].config.rank == 1
        messages = told(api)
        assert served(messages) == [[1, 2], [1, 0]]
        downs = [one for one in messages if isinstance(one, Down)]
        assert {(one.generation, one.current, one.final) for one in downs} == {(2, False, False)}
        await engines.load(2)
        (order,) = told(api)
        assert served([order]) == [[1, 3]] and order.restarts == 1
        # Each may be started again as often; one that may not leaves the others.
        FakeProcess.all[2].die()
        await settle()
        messages = told(api)
        assert served(messages) == [[1, 0]]
        waits = [one.waits for one in messages if isinstance(one, Serve)]
        assert all(wait[0] == 0 for wait in waits)
        assert 6 < waits[0][1] <= 7  # as long as a load took
        assert 590 < waits[-1][1] <= 607  # when its time has room, and then
        assert "it is tried again in 600 s" in caplog.text
        FakeProcess.all[0].die("killed too")
        await settle()
        assert [one.current for one in told(api)] == [True, True]
        await engines.load(3)
        assert served(told(api)) == [[4, 0]]
        FakeProcess.all[3].die("killed again")
        assert "killed again, after 1 restart" in (await task).message
        assert told(api)[-1].final


async def test_one_that_was_given_up_is_tried_again_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with two(monkeypatch, restarts=1, window=0.2) as (engines, _, api):
        FakeProcess.all[0].die()
        (await engines.load(2)).die()
        assert len(FakeProcess.all) == 3
        assert (await engines.load(3)).rank == 0
        assert served(told(api)) == [[1, 2], [0, 2], [3, 2], [0, 2], [4, 2]]


async def test_a_server_that_shuts_down_loses_no_engine_that_has_taken_a_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A reload was quicker than a start that was to wait."""
    async with two(monkeypatch, restarts=3) as (engines, task, api):
        FakeProcess.all[0].die()
        (await engines.load(2)).die()  # now the next one waits for a second
        await settle()
        reload = asyncio.create_task(engines.supervisor.reload("two"))
        for number in (3, 4):
            await engines.load(number)
        api.send(Using(5))
        await reload
        engines.supervisor.hold()
        await asyncio.sleep(1.1)
        assert len(FakeProcess.all) == 5
        FakeProcess.all[4].die()
        await settle()
        assert not task.done() and served(told(api))[-1] == [4, 0]


async def test_one_that_was_being_started_gives_way_to_a_reload(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with two(monkeypatch) as (engines, _, api):
        FakeProcess.all[0].die()
        await until(lambda: len(FakeProcess.all) == 3)  # is being started
        reload = asyncio.create_task(engines.supervisor.reload("two"))
        for number in (3, 4):
            await engines.load(number)
        api.send(Using(5))
        await reload
        assert (await engines.load(2)).closed
        assert served(told(api)) == [[1, 2], [0, 2], [4, 5]]


async def test_a_reload_that_fails_costs_no_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """It came while the start, which was allowed, was to wait."""
    async with two(monkeypatch, restarts=2) as (engines, _, api):
        FakeProcess.all[0].die()
        (await engines.load(2)).die()  # now the next one waits for a second
        await settle()
        reload = asyncio.create_task(engines.supervisor.reload("two"))
        await engines.load(3, CheckpointError("no such folder"))
        with pytest.raises(CheckpointError):
            await reload
        assert (await engines.load(5)).config.model == "one"
        order = [one for one in told(api) if isinstance(one, Serve)][-1]
        assert served([order]) == [[6, 2]] and order.restarts == 2


async def test_one_that_is_never_started_again_is_told_to_be_away_for_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with two(monkeypatch, restarts=0) as (engines, _, api):
        FakeProcess.all[0].die()
        await settle()
        for one in (api, engines.join()):
            order = [said for said in told(one) if isinstance(said, Serve)][-1]
            assert served([order]) == [[0, 2]] and order.waits[0] > 600


async def test_another_model_does_not_join_those_that_serve(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The folder has been written to since they were loaded."""
    async with two(monkeypatch, restarts=1) as (engines, _, api):
        FakeProcess.all[0].die()
        await until(lambda: len(FakeProcess.all) == 3)
        FakeProcess.all[2].info = structs.replace(FakeProcess.all[2].info, fingerprint="another")
        await engines.load(2)
        assert FakeProcess.all[2].closed
        assert served(told(api)) == [[1, 2], [0, 2]]
        assert "engine 0 of 2: " in caplog.text and "is another model now" in caplog.text
        reload = asyncio.create_task(engines.supervisor.reload(None))
        await until(lambda: len(FakeProcess.all) == 5)
        for number in (3, 4):
            FakeProcess.all[number].info = structs.replace(
                FakeProcess.all[0].info, fingerprint="another"
            )
            await engines.load(number)
        assert served(told(api)) == [[4, 5]]
        api.send(Using(5))
        assert (await reload).fingerprint == "another"


async def test_a_reload_takes_the_place_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    async with two(monkeypatch) as (engines, _, api):
        reload = asyncio.create_task(engines.supervisor.reload("two"))
        await engines.load(2)
        assert served(told(api)) == [[1, 2]]
        await engines.load(3)
        assert served(told(api)) == [[3, 4]]
        assert [one.config.model for one in FakeProcess.all] == ["one", "one", "two", "two"]
        await settle()
        assert not reload.done()
        api.send(Using(4))
        await reload
        assert not FakeProcess.all[0].closed
        api.send(Left(1))
        await until(lambda: FakeProcess.all[0].closed)
        assert not FakeProcess.all[1].closed
        api.send(Left(2))
        await until(lambda: FakeProcess.all[1].closed)


async def test_a_reload_that_fails_in_part_changes_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with two(monkeypatch) as (engines, _, api):
        reload = asyncio.create_task(engines.supervisor.reload("two"))
        await engines.load(2)
        await engines.load(3, CheckpointError("no memory"))
        with pytest.raises(CheckpointError, match="no memory"):
            await reload
        assert FakeProcess.all[2].closed and FakeProcess.all[0].serves and FakeProcess.all[1].serves
        assert served(told(api)) == [[1, 2]]
        FakeProcess.all[1].die()
        again = await engines.load(4)
        assert (again.config.model, again.config.rank) == ("one", 1)


async def test_engines_of_different_models_do_not_begin_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with supervising(monkeypatch, count=2) as (engines, task):
        await until(lambda: len(FakeProcess.all) == 2)
        FakeProcess.all[0].info = structs.replace(FakeProcess.all[0].info, fingerprint="another")
        for number in range(2):
            await engines.load(number)
        assert "changed while it was being loaded" in (await task).message
        assert all(one.closed for one in FakeProcess.all)


@pytest.mark.parametrize("fails", [False, True])
async def test_one_that_dies_during_a_reload_waits_for_it(
    monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    async with two(monkeypatch) as (engines, _, api):
        reload = asyncio.create_task(engines.supervisor.reload("two"))
        await until(lambda: len(FakeProcess.all) == 4)
        FakeProcess.all[0].die()
        await settle()
        assert len(FakeProcess.all) == 4
        await engines.load(2)
        await engines.load(3, CheckpointError("no memory") if fails else None)
        if fails:
            with pytest.raises(CheckpointError):
                await reload
            assert (await engines.load(4)).config.model == "one"
            assert served(told(api)) == [[1, 2], [0, 2], [5, 2]]
        else:
            api.send(Using(4))
            await reload
            assert served(told(api)) == [[1, 2], [0, 2], [3, 4]]
            assert len(FakeProcess.all) == 4


async def test_a_reload_needs_one_that_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    async with two(monkeypatch) as (engines, *_):
        FakeProcess.all[0].die()
        FakeProcess.all[1].die()
        await settle()
        with pytest.raises(EngineLoading):
            await engines.supervisor.reload("two")


async def test_all_end_with_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    async with two(monkeypatch) as (engines, *_):
        engines.supervisor.hold()
        FakeProcess.all[0].die()  # is not started again
        await settle()
        assert len(FakeProcess.all) == 2 and FakeProcess.all[1].serves
    assert all(one.closed for one in FakeProcess.all)
