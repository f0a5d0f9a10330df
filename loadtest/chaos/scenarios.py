"""The scenarios: each does something to a loaded server. Names are the rows of the table."""

from __future__ import annotations

import asyncio
import json
import os
import random
import resource
import signal
import socket
import struct
import tempfile
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from loadtest.subject import Subject

BEFORE, AFTER = 2.0, 2.0  # seconds of load around what happens
STOPPED = 5.0  # seconds for which the engine stands still
LIMIT = 4096  # bytes that a log file may grow to
STALL = 3.0  # seconds after which a client that reads nothing is cut off


@dataclass(frozen=True)
class Scenario:
    """One scenario; `happen` is called with the server once it is under load."""

    name: str
    happen: Callable[[Subject], Awaitable[None]]
    settings: dict[str, Any] = field(default_factory=dict)
    factory: str = "engine.engine:Engine.load"
    stdout: str | None = None  # a file for the server's output
    before: Callable[[], None] | None = None


async def _kill(subject: Subject) -> None:
    subject.signal_engine(signal.SIGKILL)


async def _stop(subject: Subject) -> None:
    engine = subject.engine()
    os.kill(engine, signal.SIGSTOP)
    await asyncio.sleep(STOPPED)
    os.kill(engine, signal.SIGCONT)


async def _cuda_error(subject: Subject) -> None:
    subject.signal_engine(signal.SIGUSR1)


async def _step_error(subject: Subject) -> None:
    for _ in range(3):
        subject.signal_engine(signal.SIGUSR2)
        await asyncio.sleep(0.3)


async def _nothing(_: Subject) -> None:
    """Do nothing: the load alone."""


def _request(tokens: int) -> bytes:
    body = json.dumps({"prompts": ["ROMEO:"], "max_tokens": tokens, "stream": True}).encode()
    head = "POST /v1/generate HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(body)}\r\n\r\n".encode() + body


def _connect(subject: Subject) -> socket.socket:
    host, port = subject.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)))


async def _storm(subject: Subject) -> None:
    """Start waves of clients that disconnect at any moment, some by a reset.

    They leave within the head, within the body, before the first event or after some events.
    """
    choice = random.Random(0)
    request = _request(2000)
    for _ in range(10):
        wave = [_connect(subject) for _ in range(100)]
        for one in wave:
            cut = choice.choice([20, len(request) - 10, len(request), len(request)])
            one.sendall(request[:cut])
        await asyncio.sleep(choice.random() * 0.4)
        for one in wave:
            if choice.random() < 0.5:
                one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            one.close()


async def _slow_readers(subject: Subject) -> None:
    """Start clients that ask for long streams and read nothing of them."""
    readers = []
    for _ in range(32):
        one = _connect(subject)
        one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        one.sendall(_request(100_000))
        readers.append(one)
    await asyncio.sleep(3 * STALL)
    for one in readers:
        one.close()


def _small_files() -> None:
    """Limit this process to files of LIMIT bytes, as on a full disk; for the server's process."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (LIMIT, LIMIT))


FAULTS = "loadtest.chaos.faults:load"
LOGGED = {"access_log": "json"}
TWO = {"engines": 2}
SCENARIOS = {
    "none": Scenario("nothing but load", _nothing),
    "kill": Scenario("kill -9 of the engine", _kill),
    "stop": Scenario(f"engine stopped for {STOPPED:g} s", _stop),
    "kill-one": Scenario("kill -9 of one engine of two", _kill, TWO),
    "stop-one": Scenario(f"one engine of two stopped for {STOPPED:g} s", _stop, TWO),
    "cuda": Scenario("CUDA error in a round", _cuda_error, factory=FAULTS),
    "step": Scenario("three rounds that fail", _step_error, factory=FAULTS),
    "storm": Scenario("1,000 clients that leave", _storm),
    "full": Scenario("access log to a full disk", _nothing, LOGGED, stdout="/dev/full"),
    "limit": Scenario(
        f"log file may not exceed {LIMIT} bytes",
        _nothing,
        LOGGED,
        stdout=tempfile.gettempdir(),
        before=_small_files,
    ),
    "slow": Scenario("32 clients that read nothing", _slow_readers, {"stall_timeout": STALL}),
}
