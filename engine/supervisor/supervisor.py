"""Supervisor: starts engines for API processes, and keeps them running.

Several engines of one model may serve together; each has a rank. If one of the first engines cannot
be loaded, none serves. An engine that dies, or that hangs and is killed, is restarted a limited
number of times while the others go on. A reload loads new engines beside the serving ones, which
then finish their requests and end. Only control messages pass through the supervisor: API processes
have their own connections to engines.
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

FOR_LONG = 3600.0  # seconds reported for an engine that is not restarted automatically
# wait for all processes to use new engines; a hanging process does not block a reload
USE_SECONDS = 30.0


@dataclass(frozen=True, kw_only=True)
class SupervisorConfig:
    """When a supervisor restarts or kills engines; times in seconds."""

    restarts: int = 3  # restarts of an engine that died, within `window`; 0 = none
    window: float = 600.0
    load_timeout: float = 600.0
    hang_timeout: float = 120.0  # kill a loaded engine after this long without an answer; 0 = never


class Supervisor:
    """Starts engines and restarts those that die (`run`); API processes may `join` at any time.

    All methods are called on one event loop.
    """

    def __init__(
        self,
        config: EngineConfig,
        supervision: SupervisorConfig,
        check: Callable[[ModelInfo], Awaitable[None]] | None = None,
        fold: Callable[[list[bytes]], bytes] | None = None,
        engine: str | None = None,
    ) -> None:
        """Create the supervisor without starting anything.

        Args:
            config: the configuration of every engine, except for its rank; `config.engines` is
                their number.
            supervision: when engines are restarted or killed.
            check: awaited with every model before it serves; an EngineError that it raises counts
                as a failure to load.
            fold: as for `ApiRegistry`.
            engine: as for `ProcessTransport`.

        Raises:
            ConfigError: a setting is not allowed with so many engines.
        """
        config.of_rank(config.engines - 1)
        self._config = config  # configuration of the serving engines
        self._supervision = supervision
        self._check = check
        self._engine = engine
        self._restarts = [
            RestartPolicy(supervision.restarts, supervision.window) for _ in range(config.engines)
        ]
        # By rank: the engine that serves, or that has died and is being replaced; None: none.
        self._by_rank: list[EngineProcess | None] = [None] * config.engines
        # ranks out of restarts, tried again later if others still serve
        self._exhausted: set[int] = set()
        # by rank, when a missing engine may be back (time.monotonic)
        self._back_at: dict[int, float] = {}
        self._engines: set[EngineProcess] = set()  # all live engines: loading, serving or finishing
        self._generations = 0
        self._load_seconds = 1.0  # duration of the latest load
        # receives the reason when no engine is left
        self._over: asyncio.Queue[EngineError] = asyncio.Queue()
        self._reload: asyncio.Task[list[EngineProcess]] | None = None
        self._held = False
        self._tasks: set[asyncio.Task[Any]] = set()
        self.api_processes = ApiRegistry(self.reload, self._on_unneeded, fold)

    async def run(self) -> EngineError:
        """Start the engines and restart those that die; called once.

        Returns the reason why no engine is left; API processes have been told by then.
        """
        try:
            await self._start_all(self._config)
            error = await self._over.get()
        except EngineError as failure:  # one of the first engines failed; there is no second try
            error = failure
        except Exception as unexpected:  # without a supervisor nobody would keep the engines
            log.exception("unexpected error in the supervisor")
            error = EngineDead(f"the supervisor has failed: {unexpected}")
        self.api_processes.tell(Down(self._generations, EncodedError.of(error), final=True))
        return error

    async def _replace(self, engine: EngineProcess, error: EngineError) -> None:
        """Replace an engine that died; return when another serves in its place, or none will."""
        try:
            reason = await self._try_to_replace(engine, error)
        except Exception as unexpected:
            log.exception("unexpected error in the supervisor")
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
        """Return whether no engine serves and none is being started."""
        return all(
            engine is None or rank in self._exhausted for rank, engine in enumerate(self._by_rank)
        )

    async def _try_to_replace(
        self, engine: EngineProcess, error: EngineError
    ) -> EngineError | None:
        """Replace an engine; return None on success, or the reason why none serves in its place."""
        rank = engine.rank
        restarts = self._restarts[rank]
        allowed = False  # whether the wait before the next start is over
        while self._by_rank[rank] is engine:
            if self._reload is not None and not self._held:
                # The engine being loaded replaces it; memory may not suffice for a third.
                who = self._name(rank)
                log.warning("%s%s; the reload under way replaces it", who, error.message)
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
                else:  # a reload was faster
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
            if seconds:  # a restart at once is expected already
                self._expect(rank, seconds + self._load_seconds)
            self._tell_down(engine, error, seconds + self._load_seconds)
            await asyncio.sleep(seconds)
            allowed = True
        return None

    def _expect(self, rank: int, seconds: float) -> None:
        """Record that an engine of this rank may be available in `seconds`, and announce it."""
        self._back_at[rank] = time.monotonic() + seconds
        self._tell_serving()

    async def _wait_for_restart(self, engine: EngineProcess, spent: EngineDead) -> bool:
        """Wait until another start is allowed, if other engines serve; else return False."""
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
        if self._by_rank[rank] is engine:  # it was not replaced by a reload
            self._exhausted.discard(rank)
        return True

    async def reload(self, model: str | None) -> ModelInfo:
        """Load a model in engines that replace the serving ones.

        The reload goes on if its caller is cancelled.

        Args:
            model: folder or name; None: load the present one again.

        Returns:
            The model's info, once new requests go to the new engines.

        Raises:
            ConfigError, CheckpointError, DeviceError: it cannot be loaded.
            ReloadUnderWay: another reload is running.
            EngineLoading: no engine serves at the moment.
            Draining: the server is shutting down. In all these cases the serving engines go on.
        """
        if self._held:
            raise Draining("the server is shutting down and accepts no reload")
        if self._reload is not None:
            raise ReloadUnderWay("another reload is under way; only one may run at a time")
        if not self._serving():
            raise EngineLoading("no engine serves right now, so there is none to replace")
        config = replace(self._config, model=model or self._config.model)
        reload = self._reload = asyncio.create_task(self._start_all(config))
        self._tasks.add(reload)
        reload.add_done_callback(self._on_reloaded)
        try:
            engines = await asyncio.shield(reload)
        except asyncio.CancelledError:
            if not reload.cancelled():  # only the caller was cancelled; the reload goes on
                raise
            raise Draining("the server is shutting down; the reload was cancelled") from None
        with suppress(TimeoutError):
            async with asyncio.timeout(USE_SECONDS):
                await self.api_processes.all_use(max(engine.generation for engine in engines))
        return engines[0].info

    def _on_reloaded(self, reload: asyncio.Task[list[EngineProcess]]) -> None:
        """Allow the next reload, and log a failure that nobody may have waited for."""
        self._tasks.discard(reload)
        self._reload = None
        if not reload.cancelled() and (error := reload.exception()) is not None:
            log.warning("the reload failed: %s", error)

    def hold(self) -> None:
        """Start and replace no more engines, because the server is shutting down."""
        self._held = True
        if self._reload is not None:
            self._reload.cancel()

    async def close(self) -> None:
        """End every engine, aborting requests; call it when `run` is over or cancelled."""
        self.hold()
        await asyncio.gather(*(self._end(engine) for engine in list(self._engines)))
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self.api_processes.close()

    def join(self, pipe: ApiPipe) -> str:
        """Add an API process; possible at any time.

        Args:
            pipe: this side's end of its pipe, open.

        Returns:
            The process's name, which engines use too.
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
        """Load an engine for every rank and make all of them serve; if one fails, none does."""
        loads = [asyncio.create_task(self._load(config, rank)) for rank in range(config.engines)]
        try:
            engines = list(await asyncio.gather(*loads))
            if len({engine.info.fingerprint for engine in engines}) > 1:
                raise CheckpointError(f"{config.model} was changed while it was being loaded")
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
        """Start an engine and wait until it has loaded its model. Raises EngineError."""
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
        """Raise CheckpointError if the engine's model differs from that of the serving engines."""
        others = self._serving() if config is self._config else []
        if others and engine.info.fingerprint != others[0].info.fingerprint:
            raise CheckpointError(
                f"{config.model} is another model now than the one that other engines serve; "
                "a reload loads it in all engines"
            )

    def _install(self, engines: list[EngineProcess]) -> None:
        """Make these engines serve in place of those that had their ranks."""
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
        """Return the prefix for messages about one of several engines."""
        engines = len(self._by_rank)
        return f"engine {rank} of {engines}: " if engines > 1 else ""

    def _serving(self) -> list[EngineProcess]:
        return [engine for engine in self._by_rank if engine is not None and engine.serves]

    def _tell_serving(self, only: str | None = None) -> None:
        """Tell all API processes, or only one, which engines serve; do nothing if none does."""
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
        """Wait for an engine to die, then report and replace it."""
        error = await engine.death(self._supervision.hang_timeout)
        if engine not in self._engines:
            return  # it was ended on purpose
        # Report it at once: its requests in flight are lost in any case.
        self._tell_down(engine, error, self._load_seconds)
        if engine in self._by_rank:
            self._expect(engine.rank, self._load_seconds)
            self._spawn(self._replace(engine, error))
        else:
            log.error("error: %s, while it finished its last requests", error.message)
        await self._end(engine)

    def _on_unneeded(self, generation: int) -> None:
        """End an engine that was replaced and on which no API process has requests."""
        for engine in self._engines:
            if engine.generation == generation and engine not in self._by_rank:
                self._spawn(self._end(engine))

    async def _end(self, engine: EngineProcess) -> None:
        self._engines.discard(engine)
        await engine.close()

    def _tell_down(self, engine: EngineProcess, error: EngineError, seconds: float) -> None:
        """Report an engine's end to all API processes.

        `seconds` is the time until another may serve; it is sent only if none serves now.
        """
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
            log.error("unexpected error in the supervisor", exc_info=task.exception())
