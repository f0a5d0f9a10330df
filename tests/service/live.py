"""The application over the fake model on a real socket, in a thread: for clients that block."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn
from fastapi import FastAPI

from service.http.uvicorn_protocol import HttpProtocol
from tests.engine.fake import FakeRunner
from tests.service.harness import Service, running


@contextmanager
def listening(
    runner: FakeRunner, *, keep_alive: int = 5, send_buffer: int | None = None, **settings: Any
) -> Iterator[tuple[str, Service]]:
    """Its address, and the service. Its parts live in the thread's event loop; look, don't call.
    `keep_alive`: seconds until an idle connection is closed. `send_buffer`: bytes that the kernel
    keeps of an answer, about, which else may be megabytes."""
    found: dict[str, Any] = {}
    begun, over = threading.Event(), threading.Event()

    async def live() -> None:
        async with running(runner, **settings) as service:
            server = uvicorn.Server(_config(service.app, keep_alive))
            serving = asyncio.create_task(server.serve())
            while not server.started:
                await asyncio.sleep(0.005)
            listener = server.servers[0].sockets[0]
            if send_buffer is not None:  # connections have it from here
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
            port = listener.getsockname()[1]
            found.update(url=f"http://127.0.0.1:{port}", service=service)
            begun.set()
            await asyncio.to_thread(over.wait)
            server.should_exit = True
            await serving

    def run() -> None:
        try:
            asyncio.run(live())
        finally:
            begun.set()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        assert begun.wait(30) and found, "the server did not start"
        yield found["url"], found["service"]
    finally:
        over.set()
        thread.join(30)
    assert not thread.is_alive()


def _config(app: FastAPI, keep_alive: int) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        port=0,
        http=HttpProtocol,
        lifespan="off",
        log_config=None,
        access_log=False,  # as the server has it: with one, answers go another way
        timeout_graceful_shutdown=5,
        timeout_keep_alive=keep_alive,
    )


def address(url: str) -> tuple[str, int]:
    """Host and port of such an address."""
    host, _, port = url.removeprefix("http://").partition(":")
    return host, int(port)


def wait_for(condition: Callable[[], object]) -> None:
    """Until it holds. Fails after a while."""
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)
