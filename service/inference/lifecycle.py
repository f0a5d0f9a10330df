"""Lifecycle: the state of an API process, and the runtime that new requests get.

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

# Bytes of a snapshot beside its state, at most. A coarse limit for uploads:
# engine.cache.storage.snapshot checks the exact size.
SNAPSHOT_REST = 2**17
UNREAD_SECONDS = 0.25  # between checks for streams whose readers are too slow


class Lifecycle:
    """The state of one API process, with its current runtime and those that finish their requests.

    `on_stop` is called when a supervisor ends this process; its argument says whether at once.
    """

    def __init__(
        self,
        engines: Engines,
        settings: Settings,
        on_failure: Callable[[EngineError], None] | None = None,
    ) -> None:
        """`on_failure`: called once, when the model cannot be loaded or no engine is left."""
        self.engines = engines
        self.settings = settings
        self.metrics = Metrics(
            self.load, lambda: self.restarts, self._held_by_each, settings.engines
        )
        self._tell_limits(settings.engines)
        self.failure: EngineError | None = None
        self.outage: EngineError | None = None  # while the engine is started again
        self.draining = False
        self.restarts = 0  # engines that were started in the place of one that died
        # Adds the metrics of this server's replicas; None: there are none.
        self.with_others: Callable[[bytes], Coroutine[Any, Any, bytes]] | None = None
        self.on_stop: Callable[[bool], None] = lambda now: None
        self.current: Runtime | None = None  # the runtime of new requests
        self._told_where = ""  # what the log said last about the engines
        # The engines' generations of every runtime that has not been retired.
        self._generations: dict[Runtime, tuple[int, ...]] = {}
        self._on_failure = on_failure
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def state(self) -> Literal["loading", "ready", "restarting", "draining", "failed"]:
        """The current state; see the module's docstring."""
        if self.failure is not None:
            return "failed"
        if self.draining:
            return "draining"
        if self.outage is not None:
            return "restarting"
        return "loading" if self.current is None else "ready"

    def check_ready(self) -> None:
        """Raise EngineDead, Draining or EngineLoading if no request can be taken now."""
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
        """The runtime of new requests. Raises EngineLoading if there is none yet."""
        if self.current is None:
            raise EngineLoading("the model is still loading")
        return self.current

    def most_snapshot_bytes(self) -> int:
        """Return the largest size in bytes of a state file of the present model."""
        state = 0 if self.current is None else self.current.info.state_bytes
        return state + SNAPSHOT_REST

    def most_inline_bytes(self) -> int:
        """Return the largest size in bytes of a state file in base64, within a body."""
        return -(-self.most_snapshot_bytes() // 3) * 4

    @property
    def requests(self) -> set[InferenceRequest]:
        """All HTTP requests in flight, of all runtimes."""
        return set().union(*(runtime.requests for runtime in self._generations))

    def load(self) -> Stats:
        """Return the load of all engines that this process uses, summed."""
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
        """Return the metrics of all processes of this server as Prometheus' text, in UTF-8.

        Raises EngineUnavailable if a process does not answer: Prometheus would take smaller sums
        for a reset of the counters.
        """
        own = await self.own_exposition()
        return own if self.with_others is None else await self.with_others(own)

    async def own_exposition(self) -> bytes:
        """Return `exposition` without the metrics of other replicas."""
        snapshot = self.metrics.snapshot()
        return snapshot.render(await self.engines.gather(snapshot.pack()))

    async def ping(self) -> None:
        """Return when an engine has answered. Raises EngineUnavailable."""
        if self.current is not None:
            await self.current.backend.ping(self.settings.ping_timeout)

    async def live(self) -> None:
        """Follow the engines' events until no engine is left, or until cancelled.

        Raises nothing: a failure is stored in `failure` and passed to `on_failure`.
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
        """End streams whose readers are too slow, until cancelled.

        The engine has no back pressure, so unread output would take memory without bound.
        """
        while True:
            await asyncio.sleep(UNREAD_SECONDS)
            self._end_behind()

    def _end_behind(self) -> None:
        # A method, so that the loop above does not refer to a request while it sleeps.
        for inference in self.requests:
            inference.end_if_behind(self.settings.max_unread)

    async def drain(self, timeout: float) -> None:
        """Take no new requests, and return when all requests in flight have ended.

        After `timeout` seconds the remaining requests are ended with what they have. A request is
        in flight from its arrival on.
        """
        self.draining = True
        self.engines.hold()
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                await self._all_ended()
        self.cut()

    async def _all_ended(self) -> None:
        """Return when no runtime has a request in flight."""
        while busy := [one for one in self._generations if not one.requests.all_ended]:
            await busy[0].requests.ended()

    def cut(self) -> None:
        """End all requests in flight with what they have."""
        for inference in self.requests:
            inference.cut()

    async def close(self) -> None:
        """Release all engines, and abandon what is still running."""
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
            await self._leave(event.generations)  # the next event will report that they died
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
            return  # nothing new to log
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
        """Set the metrics of the queues' limits for this number of engines."""
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
        """Release a runtime's engines when its last request has ended."""
        await runtime.requests.ended()
        await self._leave(self._generations.pop(runtime))

    async def _leave(self, generations: Iterable[int]) -> None:
        """Release those of these engines that no other runtime uses."""
        needed = set().union(*self._generations.values())
        for generation in generations:
            if generation not in needed:
                await self.engines.leave(generation)

    def _held_by_each(self) -> list[int | None]:
        """Return how many requests each engine holds; None for an engine that is missing."""
        clients = [] if self.current is None else self.current.backend.by_rank
        return [
            client.in_flight if client is not None and client.state == "ready" else None
            for client in clients
        ]

    def _clients(self) -> set[EngineClient]:
        """Return the clients of all engines that this process uses."""
        return {client for runtime in self._generations for client in runtime.backend.clients}

    def _fail(self, error: EngineError) -> None:
        self.failure = error
        logger.error("error: %s", error.message)
        if self._on_failure is not None:
            self._on_failure(error)


def get_lifecycle(request: Request) -> Lifecycle:
    """Return the application's lifecycle; a FastAPI dependency."""
    lifecycle: Lifecycle = request.app.state.lifecycle
    return lifecycle
