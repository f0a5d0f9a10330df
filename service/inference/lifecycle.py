"""Lifecycle: which runtime new requests get, and whether any are taken.

loading -> ready -> draining
           ready -> restarting -> ready    (the engine died and is started again)
and from each of them: failed
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable
from contextlib import suppress
from typing import Any, Literal

from fastapi import Request

from engine.client.client import EngineClient
from engine.errors import Draining, EngineDead, EngineError, EngineLoading
from engine.protocol.events import Stats
from engine.supervisor.supervisor_client import NoEngine, Restarting, Serving, Stop
from service.inference.engines import Engines
from service.inference.inference_request import InferenceRequest
from service.inference.runtime import Runtime
from service.observability.metrics import Metrics
from service.settings import Settings

logger = logging.getLogger(__name__)

# Bytes that a snapshot may have beside its state; engine.cache.storage.snapshot knows better, but
# later.
SNAPSHOT_REST = 2**17
UNREAD_SECONDS = 0.25  # between looks at what streams' readers are behind by


class Lifecycle:
    """The state of one API process, and the runtimes that serve or finish what they have.

    `on_failure` is called once when the model cannot be loaded or there is no engine any more;
    `on_stop` when a supervisor ends this process, with whether at once.
    """

    def __init__(
        self,
        engines: Engines,
        settings: Settings,
        on_failure: Callable[[EngineError], None] | None = None,
    ) -> None:
        self.engines = engines
        self.settings = settings
        self.metrics = Metrics(
            self.load, lambda: self.restarts, self._held_by_each, settings.engines
        )
        self._tell_limits(settings.engines)
        self.failure: EngineError | None = None
        self.outage: EngineError | None = None  # while the engine is started again
        self.draining = False
        self.restarts = 0  # of engines that died
        self.on_stop: Callable[[bool], None] = lambda now: None
        self.current: Runtime | None = None  # of new requests
        self._told_where = ""  # in the log
        # Of the engines of runtimes that serve or finish what they have.
        self._generations: dict[Runtime, tuple[int, ...]] = {}
        self._on_failure = on_failure
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def state(self) -> Literal["loading", "ready", "restarting", "draining", "failed"]:
        """Which of the module's states this is."""
        if self.failure is not None:
            return "failed"
        if self.draining:
            return "draining"
        if self.outage is not None:
            return "restarting"
        return "loading" if self.current is None else "ready"

    def check_ready(self) -> None:
        """Raises EngineDead, Draining or EngineLoading where no request can be taken now."""
        if self.failure is not None:
            raise EngineDead(self.failure.message)
        if self.draining:
            raise Draining("the server is shutting down and takes no new requests")
        if self.outage is not None:
            raise EngineLoading(
                f"{self.outage.message}; it is being started again",
                retry_after=self.outage.retry_after,
            )
        if self.current is None:
            raise EngineLoading("the model is still loading")

    @property
    def runtime(self) -> Runtime:
        """The runtime of new requests. Raises EngineLoading where there is none yet."""
        if self.current is None:
            raise EngineLoading("the model is still loading")
        return self.current

    def most_snapshot_bytes(self) -> int:
        """The most bytes that a snapshot of the present model may have."""
        state = 0 if self.current is None else self.current.info.state_bytes
        return state + SNAPSHOT_REST

    @property
    def requests(self) -> set[InferenceRequest]:
        """Every HTTP request for a model that has not ended."""
        return set().union(*(runtime.requests for runtime in self._generations))

    def load(self) -> Stats:
        """The load of all engines that this process uses, added up."""
        known = [client.stats for client in self._clients() if client.state == "ready"]
        if len(known) == 1:
            return known[0].load()
        return Stats(
            running=sum(stats.running for stats in known),
            waiting=sum(stats.waiting for stats in known),
            waiting_tokens=sum(stats.waiting_tokens for stats in known),
            slots_used=sum(stats.slots_used for stats in known),
            slots_total=sum(stats.slots_total for stats in known),
            state_bytes=sum(stats.state_bytes for stats in known),
            host_state_bytes=sum(stats.host_state_bytes for stats in known),
            disk_state_bytes=sum(stats.disk_state_bytes for stats in known),
            states=sum(stats.states for stats in known),
        )

    async def exposition(self) -> bytes:
        """Prometheus' text of all processes of this server, in UTF-8.

        Raises EngineUnavailable where they cannot be asked: a part of the counts would read as a
        reset of them all.
        """
        snapshot = self.metrics.snapshot()
        return snapshot.render(await self.engines.gather(snapshot.pack()))

    async def ping(self) -> None:
        """Returns when an engine has answered. Raises EngineUnavailable."""
        if self.current is not None:
            await self.current.backend.ping(self.settings.ping_timeout)

    async def live(self) -> None:
        """Follows what happens to the engines until there is none any more, or until cancelled.

        Raises nothing: a failure is kept in `failure` and told to `on_failure`.
        """
        try:
            await self.engines.start(lambda: self.metrics.snapshot().pack())
            while self.failure is None:
                match event := await self.engines.next():
                    case Serving():
                        await self._take(event)
                    case Restarting():
                        self.outage = event.error
                    case Stop():
                        self.on_stop(event.now)
                    case NoEngine():
                        self._fail(event.error)
        except EngineError as error:
            self._fail(error)
        except Exception as error:
            logger.exception("unexpected error while loading")
            self._fail(EngineDead(f"unexpected error while loading: {error}"))

    async def end_those_behind(self) -> None:
        """Ends streams whose readers are too slow, until cancelled.

        Nothing holds the engine back, so what waits for them would take memory without bound.
        """
        while True:
            await asyncio.sleep(UNREAD_SECONDS)
            self._end_behind()

    def _end_behind(self) -> None:
        # Not in the loop above, which would hold the last one while it sleeps.
        for inference in self.requests:
            inference.end_if_behind(self.settings.max_unread)

    async def drain(self, timeout: float) -> None:
        """Takes no new requests and returns when everything in flight has ended.

        After `timeout` seconds what is left is made to end with what it has. A request is in flight
        from its arrival on.
        """
        self.draining = True
        self.engines.hold()
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                await self._all_ended()
        self.cut()

    async def _all_ended(self) -> None:
        """Returns when nothing is in flight, whichever runtime it began with."""
        while busy := [one for one in self._generations if not one.requests.all_ended]:
            await busy[0].requests.ended()

    def cut(self) -> None:
        """Ends everything in flight with what it has."""
        for inference in self.requests:
            inference.cut()

    async def close(self) -> None:
        """Leaves all engines; whatever is still under way is abandoned."""
        for task in list(self._tasks):
            task.cancel()
        await self.engines.close()

    async def _take(self, event: Serving) -> None:
        backend, known = event.backend, self._clients()
        try:
            runtime = await Runtime.load(backend, self.settings, self.metrics, self.current)
        except EngineError:
            if backend.state != "dead":
                raise
            await self._leave(event.generations)  # the next event tells of their end
            return
        for client in backend.clients:
            if client not in known:
                client.on_step(self.metrics.on_step)
        self._tell_limits(len(backend.clients))
        self.metrics.model_loaded(runtime.model_name, runtime.info)
        old, self.current = self.current, runtime
        self._generations[runtime] = event.generations
        self.outage, self.restarts = None, event.restarts
        self.engines.use(max(event.generations))
        if old is not None:
            self._keep(self._retire(old))
        info, where = runtime.info, self._where(runtime)
        if where == self._told_where and old is not None and old.shares(backend):
            return  # nothing is new for who reads the log
        self._told_where = where
        logger.info(
            "ready: %s (%s parameters) on %s, %s%s%s",
            runtime.model_name,
            f"{info.parameters:,}",
            where,
            info.dtype,
            f", {info.quantization} weights" if info.quantization else "",
            ", deterministic" if info.deterministic else "",
        )

    def _tell_limits(self, engines: int) -> None:
        """To the metrics, where so many serve."""
        waiting, tokens = self.settings.max_waiting, self.settings.max_waiting_tokens
        self.metrics.set_limits(waiting * engines, tokens * engines)

    def _where(self, runtime: Runtime) -> str:
        name, wanted = runtime.info.device_name, self.settings.engines
        if wanted == 1:
            return name
        there = sum(client.state != "dead" for client in runtime.backend.clients)
        return f"{there} x {name}" + (f" of {wanted}" if there < wanted else "")

    def _keep(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _retire(self, runtime: Runtime) -> None:
        """Gives engines up when nothing is in flight there any more."""
        await runtime.requests.ended()
        await self._leave(self._generations.pop(runtime))

    async def _leave(self, generations: Iterable[int]) -> None:
        """Those of these engines that no other runtime has."""
        needed = set().union(*self._generations.values())
        for generation in generations:
            if generation not in needed:
                await self.engines.leave(generation)

    def _held_by_each(self) -> list[int | None]:
        """How many requests each engine holds, None for one that is missing."""
        clients = [] if self.current is None else self.current.backend.by_rank
        return [
            client.in_flight if client is not None and client.state == "ready" else None
            for client in clients
        ]

    def _clients(self) -> set[EngineClient]:
        """Of all engines that this process has to do with."""
        return {client for runtime in self._generations for client in runtime.backend.clients}

    def _fail(self, error: EngineError) -> None:
        self.failure = error
        logger.error("error: %s", error.message)
        if self._on_failure is not None:
            self._on_failure(error)


def get_lifecycle(request: Request) -> Lifecycle:
    """The application's lifecycle, as a FastAPI dependency."""
    lifecycle: Lifecycle = request.app.state.lifecycle
    return lifecycle
