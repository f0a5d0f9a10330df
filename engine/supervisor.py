"""Supervisor: starts an engine for its members, the API processes, and keeps one running.

An engine that dies, or that has not answered for too long and is killed, is started again, a
limited number of times; a first engine that cannot be loaded is not. A reload loads another engine
beside the one that serves, which then finishes what it has in flight, and ends. Only orders pass
through here: members talk to engines themselves.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from engine.charge import Charge
from engine.config import EngineConfig
from engine.errors import Draining, EngineDead, EngineError, EngineLoading, ReloadUnderWay
from engine.members import MemberPipe, Members
from engine.messages import ModelInfo
from engine.protocol import Down, Problem
from engine.restarts import Restarts

log = logging.getLogger(__name__)

USE_SECONDS = 30.0  # for all members to use another engine; who hangs so long holds up no answer


@dataclass(frozen=True, kw_only=True)
class Rules:
    """When a supervisor steps in; times in seconds."""

    restarts: int = 3  # starts of an engine that died, within `window`; 0 = none
    window: float = 600.0
    load_timeout: float = 600.0
    hang_timeout: float = 120.0  # without an answer of a loaded engine; 0 = for ever


class Supervisor:
    """`run` starts the engine and keeps it; members `join` at any time. All on one event loop."""

    def __init__(
        self,
        config: EngineConfig,
        rules: Rules,
        check: Callable[[ModelInfo], Awaitable[None]] | None = None,
        fold: Callable[[list[bytes]], bytes] | None = None,
        engine: str | None = None,
    ) -> None:
        """`check` is awaited with every model before it serves; what it raises (an EngineError) is
        a failure to load. `fold`: as of `Members`; `engine`: as of `ProcessTransport`."""
        self._config = config  # of the engine that serves
        self._rules = rules
        self._check = check
        self._engine = engine
        self._restarts = Restarts(rules.restarts, rules.window)
        self._current: Charge | None = None  # serves, or has died and is to be replaced
        self._engines: set[Charge] = set()  # all that live: loading, serving, finishing
        self._generations = 0
        self._load_seconds = 1.0  # of the latest one
        self._deaths: asyncio.Queue[tuple[Charge, EngineError]] = asyncio.Queue()
        self._reload: asyncio.Task[Charge] | None = None
        self._held = False
        self._tasks: set[asyncio.Task[Any]] = set()
        self.members = Members(self.reload, self._on_unneeded, fold)

    async def run(self) -> EngineError:
        """Starts the engine, and again when it dies; returns why there is none any more."""
        error: EngineError | None = None
        try:
            await self._start(self._config)
            while error is None:
                error = await self._replace(*await self._deaths.get())
        except EngineError as failure:  # of the first one, for which there is no second try
            error = failure
        except Exception as unexpected:  # nobody would keep the engine, nor know it
            log.exception("unexpected error of the supervisor")
            error = EngineDead(f"the supervisor has failed: {unexpected}")
        generation = self._current.generation if self._current else 0
        self.members.tell(Down(generation, Problem.of(error), final=True))
        return error

    async def _replace(self, engine: Charge, error: EngineError) -> EngineError | None:
        """Returns when another engine serves (None), or why none will."""
        if self._reload is not None and not self._held:
            # What is being loaded takes its place: memory may not suffice for a third.
            log.warning("%s; the one that is being loaded takes its place", error.message)
            await asyncio.wait({self._reload})
        while self._current is engine:
            seconds = None if self._held else self._restarts.wait(time.monotonic())
            if seconds is None:
                count = self._restarts.recent
                tries = f", after {count} restart{'s' if count > 1 else ''}" if count else ""
                return EngineDead(error.message + tries)
            log.warning(
                "%s; starting another%s (%d of at most %d within %g s)",
                error.message,
                f" in {seconds:g} s" if seconds else "",
                self._restarts.recent,
                self._restarts.most,
                self._restarts.window,
            )
            self._tell_down(engine, error, seconds + self._load_seconds)
            await asyncio.sleep(seconds)
            if self._held:
                return error
            try:
                await self._start(self._config)
            except EngineError as failure:
                error = EngineDead(f"the model could not be loaded again: {failure.message}")
        return None

    async def reload(self, model: str | None) -> ModelInfo:
        """Loads `model` (None: the present one again) and returns when new requests go there.

        Raises ConfigError, CheckpointError, DeviceError or another EngineError where it cannot be
        loaded; ReloadUnderWay; EngineLoading while no engine serves; Draining. The engine that
        serves goes on in all these cases.
        """
        if self._held:
            raise Draining("the server is shutting down and loads no model")
        if self._reload is not None:
            raise ReloadUnderWay("another reload is under way; one at a time")
        if self._current is None or not self._current.serves:
            raise EngineLoading("no engine serves just now, whose place another could take")
        config = replace(self._config, model=model or self._config.model)
        reload = self._reload = asyncio.create_task(self._start(config))
        self._tasks.add(reload)
        reload.add_done_callback(self._on_reloaded)
        try:
            engine = await asyncio.shield(reload)
        except asyncio.CancelledError:
            if not reload.cancelled():  # who asked for it was; it goes on
                raise
            raise Draining("the server is shutting down; the reload was given up") from None
        with suppress(TimeoutError):
            async with asyncio.timeout(USE_SECONDS):
                await self.members.all_use(engine.generation)
        return engine.info

    def _on_reloaded(self, reload: asyncio.Task[Charge]) -> None:
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
        self.members.close()

    def join(self, pipe: MemberPipe) -> str:
        """Takes in a member, of whom `pipe` is this side's end; returns its name."""
        name = self.members.add(pipe)
        if self._current is not None and self._current.serves:
            self.members.serve(self._current.order(self._restarts.total), name)
        self._keep(self._listen(name))
        return name

    async def _listen(self, name: str) -> None:
        try:
            await self.members.listen(name)
        finally:
            for engine in self._engines:
                engine.forget(name)

    # Engines.

    async def _start(self, config: EngineConfig) -> Charge:
        """Loads another engine, to which new requests go from then on."""
        self._generations += 1
        engine = Charge(self._generations, config, self._engine)
        self._engines.add(engine)
        try:
            await engine.load(self._rules.load_timeout)
            if self._check is not None:
                await self._check(engine.info)
        except BaseException:
            await asyncio.shield(self._end(engine))
            raise
        self._keep(self._mourn(engine))
        self._load_seconds = engine.load_seconds
        old, self._current, self._config = self._current, engine, config
        self.members.serve(engine.order(self._restarts.total))
        if old is not None and not self.members.need(old.generation):
            self._on_unneeded(old.generation)
        return engine

    async def _mourn(self, engine: Charge) -> None:
        """Sees to what an engine leaves that ends by itself."""
        error = await engine.death(self._rules.hang_timeout)
        if engine not in self._engines:
            return  # it was ended here
        # At once: whatever comes next, what its members have in flight there is lost.
        self._tell_down(engine, error, self._load_seconds)
        if engine is self._current:
            self._deaths.put_nowait((engine, error))
        else:
            log.error("error: %s, while it finished what it had", error.message)
        await self._end(engine)

    def _on_unneeded(self, generation: int) -> None:
        """No member has anything in flight on this engine."""
        for engine in self._engines:
            if engine.generation == generation and engine is not self._current:
                self._keep(self._end(engine))

    async def _end(self, engine: Charge) -> None:
        self._engines.discard(engine)
        await engine.close()

    def _tell_down(self, engine: Charge, error: EngineError, seconds: float) -> None:
        """With how many seconds it may take until another serves, unless one does."""
        current = engine is self._current
        problem = Problem(error.code, error.message, retry_after=seconds if current else None)
        self.members.tell(Down(engine.generation, problem, current=current))

    def _keep(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._on_done)

    def _on_done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.error("unexpected error of the supervisor", exc_info=task.exception())
