"""SupervisorClient: an API process's end of a supervisor, and its connections to the engines that
it is told of. What happens comes as events, one after the other.

A single API process has the supervisor in itself, and a LocalSupervisorClient, which runs that.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from engine.client.client import EngineClient
from engine.client.interface import EngineBackend
from engine.client.router import EngineRouter
from engine.client.socket_transport import SocketTransport
from engine.errors import EngineDead, EngineError, EngineUnavailable
from engine.protocol.events import ModelInfo
from engine.supervisor.channel import PendingCalls, Pipe, SocketPipe, memory_pipe
from engine.supervisor.control_messages import (
    Call,
    Down,
    EngineEndpoint,
    FromApiProcess,
    Left,
    Method,
    Reply,
    Serve,
    Shutdown,
    ToApiProcess,
    Using,
    Welcome,
)

if TYPE_CHECKING:
    from engine.supervisor.supervisor import Supervisor

log = logging.getLogger(__name__)

GATHER_SECONDS = 10.0  # for the supervisor to tell the metrics of other processes


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
    """What an API process knows of its engines. All methods are called on one event loop: `start`
    first, `close` last, `next` by one task."""

    def __init__(self, pipe: Pipe[ToApiProcess, FromApiProcess]) -> None:
        """`pipe`: this side's end, not opened yet."""
        self._pipe = pipe
        self._name = ""
        self._connections: dict[int, tuple[EngineClient, SocketTransport]] = {}  # by generation
        self._lost: set[int] = set()  # generations of engines that have ended by themselves
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        self._router: EngineRouter | None = None  # the latest
        self._calls = PendingCalls(pipe.send)
        self._reader: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._collect: Callable[[], bytes] = bytes

    async def start(self, collect: Callable[[], bytes] = bytes) -> None:
        """Begins to listen.

        Args:
            collect: gives this process's metrics, packed; called whenever they are asked for.
        """
        self._collect = collect
        await self._pipe.open()
        self._reader = asyncio.create_task(self._read())

    async def next(self) -> Event:
        """Waits for what happens next; after NoEngine nothing does."""
        return await self._events.get()

    def use(self, generation: int) -> None:
        """Says that new requests go to engines up to this one, the youngest of a `Serving`."""
        self._pipe.send(Using(generation))

    async def leave(self, generation: int) -> None:
        """Disconnects from an engine on which nothing is in flight, nor will be again."""
        connection = self._connections.pop(generation, None)
        if connection is not None:
            await connection[0].close()
        self._pipe.send(Left(generation))

    async def reload(self, model: str | None) -> ModelInfo:
        """Loads a model in engines that take the place of those that serve.

        Args:
            model: folder or name; None: the present one again.

        Returns:
            What is known of it, once new requests of all API processes go there.

        Raises:
            EngineError: as Supervisor.reload; EngineDead where the supervisor has ended.
        """
        reply = await self._ask("reload", model=model)
        if reply.error is not None:
            raise reply.error.decode()
        assert reply.info is not None
        return reply.info

    async def gather(self, own: bytes) -> list[bytes]:
        """The metrics of all other processes, those that are no more included.

        Args:
            own: this process's, which others will be told.

        Raises:
            EngineUnavailable: the supervisor does not answer within GATHER_SECONDS.
            EngineDead: it has ended.
        """
        try:
            async with asyncio.timeout(GATHER_SECONDS):
                return (await self._ask("gather", own=own)).samples
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

    async def _ask(self, method: Method, model: str | None = None, own: bytes = b"") -> Reply:
        if self._reader is None or self._reader.done():
            raise EngineDead("the supervising process has ended")
        return await self._calls.ask(method, model, own)

    async def _read(self) -> None:
        try:
            while True:
                message = await self._pipe.receive()
                try:
                    await self._handle(message)
                except Exception:
                    log.exception("an order of the supervisor could not be carried out")
        except EOFError:
            error = EngineDead("the supervising process has ended")
        self._calls.close(error)
        self._events.put_nowait(NoEngine(error))

    async def _handle(self, message: ToApiProcess) -> None:
        match message:
            case Welcome():
                self._name = message.name
            case Serve():
                await self._connect(message)
            case Down():
                self._lose(message)
            case Call():  # "collect"; there is no other in this direction
                self._pipe.send(Reply(message.id, samples=[self._collect()]))
            case Reply():
                self._calls.resolve(message)
            case Shutdown():
                self._events.put_nowait(Stop(message.now))

    async def _connect(self, order: Serve) -> None:
        clients: list[EngineClient | None] = []
        for endpoint in order.endpoints:
            clients.append(None if endpoint is None else await self._client(endpoint))
        self._router = EngineRouter(clients, order.waits, self._router)
        self._events.put_nowait(Serving(self._router, tuple(order.generations), order.restarts))

    async def _client(self, endpoint: EngineEndpoint) -> EngineClient:
        if endpoint.generation not in self._connections:
            transport = SocketTransport(endpoint.address, name=self._name)
            client = EngineClient(transport)
            self._connections[endpoint.generation] = client, transport
            await client.start()
        return self._connections[endpoint.generation][0]

    def _lose(self, message: Down) -> None:
        error = message.error.decode()
        connection = self._connections.get(message.generation)
        if connection is not None and message.generation not in self._lost:
            self._lost.add(message.generation)
            self._spawn(connection[1].end(EngineDead(error.message, retry_after=error.retry_after)))
        if message.final:
            self._events.put_nowait(NoEngine(error))
        elif message.current:
            self._events.put_nowait(Restarting(error))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def remote_supervisor(descriptor: int) -> SupervisorClient:
    """A client of the supervisor in the process that started this one (`ApiProcessPool`), which
    left the end of a pipe open here, under this file descriptor."""
    return SupervisorClient(SocketPipe(socket.socket(fileno=descriptor), ToApiProcess))


class LocalSupervisorClient(SupervisorClient):
    """The one client of a supervisor in the same process, which it runs from its start to its
    end."""

    def __init__(self, supervisor: Supervisor) -> None:
        self._supervisor = supervisor
        self._running: asyncio.Task[EngineError] | None = None
        mine, theirs = memory_pipe()
        super().__init__(mine)
        self._theirs = theirs

    async def start(self, collect: Callable[[], bytes] = bytes) -> None:
        await super().start(collect)
        self._supervisor.join(self._theirs)
        self._running = asyncio.create_task(self._supervisor.run())

    async def gather(self, own: bytes) -> list[bytes]:
        """There are no other processes."""
        return []

    def hold(self) -> None:
        self._supervisor.hold()

    async def close(self) -> None:
        if self._running is not None:
            self._running.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._running
        await super().close()
        await self._supervisor.close()
