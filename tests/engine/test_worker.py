"""The engine in a process of its own, with a fake runner: life, death and bad messages."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
import zmq.asyncio

import engine.client.socket_transport as transport_module
from engine.client.client import EngineClient
from engine.client.socket_transport import ProcessTransport
from engine.config import EngineConfig
from engine.errors import (
    CheckpointError,
    EngineDead,
    EngineError,
    EngineLoading,
    InvalidRequest,
    StepFailed,
)
from engine.protocol.events import FromEngine, Pong, Ready
from engine.protocol.requests import Ping, Request
from engine.protocol.sampling_params import SamplingParams
from engine.protocol.token_ids import pack_ids
from tests.engine.fake import recite

ROOT = Path(__file__).resolve().parents[2]
ENDLESS = SamplingParams(temperature=0, max_tokens=10**6, ignore_eos=True)
SHORT = SamplingParams(temperature=0, max_tokens=8)


IDS = itertools.count()


def ask(client: EngineClient, sampling: Any = SHORT, prompt: bytes = b"abc") -> Request:
    return Request(id=next(IDS), prompt=pack_ids(prompt), sampling=sampling)


async def answer(client: EngineClient, request: Request) -> list[int]:
    return [token async for update in client.submit(request) for token in update.tokens]


@contextlib.asynccontextmanager
async def working(
    engine: str = "fake_engine", wait: bool = True
) -> AsyncIterator[tuple[EngineClient, ProcessTransport]]:
    config = EngineConfig(model="no/such", max_slots=4)
    transport = ProcessTransport(config, engine=f"tests.engine.fake:{engine}")
    client = EngineClient(transport)
    await client.start()
    try:
        if wait:
            await client.ready(60)
        yield client, transport
    finally:
        await client.close()


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return False
    return state != "Z"


async def test_requests_are_served_and_the_process_ends_with_the_client() -> None:
    async with working() as (client, transport):
        answers = await asyncio.gather(
            *(answer(client, ask(client, prompt=bytes([i]))) for i in range(20))
        )
        assert answers == [recite(bytes([i]), 8) for i in range(20)]
        await client.ping(10)
        pid, address = transport.pid, transport.address
    assert pid is not None and not is_alive(pid)
    assert address is not None and not Path(address.removeprefix("ipc://")).parent.exists()


async def test_the_socket_is_private() -> None:
    async with working() as (_, transport):
        assert transport.address is not None
        folder = Path(transport.address.removeprefix("ipc://")).parent
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700


async def test_a_killed_worker_fails_every_request() -> None:
    async with working("slow_engine") as (client, transport):
        streams = [client.submit(ask(client, ENDLESS)) for _ in range(10)]
        await streams[0].next()
        assert transport.pid is not None
        os.kill(transport.pid, signal.SIGKILL)
        for stream in streams:
            with pytest.raises(EngineDead, match="SIGKILL"):
                async for _ in stream:
                    pass
        await asyncio.wait_for(client.wait_dead(), 10)
        assert client.state == "dead"
        with pytest.raises(EngineDead, match="SIGKILL"):
            client.submit(ask(client))
        with pytest.raises(EngineDead, match="SIGKILL"):
            await client.ping(10)


async def test_a_cuda_error_ends_the_process_after_everybody_is_told() -> None:
    async with working("cuda_error_engine") as (client, _):
        with pytest.raises(StepFailed, match="CUDA error"):
            await answer(client, ask(client))
        await asyncio.wait_for(client.wait_dead(), 30)
        with pytest.raises(EngineDead, match="exit code 1"):
            client.submit(ask(client))


async def test_ctrl_c_is_left_to_the_parent() -> None:
    async with working() as (client, transport):
        assert transport.pid is not None
        os.kill(transport.pid, signal.SIGINT)
        assert await answer(client, ask(client)) == recite(b"abc", 8)


@pytest.mark.parametrize(
    ("engine", "error", "message"),
    [
        ("missing_engine", CheckpointError, "no/such: no such folder"),
        ("crashing_engine", EngineError, "KeyError: 'weights'"),
    ],
)
async def test_a_failed_load_is_told_by_the_client_alone(
    engine: str, error: type[EngineError], message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    async with working(engine, wait=False) as (client, _):
        with pytest.raises(error, match=message) as caught:
            await client.ready(60)
        assert type(caught.value) is error
    assert capfd.readouterr().err == ""


async def test_while_it_loads_it_answers_and_can_be_stopped() -> None:
    async with working("stuck_engine", wait=False) as (client, transport):
        await client.ping(30)
        with pytest.raises(EngineLoading):
            await client.ready(0.01)
        assert client.state == "loading"
        pid = transport.pid
    assert pid is not None and not is_alive(pid)


async def test_values_of_a_wrong_type_fail_their_request_only() -> None:
    async with working() as (client, _):
        wrong = msgspec.structs.replace(SHORT, temperature="hot")
        with pytest.raises(InvalidRequest, match="temperature"):
            await answer(client, ask(client, wrong))
        huge = msgspec.structs.replace(SHORT, seed=2**70)
        with pytest.raises(InvalidRequest):
            await answer(client, ask(client, huge))
        assert await answer(client, ask(client)) == recite(b"abc", 8)


async def test_malformed_messages_harm_nobody_and_a_second_client_is_served() -> None:
    async with working("slow_engine") as (client, transport):
        reading = asyncio.create_task(answer(client, ask(client)))
        context = zmq.asyncio.Context()
        socket = context.socket(zmq.DEALER)
        socket.connect(transport.address)
        decoder = msgspec.msgpack.Decoder(FromEngine)
        bad = [
            b"",
            b"\xff\x00 no msgpack",
            msgspec.msgpack.encode(Ping(4)),
            msgspec.msgpack.encode([{"type": "Sudo"}]),
            msgspec.msgpack.encode([{"type": "Request", "id": "seven"}]),
            msgspec.msgpack.encode([1, 2]),
            msgspec.msgpack.encode([{"type": "Abort", "ids": 5}]),
            b"\x91" * 10_000,
        ]
        for raw in bad:
            socket.send(raw)
        socket.send_multipart([b"one", b"two"])
        # What is right in one list with what is not is heard.
        socket.send(msgspec.msgpack.encode([Ping(5), {"type": "Request", "id": 7}, 3]))
        said = []
        try:
            async with asyncio.timeout(30):
                while not said or not getattr(said[-1], "failed", None):
                    said.append(decoder.decode(await socket.recv()))
        finally:
            socket.close(linger=0)
            context.term()
        assert isinstance(said[0], Ready) and Pong(5) in said and Pong(4) not in said
        assert [(one.request, one.code) for one in said[-1].failed] == [(7, "invalid_request")]
        assert await reading == recite(b"abc", 8)


def test_an_address_that_cannot_be_bound_is_one_line(tmp_path: Path) -> None:
    address = f"ipc://{tmp_path}/no/such/folder/engine"
    command = ["-m", "engine.worker", address, "{}", "--parent", str(os.getpid())]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)])}
    done = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, env=environment, timeout=60
    )
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert f"cannot listen on {address}: No such file" in line


async def test_a_process_that_cannot_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    client = EngineClient(ProcessTransport(EngineConfig()))
    with pytest.raises(EngineDead, match="cannot be started"):
        await client.start()
    assert client.state == "dead"
    await client.close()


async def test_a_worker_that_does_not_listen_is_ended_by_force(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(transport_module, "STOP_SECONDS", 0.1)
    async with working() as (client, transport):
        pid = transport.pid
        assert pid is not None
        reading = asyncio.create_task(answer(client, ask(client, ENDLESS)))
        os.kill(pid, signal.SIGSTOP)  # now it hears neither Shutdown nor SIGTERM
        await client.close()
        with pytest.raises(EngineDead):
            await reading
    assert not is_alive(pid)


def test_the_worker_does_not_outlive_its_parent() -> None:
    code = """
import asyncio
import engine.client.socket_transport as transport_module
from engine.client.client import EngineClient
from engine.config import EngineConfig
from engine.client.socket_transport import ProcessTransport

async def main():
    transport = ProcessTransport(EngineConfig(), engine="tests.engine.fake:fake_engine")
    client = EngineClient(transport)
    await client.start()
    await client.ready(60)
    print(transport.pid, flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""
    parent = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    assert parent.stdout is not None
    with parent.stdout:
        worker = int(parent.stdout.readline())
    assert is_alive(worker)
    parent.kill()
    parent.wait()
    deadline = time.monotonic() + 60
    while is_alive(worker) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not is_alive(worker)
