"""Supervisor: starts engines for API processes, and keeps them running.

There may be several, of one model, which serve together; each has a rank. One that dies, or that
has not answered for too long and is killed, is started again, a limited number of times, while the
others go on; where one of the first cannot be loaded, none serves. A reload loads other engines
beside those that serve, which then finish what they have in flight, and end. Only orders pass
through here: API processes talk to engines themselves.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

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
from engine.supervisor.api_registry import ApiPipe, ApiRegistry
from engine.supervisor.control_messages import Down, EncodedError, Serve
from engine.supervisor.engine_process import EngineProcess, RestartPolicy

log = logging.getLogger(__name__)

FOR_LONG = 3600.0  # seconds until one is back that is not started again by itself
USE_SECONDS = 30.0  # for all processes to use other engines; one that hangs holds up no reload


@dataclass(frozen=True, kw_only=True)
class SupervisorConfig:
    """When a supervisor steps in; times in seconds."""

    restarts: int = 3  # starts of an engine that died, within `window`; 0 = none
    window: float = 600.0
    load_timeout: float = 600.0
    hang_timeout: float = 120.0  # without an answer of a loaded engine; 0 = for ever


class Supervisor:
    """`run` starts the engines and keeps them; API processes `join` at any time. All methods are
    called on one event loop."""

    def __init__(
        self,
        config: EngineConfig,
        supervision: SupervisorConfig,
        check: Callable[[ModelInfo], Awaitable[None]] | None = None,
        fold: Callable[[list[bytes]], bytes] | None = None,
        engine: str | None = None,
    ) -> None:
        """Starts nothing yet.

        Args:
            config: every engine's, but for the rank; `config.engines` says how many there are.
            supervision: when engines are started again, and killed.
            check: is awaited with every model before it serves; what it raises (an EngineError) is
                a failure to load.
            fold: as of `ApiRegistry`.
            engine: as of `ProcessTransport`.

        Raises:
            ConfigError: something that is not allowed where there are so many engines.
        """
        config.of_rank(config.engines - 1)
        self._config = config  # of the engines that serve
        self._supervision = supervision
        self._check = check
        self._engine = engine
        self._restarts = [
            RestartPolicy(supervision.restarts, supervision.window) for _ in range(config.engines)
        ]
        # By rank: who serves, or has died and is to be replaced; None: not there yet, or no more.
        self._by_rank: list[EngineProcess | None] = [None] * config.engines
        self._exhausted: set[int] = set()  # ranks that may be started again later, if others last
        self._back_at: dict[int, float] = {}  # by rank, when who is missing may be back
        self._engines: set[EngineProcess] = set()  # all that live: loading, serving, finishing
        self._generations = 0
        self._load_seconds = 1.0  # of the latest one
        self._over: asyncio.Queue[EngineError] = asyncio.Queue()  # why no engine is left
        self._reload: asyncio.Task[list[EngineProcess]] | None = None
        self._held = False
        self._tasks: set[asyncio.Task[Any]] = set()
        self.api_processes = ApiRegistry(self.reload, self._on_unneeded, fold)

    async def run(self) -> EngineError:
        """Starts the engines, and again those that die; called once. Returns why there is none any
        more, which API processes have then been told."""
        try:
            await self._start_all(self._config)
            error = await self._over.get()
        except EngineError as failure:  # of the first ones, for which there is no second try
            error = failure
        except Exception as unexpected:  # nobody would keep the engines, nor know them
            log.exception("unexpected error of the supervisor")
            error = EngineDead(f"the supervisor has failed: {unexpected}")
        self.api_processes.tell(Down(self._generations, EncodedError.of(error), final=True))
        return error

    async def _replace(self, engine: EngineProcess, error: EngineError) -> None:
        """Returns when another engine serves in its place, or none will."""
        try:
            reason = await self._try_to_replace(engine, error)
        except Exception as unexpected:
            log.exception("unexpected error of the supervisor")
            reason = EngineDead(f"the supervisor has failed: {unexpected}")
        if reason is None or self._by_rank[engine.rank] is not engine:
            return
        self._by_rank[engine.rank] = None
        if self._is_over():
            self._over.put_nowait(reason)
        else:
            who = self._name(engine.rank)
            log.error("error: %s%s; the others go on without it", who, reason.message)
            self._tell_serving()

    def _is_over(self) -> bool:
        """Nobody serves, and nobody is being started."""
        return all(
            engine is None or rank in self._exhausted for rank, engine in enumerate(self._by_rank)
        )

    async def _try_to_replace(
        self, engine: EngineProcess, error: EngineError
    ) -> EngineError | None:
        """None, or why none will serve in its place."""
        rank = engine.rank
        restarts = self._restarts[rank]
        allowed = False  # to start another
        while self._by_rank[rank] is engine:
            if self._reload is not None and not self._held:
                # What is being loaded takes its place: memory may not suffice for a third.
                who = self._name(rank)
                log.warning("%s%s; what is being loaded takes its place", who, error.message)
                await asyncio.wait({self._reload})
                continue
            if allowed and not self._held:
                allowed = False
                try:
                    another = await self._load(self._config, rank)
                except EngineError as failure:
                    error = EngineDead(f"the model could not be loaded again: {failure.message}")
                    continue
                if self._by_rank[rank] is engine:
                    self._install([another])
                else:  # a reload was quicker
                    await self._end(another)
                continue
            seconds = None if self._held else restarts.wait(time.monotonic())
            if seconds is None:
                count = restarts.recent
                tries = f", after {count} restart{'s' if count > 1 else ''}" if count else ""
                spent = EngineDead(error.message + tries)
                if self._held or not count or not await self._wait_for_restart(engine, spent):
                    return spent
                continue
            log.warning(
                "%s%s; starting another%s (%d of at most %d within %g s)",
                self._name(rank),
                error.message,
                f" in {seconds:g} s" if seconds else "",
                restarts.recent,
                restarts.most,
                restarts.window,
            )
            if seconds:  # else that is what is expected already
                self._expect(rank, seconds + self._load_seconds)
            self._tell_down(engine, error, seconds + self._load_seconds)
            await asyncio.sleep(seconds)
            allowed = True
        return None

    def _expect(self, rank: int, seconds: float) -> None:
        """One of this rank may be there in so many seconds."""
        self._back_at[rank] = time.monotonic() + seconds
        self._tell_serving()

    async def _wait_for_restart(self, engine: EngineProcess, spent: EngineDead) -> bool:
        """Until another may be started in its place, where others serve meanwhile."""
        rank = engine.rank
        self._exhausted.add(rank)
        if self._is_over():
            return False
        seconds = self._restarts[rank].room_in(time.monotonic())
        log.error(
            "error: %s%s; the others go on, and it is tried again in %.0f s",
            self._name(rank),
            spent.message,
            seconds,
        )
        self._expect(rank, seconds + self._load_seconds)
        await asyncio.sleep(seconds)
        if self._by_rank[rank] is engine:  # and not one that a reload has brought
            self._exhausted.discard(rank)
        return True

    async def reload(self, model: str | None) -> ModelInfo:
        """Loads a model in engines that take the place of those that serve. One that was begun goes
        on when its caller is cancelled.

        Args:
            model: folder or name; None: the present one again.

        Returns:
            What is known of it, once new requests go there.

        Raises:
            ConfigError, CheckpointError, DeviceError: it cannot be loaded.
            ReloadUnderWay: another reload is.
            EngineLoading: no engine serves just now.
            Draining: the server is shutting down.
            In all these cases the engines that serve go on.
        """
        if self._held:
            raise Draining("the server is shutting down and loads no model")
        if self._reload is not None:
            raise ReloadUnderWay("another reload is under way; one at a time")
        if not self._serving():
            raise EngineLoading("no engine serves just now, whose place another could take")
        config = replace(self._config, model=model or self._config.model)
        reload = self._reload = asyncio.create_task(self._start_all(config))
        self._tasks.add(reload)
        reload.add_done_callback(self._on_reloaded)
        try:
            engines = await asyncio.shield(reload)
        except asyncio.CancelledError:
            if not reload.cancelled():  # who asked for it was; it goes on
                raise
            raise Draining("the server is shutting down; the reload was given up") from None
        with suppress(TimeoutError):
            async with asyncio.timeout(USE_SECONDS):
                await self.api_processes.all_use(max(engine.generation for engine in engines))
        return engines[0].info

    def _on_reloaded(self, reload: asyncio.Task[list[EngineProcess]]) -> None:
        """Only now another one may begin, whether or not anybody has waited for this one."""
        self._tasks.discard(reload)
        self._reload = None
        if not reload.cancelled() and (error := reload.exception()) is not None:
            log.warning("the reload failed: %s", error)

    def hold(self) -> None:
        """From now on no engine takes another's place: the server is shutting down."""
        self._held = True
        if self._reload is not None:
            self._reload.cancel()

    async def close(self) -> None:
        """Ends every engine; what is unfinished there is aborted. `run` is over, or cancelled."""
        self.hold()
        await asyncio.gather(*(self._end(engine) for engine in list(self._engines)))
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self.api_processes.close()

    def join(self, pipe: ApiPipe) -> str:
        """Takes in an API process, at any time.

        Args:
            pipe: this side's end of its pipe, open.

        Returns:
            Its name, by which engines know it too.
        """
        name = self.api_processes.add(pipe)
        self._tell_serving(name)
        self._spawn(self._listen(name))
        return name

    async def _listen(self, name: str) -> None:
        try:
            await self.api_processes.listen(name)
        finally:
            for engine in self._engines:
                engine.forget(name)

    # Engines.

    async def _start_all(self, config: EngineConfig) -> list[EngineProcess]:
        """Loads an engine for every rank, to which new requests go from then on, or none."""
        loads = [asyncio.create_task(self._load(config, rank)) for rank in range(config.engines)]
        try:
            engines = list(await asyncio.gather(*loads))
            if len({engine.info.fingerprint for engine in engines}) > 1:
                raise CheckpointError(f"{config.model} was changed while it was loaded")
        except BaseException:
            for load in loads:
                load.cancel()
            ended = await asyncio.gather(*loads, return_exceptions=True)
            loaded = [self._end(one) for one in ended if isinstance(one, EngineProcess)]
            await asyncio.shield(asyncio.gather(*loaded))
            raise
        self._config = config
        self._install(engines)
        return engines

    async def _load(self, config: EngineConfig, rank: int) -> EngineProcess:
        """An engine that has loaded its model. Raises EngineError."""
        self._generations += 1
        engine = EngineProcess(self._generations, config.of_rank(rank), self._engine)
        self._engines.add(engine)
        try:
            await engine.load(self._supervision.load_timeout)
            if self._check is not None:
                await self._check(engine.info)
            self._check_same_model(engine, config)
        except BaseException:
            await asyncio.shield(self._end(engine))
            raise
        self._load_seconds = engine.load_seconds
        return engine

    def _check_same_model(self, engine: EngineProcess, config: EngineConfig) -> None:
        """Raises CheckpointError for another model than those have that it is to serve with."""
        others = self._serving() if config is self._config else []
        if others and engine.info.fingerprint != others[0].info.fingerprint:
            raise CheckpointError(
                f"{config.model} is another model now than the one that other engines serve; "
                "a reload loads it everywhere"
            )

    def _install(self, engines: list[EngineProcess]) -> None:
        """They serve from now on, in the place of those that had their ranks."""
        replaced = [self._by_rank[engine.rank] for engine in engines]
        for engine in engines:
            self._by_rank[engine.rank] = engine
            self._exhausted.discard(engine.rank)
            self._spawn(self._watch(engine))
        self._tell_serving()
        for old in replaced:
            if old is not None and not self.api_processes.need(old.generation):
                self._on_unneeded(old.generation)

    def _name(self, rank: int) -> str:
        """What messages about one of several begin with."""
        engines = len(self._by_rank)
        return f"engine {rank} of {engines}: " if engines > 1 else ""

    def _serving(self) -> list[EngineProcess]:
        return [engine for engine in self._by_rank if engine is not None and engine.serves]

    def _tell_serving(self, only: str | None = None) -> None:
        """Tells all API processes, or one, which engines serve, if any does."""
        serving = self._serving()
        if not serving:
            return
        endpoints = [engine.endpoint if engine in serving else None for engine in self._by_rank]
        restarts = sum(restarts.total for restarts in self._restarts)
        now = time.monotonic()
        waits = [
            FOR_LONG if one is None else max(0.0, self._back_at.get(rank, 0.0) - now)
            for rank, one in enumerate(self._by_rank)
        ]
        self.api_processes.serve(Serve(endpoints, serving[0].info, restarts, waits), only)

    async def _watch(self, engine: EngineProcess) -> None:
        """Sees to what an engine leaves that ends by itself."""
        error = await engine.death(self._supervision.hang_timeout)
        if engine not in self._engines:
            return  # it was ended here
        # At once: whatever comes next, what API processes have in flight there is lost.
        self._tell_down(engine, error, self._load_seconds)
        if engine in self._by_rank:
            self._expect(engine.rank, self._load_seconds)
            self._spawn(self._replace(engine, error))
        else:
            log.error("error: %s, while it finished what it had", error.message)
        await self._end(engine)

    def _on_unneeded(self, generation: int) -> None:
        """No API process has anything in flight on this engine."""
        for engine in self._engines:
            if engine.generation == generation and engine not in self._by_rank:
                self._spawn(self._end(engine))

    async def _end(self, engine: EngineProcess) -> None:
        self._engines.discard(engine)
        await engine.close()

    def _tell_down(self, engine: EngineProcess, error: EngineError, seconds: float) -> None:
        """With how many seconds it may take until another serves, unless one does."""
        current = engine in self._by_rank and not self._serving()
        encoded = EncodedError(error.code, error.message, retry_after=seconds if current else None)
        self.api_processes.tell(Down(engine.generation, encoded, current=current))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._on_done)

    def _on_done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.error("unexpected error of the supervisor", exc_info=task.exception())
