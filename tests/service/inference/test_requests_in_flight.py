"""What waits for the end of everything in flight goes on when the last request leaves."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from engine.client.client import EngineClient
from engine.protocol.state_calls import StateAction, StateReply
from service.inference.inference_request import RequestsInFlight
from tests.service.harness import fake_runner, running, until
from tests.service.inference.test_lifecycle import GENERATE, Connection
from tests.service.inference.test_switch import SHORT, switching


async def turns() -> None:
    """A few of the event loop's, in which no clock moves anything."""
    for _ in range(20):
        await asyncio.sleep(0)


async def test_who_waits_is_woken_by_the_last_to_leave() -> None:
    requests = RequestsInFlight()
    await requests.ended()  # there are none
    one, other, late = (_request(name) for name in ("one", "other", "late"))
    requests.update((one, other))
    waiting = [asyncio.create_task(requests.ended()) for _ in range(2)]
    await turns()
    requests.leave(one)
    await turns()
    assert not any(task.done() for task in waiting)
    requests.leave(other)
    requests.add(late)  # before they have had their turn
    await turns()
    assert not any(task.done() for task in waiting)
    waiting.append(asyncio.create_task(requests.ended()))
    await turns()
    requests.leave(late)
    await turns()
    assert all(task.done() for task in waiting) and not requests


async def test_a_wait_that_is_given_up_changes_nothing_for_others() -> None:
    requests = RequestsInFlight()
    request = _request("one")
    requests.add(request)
    given_up, waiting = (asyncio.create_task(requests.ended()) for _ in range(2))
    await turns()
    given_up.cancel()
    await turns()
    assert not waiting.done()
    requests.leave(request)
    await turns()
    assert waiting.done() and given_up.cancelled()


def _request(name: str) -> Any:
    """Anything that can be told from others."""
    return name


@pytest.mark.parametrize("busy", [1, 3])
async def test_a_drain_is_over_with_its_last_request(byte_folder: Path, busy: int) -> None:
    async with running(fake_runner(byte_folder)) as service:
        held = [Connection(GENERATE, SHORT) for _ in range(busy)]
        for connection in held:
            connection.uploaded.clear()
        answers = [
            asyncio.create_task(service.app(one.scope, one.receive, one.send)) for one in held
        ]
        await until(lambda: len(service.lifecycle.requests) == busy)
        drain = asyncio.create_task(service.lifecycle.drain(timeout=30))
        for connection, answer in zip(held, answers, strict=True):
            await turns()
            assert not drain.done()
            connection.uploaded.set()
            await answer
        await turns()
        assert drain.done()


async def test_an_engine_is_left_with_its_last_request(byte_folder: Path) -> None:
    async with switching() as (service, script):
        await script.serve("old", byte_folder)
        await until(lambda: script.used == [0])
        connection = Connection(GENERATE, SHORT)
        connection.uploaded.clear()
        answer = asyncio.create_task(
            service.app(connection.scope, connection.receive, connection.send)
        )
        await until(lambda: service.lifecycle.requests)
        await script.serve("new", byte_folder)
        await until(lambda: script.used == [0, 1])
        assert script.left == []
        connection.uploaded.set()
        await answer
        await turns()
        assert script.left == [0]


@pytest.mark.parametrize("ends", ["drain", "switch"])
async def test_a_state_that_was_brought_along_is_given_back_first(
    byte_folder: Path, ends: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before a drain is over, and before the engine that has the state is left."""
    may_delete = asyncio.Event()
    ask_state = EngineClient.ask_state
    deleted = []

    async def slowly(self: EngineClient, action: StateAction, **fields: Any) -> StateReply:
        if action != "delete":
            return await ask_state(self, action, **fields)
        await may_delete.wait()
        reply = await ask_state(self, action, **fields)
        deleted.append(reply)
        return reply

    monkeypatch.setattr(EngineClient, "ask_state", slowly)
    async with switching() as (service, script):
        client = await script.serve("old", byte_folder, host_rows=8)
        await until(lambda: script.used == [0])
        made = await service.post("/v1/states", {"prompt": "abc", "return_state": "snapshot"})
        body = {**SHORT, "prompts": [""], "state": {"snapshot": made["snapshot"]}}
        await service.post(GENERATE, body)
        assert not service.lifecycle.requests and client.stats.load().states == 1
        if ends == "drain":
            ending = asyncio.create_task(service.lifecycle.drain(timeout=30))
        else:
            await script.serve("new", byte_folder)
            await until(lambda: script.used == [0, 1])
            ending = asyncio.create_task(until(lambda: script.left == [0]))
        await asyncio.sleep(0.1)
        assert not ending.done() and script.left == []
        may_delete.set()
        await asyncio.wait_for(ending, 10)
        assert len(deleted) == 1


async def test_a_drain_does_not_wait_for_an_engine_that_does_not_answer(
    byte_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No longer than for requests."""
    requests = RequestsInFlight()
    never: asyncio.Event = asyncio.Event()

    async def work() -> None:
        await never.wait()

    async with running(fake_runner(byte_folder)) as service:
        monkeypatch.setattr(service.lifecycle.runtime, "requests", requests)
        requests.follow_up(work())
        await asyncio.wait_for(service.lifecycle.drain(timeout=0.05), 10)
        assert not requests.all_ended
        never.set()
        await asyncio.wait_for(requests.ended(), 10)


async def test_follow_ups_that_fail_hold_nothing_up() -> None:
    requests = RequestsInFlight()

    async def fail() -> None:
        raise RuntimeError("not told to anybody")

    requests.follow_up(fail())
    asyncio.get_running_loop().set_exception_handler(lambda *_: None)
    await asyncio.wait_for(requests.ended(), 10)
    assert requests.all_ended
