"""ApiRegistry: the supervisor's list of its API processes.

It knows which engines each process still uses, and the metrics that each reported last.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from engine.errors import EngineError
from engine.protocol.events import ModelInfo
from engine.supervisor.channel import PendingCalls, Pipe
from engine.supervisor.control_messages import (
    Call,
    EncodedError,
    FromApiProcess,
    Left,
    Reply,
    Serve,
    ToApiProcess,
    Using,
    Welcome,
)

log = logging.getLogger(__name__)

ApiPipe: TypeAlias = Pipe[FromApiProcess, ToApiProcess]
COLLECT_SECONDS = 2.0  # wait for a process's metrics; then its last reported ones are used


@dataclass(eq=False)
class _ApiProcess:
    name: str
    pipe: ApiPipe
    calls: PendingCalls
    using: int = 0  # newest engine generation that its new requests go to
    needs: set[int] = field(default_factory=set)  # generations on which it may have requests
    samples: bytes | None = None  # the process's metrics, as last reported


class ApiRegistry:
    """The API processes by name; all methods are called on one event loop."""

    def __init__(
        self,
        reload: Callable[[str | None], Awaitable[ModelInfo]],
        on_unneeded: Callable[[int], None],
        fold: Callable[[list[bytes]], bytes] | None,
    ) -> None:
        """Create an empty registry.

        Args:
            reload: carries out a `reload` call (Supervisor.reload).
            on_unneeded: called with an engine generation that no process uses any more.
            fold: merges the metrics of ended processes, so that counters never decrease; None:
                their metrics are dropped.
        """
        self._reload = reload
        self._on_unneeded = on_unneeded
        self._fold = fold
        self._processes: dict[str, _ApiProcess] = {}
        self._departed: bytes | None = None  # merged metrics of ended processes
        self._numbers = itertools.count()
        self._changed = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    def add(self, pipe: ApiPipe) -> str:
        """Add a process and return its new, unique name; `pipe` is the supervisor's end."""
        name = f"api-{next(self._numbers)}"
        self._processes[name] = _ApiProcess(name, pipe, PendingCalls(pipe.send))
        pipe.send(Welcome(name))
        return name

    async def listen(self, name: str) -> None:
        """Handle a process's messages until its end of the pipe is closed."""
        process = self._processes[name]
        try:
            while True:
                self._handle(process, await process.pipe.receive())
        except EOFError:
            pass
        finally:
            self._remove(process)

    def tell(self, message: ToApiProcess) -> None:
        """Send a message to all processes."""
        for process in self._processes.values():
            process.pipe.send(message)

    def serve(self, order: Serve, only: str | None = None) -> None:
        """Tell all processes, or only the named one, which engines new requests must go to."""
        for process in self._processes.values():
            if only in (None, process.name):
                process.needs.update(order.generations)
                process.pipe.send(order)

    def need(self, generation: int) -> bool:
        """Return whether any process may have requests in flight on this engine."""
        return any(generation in process.needs for process in self._processes.values())

    async def answers(self, name: str, seconds: float) -> bool:
        """Return whether a process answers within `seconds`; this also updates its metrics."""
        process = self._processes.get(name)
        if process is None:
            return False
        return bool(await _within(seconds, [process.calls.ask("collect")]))

    async def all_use(self, generation: int) -> None:
        """Wait until no process sends new requests to an engine older than `generation`."""
        while any(process.using < generation for process in self._processes.values()):
            self._changed.clear()
            await self._changed.wait()

    def close(self) -> None:
        """Close all pipes."""
        for task in list(self._tasks):
            task.cancel()
        for process in list(self._processes.values()):
            process.pipe.close()

    def _handle(self, process: _ApiProcess, message: FromApiProcess) -> None:
        match message:
            case Using():
                process.using = max(process.using, message.generation)
                self._changed.set()
            case Left():
                self._leave(process, message.generation)
            case Call():
                if message.method == "gather":
                    process.samples = message.own
                self._spawn(self._answer(process, message))
            case Reply():  # to a "collect", possibly one that timed out
                (process.samples,) = message.samples
                process.calls.resolve(message)

    def _leave(self, process: _ApiProcess, generation: int) -> None:
        process.needs.discard(generation)
        if not self.need(generation):
            self._on_unneeded(generation)

    def _remove(self, process: _ApiProcess) -> None:
        del self._processes[process.name]
        process.pipe.close()
        process.calls.close()
        for generation in list(process.needs):
            self._leave(process, generation)
        self._changed.set()
        if process.samples is not None and self._fold is not None:
            known = [one for one in (self._departed, process.samples) if one is not None]
            self._departed = self._fold(known)

    async def _answer(self, process: _ApiProcess, call: Call) -> None:
        try:
            match call.method:
                case "reload":
                    reply = Reply(call.id, info=await self._reload(call.model))
                case "gather":
                    reply = Reply(call.id, samples=await self._gather(process))
                case "collect":
                    raise EngineError("a supervisor has no metrics of its own")
        except EngineError as error:
            reply = Reply(call.id, error=EncodedError.of(error))
        except Exception as error:
            log.exception("unexpected error in a %s", call.method)
            message = f"the {call.method} failed: {error}"
            reply = Reply(call.id, error=EncodedError(EngineError.code, message))
        process.pipe.send(reply)

    async def _gather(self, asker: _ApiProcess) -> list[bytes]:
        """Return the metrics of all other processes, including those that have ended."""
        asked = [process.calls.ask("collect") for process in self._others(asker)]
        if asked:
            await _within(COLLECT_SECONDS, asked)
        # Processes that ended meanwhile are part of `_departed` now.
        known = [self._departed, *(process.samples for process in self._others(asker))]
        return [one for one in known if one is not None]

    def _others(self, asker: _ApiProcess) -> list[_ApiProcess]:
        return [process for process in self._processes.values() if process is not asker]

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


async def _within(seconds: float, asked: list[asyncio.Future[Reply]]) -> set[asyncio.Future[Reply]]:
    """Return the futures that are done within `seconds`; the others are cancelled."""
    done, late = await asyncio.wait(asked, timeout=seconds)
    for one in late:
        one.cancel()
    return done
