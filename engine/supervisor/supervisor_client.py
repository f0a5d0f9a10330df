"""SupervisorClient: an API process's end of a supervisor, and its connections to the engines that
it is told of. What happens comes as events, one after the other.

A single API process has the supervisor in itself, and a LocalSupervisorClient, which runs that.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import socket
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from engine.client.client import EngineClient
from engine.client.interface import EngineBackend
from engine.client.prefix_affinity import PrefixAffinity
from engine.client.router import EngineRouter
from engine.client.socket_transport import SocketTransport
from engine.errors import EngineDead, EngineError, EngineUnavailable
from engine.protocol.events import ModelInfo
from engine.supervisor.channel import Pipe, SocketPipe, memory_pipe
from engine.supervisor.control_messages import (
    Collect,
    ControlReply,
    Cut,
    Down,
    Drain,
    EngineEndpoint,
    FromMember,
    Gather,
    Left,
    Reload,
    Samples,
    Serve,
    ToMember,
    Using,
    Welcome,
)

if TYPE_CHECKING:
    from engine.supervisor.supervisor import Supervisor

log = logging.getLogger(__name__)

GATHER_SECONDS = 10.0  # for the supervisor to tell what other members count


@dataclass(frozen=True)
class Serving:
    """New requests are to go here: say so by `use`."""

    backend: EngineBackend  # connected
    generations: tuple[int, ...]  # of the engines that it stands for
    restarts: int = 0  # so far, of engines that died


@dataclass(frozen=True)
class Restarting:
    """The engine has ended, for this reason, which tells when there may be another."""

    error: EngineError


@dataclass(frozen=True)
class NoEngine:
    """There is no engine, and will be none."""

    error: EngineError


@dataclass(frozen=True)
class Stop:
    """The process is to end: after what it has in flight or, `now`, with it."""

    now: bool


Event: TypeAlias = Serving | Restarting | NoEngine | Stop


class SupervisorClient:
    """All methods are called on one event loop."""

    def __init__(self, pipe: Pipe[ToMember, FromMember]) -> None:
        self._pipe = pipe
        self._name = ""
        self._connections: dict[int, tuple[EngineClient, SocketTransport]] = {}  # by generation
        self._lost: set[int] = set()  # generations of engines that have ended by themselves
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        self._familiars: PrefixAffinity[EngineClient] = PrefixAffinity()
        self._nonces = itertools.count()
        self._asked: dict[int, asyncio.Future[ControlReply]] = {}
        self._reader: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._collect: Callable[[], bytes] = bytes

    async def start(self, collect: Callable[[], bytes] = bytes) -> None:
        """Begins to listen. `collect` gives this process's metrics whenever they are asked for."""
        self._collect = collect
        await self._pipe.open()
        self._reader = asyncio.create_task(self._read())

    async def next(self) -> Event:
        """Waits for what happens next."""
        return await self._events.get()

    def use(self, generation: int) -> None:
        """New requests go to engines up to this one now, the youngest of a `Serving`."""
        self._pipe.send(Using(generation))

    async def leave(self, generation: int) -> None:
        """Nothing is in flight on this engine, and never will be again."""
        connection = self._connections.pop(generation, None)
        if connection is not None:
            await connection[0].close()
        self._pipe.send(Left(generation))

    async def reload(self, model: str | None) -> ModelInfo:
        """As `Supervisor.reload`."""
        answer = await self._ask(lambda nonce: Reload(nonce, model))
        if answer.problem is not None:
            raise answer.problem.error()
        assert answer.info is not None
        return answer.info

    async def gather(self, own: bytes) -> list[bytes]:
        """The metrics of all other processes, those that are no more included; tells `own`, which
        are this one's. Raises EngineUnavailable."""
        try:
            async with asyncio.timeout(GATHER_SECONDS):
                return (await self._ask(lambda nonce: Gather(nonce, own))).samples
        except TimeoutError:
            raise EngineUnavailable("the supervising process does not answer") from None

    def hold(self) -> None:
        """The server is shutting down: no engine is to be started any more."""

    async def close(self) -> None:
        """Leaves all engines and the supervisor."""
        for generation in list(self._connections):
            await self.leave(generation)
        self._pipe.close()
        if self._reader is not None:
            await asyncio.wait({self._reader}, timeout=1)
            self._reader.cancel()
        for task in list(self._tasks):
            task.cancel()

    async def _ask(self, question: Callable[[int], FromMember]) -> ControlReply:
        if self._reader is None or self._reader.done():
            raise EngineDead("the supervising process has ended")
        nonce = next(self._nonces)
        answer: asyncio.Future[ControlReply] = asyncio.get_running_loop().create_future()
        self._asked[nonce] = answer
        try:
            self._pipe.send(question(nonce))
            return await answer
        finally:
            del self._asked[nonce]

    async def _read(self) -> None:
        try:
            while True:
                message = await self._pipe.receive()
                try:
                    await self._take(message)
                except Exception:
                    log.exception("an order of the supervisor could not be carried out")
        except EOFError:
            error = EngineDead("the supervising process has ended")
        for answer in self._asked.values():
            if not answer.done():
                answer.set_exception(error)
        self._events.put_nowait(NoEngine(error))

    async def _take(self, message: ToMember) -> None:
        match message:
            case Welcome():
                self._name = message.name
            case Serve():
                await self._connect(message)
            case Down():
                self._lose(message)
            case Collect():
                self._pipe.send(Samples(message.nonce, self._collect()))
            case ControlReply():
                waiting = self._asked.get(message.nonce)
                if waiting is not None and not waiting.done():
                    waiting.set_result(message)
            case Drain() | Cut():
                self._events.put_nowait(Stop(now=isinstance(message, Cut)))

    async def _connect(self, order: Serve) -> None:
        clients: list[EngineClient | None] = []
        for seat in order.seats:
            clients.append(None if seat is None else await self._client(seat))
        backend: EngineBackend | None = clients[0]
        if len(clients) > 1:
            backend = EngineRouter(clients, order.waits, self._familiars)
        assert backend is not None
        self._events.put_nowait(Serving(backend, tuple(order.generations), order.restarts))

    async def _client(self, seat: EngineEndpoint) -> EngineClient:
        if seat.generation not in self._connections:
            transport = SocketTransport(seat.address, name=self._name)
            client = EngineClient(transport)
            self._connections[seat.generation] = client, transport
            await client.start()
        return self._connections[seat.generation][0]

    def _lose(self, message: Down) -> None:
        error = message.problem.error()
        connection = self._connections.get(message.generation)
        if connection is not None and message.generation not in self._lost:
            self._lost.add(message.generation)
            self._keep(connection[1].end(EngineDead(error.message, retry_after=error.retry_after)))
        if message.final:
            self._events.put_nowait(NoEngine(error))
        elif message.current:
            self._events.put_nowait(Restarting(error))

    def _keep(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def remote_member(descriptor: int) -> SupervisorClient:
    """The member of a supervisor in the process that started this one (`ApiProcessPool`), which
    left the end of a pipe open here."""
    return SupervisorClient(SocketPipe(socket.socket(fileno=descriptor), ToMember))


class LocalSupervisorClient(SupervisorClient):
    """The one member of a supervisor in the same process, which it runs from its start to its
    end."""

    def __init__(self, supervisor: Supervisor) -> None:
        self._supervisor = supervisor
        self._ruling: asyncio.Task[EngineError] | None = None
        mine, theirs = memory_pipe()
        super().__init__(mine)
        self._theirs = theirs

    async def start(self, collect: Callable[[], bytes] = bytes) -> None:
        await super().start(collect)
        self._supervisor.join(self._theirs)
        self._ruling = asyncio.create_task(self._supervisor.run())

    async def gather(self, own: bytes) -> list[bytes]:
        """There are no others."""
        return []

    def hold(self) -> None:
        self._supervisor.hold()

    async def close(self) -> None:
        if self._ruling is not None:
            self._ruling.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._ruling
        await super().close()
        await self._supervisor.close()
