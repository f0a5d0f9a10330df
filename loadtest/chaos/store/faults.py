"""What happens to the servers, the store and the network between them, at random."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from typing import Any

from loadtest.chaos.store.proxy import Mode, Proxy
from loadtest.store.redis import RedisProcess
from loadtest.subject import Subject

LASTS = (0.5, 10.0)  # seconds of a fault: some outlast the lease of a lock, which is 6 s
DOWN = (0.0, 2.0)  # seconds until what was killed is started again


class World:
    """Servers on a store, their proxies, and the store.

    Nothing happens to what is in trouble already, nor to the last server that is not. So faults
    cannot pile up on a machine that starts servers slowly.
    """

    def __init__(
        self,
        settings: Sequence[dict[str, Any]],
        proxies: Sequence[Proxy],
        redis: RedisProcess | None,
        seed: int,
    ) -> None:
        """Start the servers, each with its settings, which name its port."""
        self.subjects = [Subject(**one) for one in settings]
        self.happened: dict[str, list[float]] = {}  # when, by time.monotonic
        self._settings = settings
        self._proxies = proxies
        self._redis = redis
        self._draw = random.Random(seed)
        self._servers = [asyncio.Lock() for _ in settings]
        self._networks = [asyncio.Lock() for _ in settings]
        self._store = asyncio.Lock()

    async def started(self) -> None:
        """Return when all servers are ready. Raises RuntimeError."""
        for subject in self.subjects:
            await subject.started()

    def close(self) -> None:
        for subject in self.subjects:
            subject.kill()

    async def trouble(self, every: float, over: asyncio.Event) -> None:
        """Let something happen every so many seconds, on average, until it is `over`.

        Returns when everything is as before. Raises RuntimeError if a server does not come back.
        """
        faults: list[Callable[[], Coroutine[None, None, None]]] = [
            self._kill_server,
            self._kill_engine,
            self._stop_server,
        ]
        if self._redis is not None:
            faults += [self._kill_store, self._pause_store, *map(self._network, MODES)]
        async with asyncio.TaskGroup() as group:
            group.create_task(self._watch(over))
            while not over.is_set():
                await asyncio.sleep(self._draw.expovariate(1 / every))
                group.create_task(self._draw.choice(faults)())
        for at, subject in enumerate(self.subjects):
            if subject.process.poll() is not None:
                await self._start(at)
        await self.started()

    def _note(self, fault: str) -> None:
        self.happened.setdefault(fault, []).append(time.monotonic())

    async def _watch(self, over: asyncio.Event) -> None:
        """Start servers that have ended by themselves, as their supervisor would."""
        while not over.is_set():
            for at, lock in enumerate(self._servers):
                if not lock.locked() and self.subjects[at].process.poll() is not None:
                    async with lock:
                        self._note("server ended by itself")
                        await self._start(at)
            await asyncio.sleep(0.5)

    async def _start(self, at: int) -> None:
        self.subjects[at] = Subject(**self._settings[at])
        await self.subjects[at].started()

    def _victim(self) -> int | None:
        """Return a server that nothing happens to; None: all others are in trouble already."""
        calm = [at for at, lock in enumerate(self._servers) if not lock.locked()]
        return self._draw.choice(calm) if len(calm) > 1 else None

    async def _kill_server(self) -> None:
        at = self._victim()
        if at is None:
            return
        async with self._servers[at]:
            self._note("kill -9 of a server")
            self.subjects[at].kill()
            await self._some_time(DOWN)
            await self._start(at)

    async def _kill_engine(self) -> None:
        at = self._victim()
        if at is None:
            return
        async with self._servers[at]:
            with suppress(RuntimeError, ProcessLookupError):  # it has just ended by itself
                self.subjects[at].signal_engine(signal.SIGKILL)
                self._note("kill -9 of an engine")
            await self.subjects[at].state()  # until it is ready again, or has ended

    async def _stop_server(self) -> None:
        at = self._victim()
        if at is None:
            return
        async with self._servers[at]:
            self._note("server stopped for a while")
            pids = self.subjects[at].processes()
            _signal(pids, signal.SIGSTOP)
            await self._some_time(LASTS)
            _signal(pids, signal.SIGCONT)

    async def _kill_store(self) -> None:
        assert self._redis is not None
        if self._store.locked():
            return
        async with self._store:
            self._note("kill -9 of the store")
            self._redis.kill()
            await self._some_time(DOWN)
            await asyncio.to_thread(self._redis.start)

    async def _pause_store(self) -> None:
        assert self._redis is not None
        if self._store.locked():
            return
        async with self._store:
            self._note("store stopped for a while")
            self._redis.pause()
            await self._some_time(LASTS)
            self._redis.go_on()

    def _network(self, mode: Mode) -> Callable[[], Coroutine[None, None, None]]:
        async def happen() -> None:
            at = self._draw.randrange(len(self.subjects))
            if self._networks[at].locked():
                return
            async with self._networks[at]:
                self._note(f"network {mode}")
                self._proxies[at].become(mode)
                await self._some_time(LASTS)
                self._proxies[at].become("pass")

        return happen

    async def _some_time(self, within: tuple[float, float]) -> None:
        await asyncio.sleep(self._draw.uniform(*within))


MODES: tuple[Mode, ...] = ("cut", "lost", "slow")


def _signal(pids: Sequence[int], number: signal.Signals) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)
