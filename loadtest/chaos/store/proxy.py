"""A TCP proxy between one server and the store, which stands for a network that fails."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Literal

Mode = Literal[
    "pass",
    "cut",  # connections are reset, and new ones too
    "lost",  # nothing arrives any more, and nobody is told
    "slow",  # everything arrives late
]
PART = 65536  # bytes that are passed on at once
LATE = 0.2  # seconds, of each part when slow


class Proxy:
    """Listens on a free port of this machine and passes everything on to another one."""

    def __init__(self, target: int) -> None:
        self.port = 0
        self._target = target
        self._mode: Mode = "pass"
        self._normal = asyncio.Event()
        self._normal.set()
        self._listening: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._serving: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Proxy:
        self._listening = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._listening.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._listening is not None
        self._listening.close()
        self.become("cut")
        if self._serving:
            await asyncio.wait(self._serving)

    def become(self, mode: Mode) -> None:
        """Behave so from now on. What was lost is never delivered: those connections are reset."""
        if self._mode == "lost" or mode == "cut":
            self._reset()
        self._mode = mode
        if mode == "lost":
            self._normal.clear()
        else:
            self._normal.set()

    def _reset(self) -> None:
        for writer in self._writers:
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        task = asyncio.current_task()
        assert task is not None
        self._serving.add(task)
        task.add_done_callback(self._serving.discard)
        there: asyncio.StreamWriter | None = None
        try:
            if self._mode == "cut":
                return
            await self._normal.wait()
            back, there = await asyncio.open_connection("127.0.0.1", self._target)
            self._writers.add(there)
            tasks = [
                asyncio.create_task(self._pass(reader, there)),
                asyncio.create_task(self._pass(back, writer)),
            ]
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                task.cancel()
        except OSError:  # the store is down
            pass
        finally:
            for one in (writer, there):
                if one is not None:
                    self._writers.discard(one)
                    one.transport.abort()

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while part := await reader.read(PART):
                if self._mode == "slow":
                    await asyncio.sleep(LATE)
                await self._normal.wait()
                writer.write(part)
                await writer.drain()
