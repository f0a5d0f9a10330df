"""SupervisorClient: an API process's link to the supervisor, and its connections to engines.

Everything that happens is delivered as a sequence of events. A single API process runs the
supervisor itself, through a LocalSupervisorClient.
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

GATHER_SECONDS = 10.0  # wait for the supervisor to report the metrics of other processes


@dataclass(frozen=True)
class Serving:
    """Event: new requests must go to `backend`; confirm by calling `use`."""

    backend: EngineBackend  # connected
    generations: tuple[int, ...]  # generations of the engines behind `backend`
    restarts: int = 0  # restarts so far of engines that died


@dataclass(frozen=True)
class Restarting:
    """Event: no engine serves now; `error` says why, and when another may."""

    error: EngineError


@dataclass(frozen=True)
class NoEngine:
    """Event: no engine is left, and none will be started."""

    error: EngineError


@dataclass(frozen=True)
class Stop:
    """Event: the process must end, after its requests in flight or, with `now`, at once."""

    now: bool


Event: TypeAlias = Serving | Restarting | NoEngine | Stop


class SupervisorClient:
    """An API process's view of its engines.

    All methods are called on one event loop: `start` first, `close` last, `next` by one task.
    """

    def __init__(self, pipe: Pipe[ToApiProcess, FromApiProcess]) -> None:
        """Create the client; `pipe` is this side's end, not opened yet."""
        self._pipe = pipe
        self._name = ""
        self._connections: dict[int, tuple[EngineClient, SocketTransport]] = {}  # by generation
        self._lost: set[int] = set()  # generations of engines that ended by themselves
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        self._router: EngineRouter | None = None  # the latest router
        self._calls = PendingCalls(pipe.send)
        self._reader: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._collect: Callable[[], bytes] = bytes

    async def start(self, collect: Callable[[], bytes] = bytes) -> None:
        """Open the pipe and start reading messages.

        Args:
            collect: returns this process's metrics, packed; called whenever they are requested.
        """
        self._collect = collect
        await self._pipe.open()
        self._reader = asyncio.create_task(self._read())

    async def next(self) -> Event:
        """Wait for the next event; none follows NoEngine."""
        return await self._events.get()

    def use(self, generation: int) -> None:
        """Report that new requests go to engines up to `generation`, the newest of a `Serving`."""
        self._pipe.send(Using(generation))

    async def leave(self, generation: int) -> None:
        """Disconnect from an engine on which nothing is in flight, or ever will be."""
        connection = self._connections.pop(generation, None)
        if connection is not None:
            await connection[0].close()
        self._pipe.send(Left(generation))

    async def reload(self, model: str | None) -> ModelInfo:
        """Load a model in engines that replace the serving ones.

        Args:
            model: folder or name; None: load the present one again.

        Returns:
            The model's info, once new requests of all API processes go to the new engines.

        Raises:
            EngineError: as Supervisor.reload; EngineDead if the supervisor has ended.
        """
        reply = await self._ask("reload", model=model)
        if reply.error is not None:
            raise reply.error.decode()
        assert reply.info is not None
        return reply.info

    async def gather(self, own: bytes) -> list[bytes]:
        """Return the metrics of all other processes, including those that have ended.

        Args:
            own: this process's metrics, to be reported to others.

        Raises:
            EngineUnavailable: the supervisor does not answer within GATHER_SECONDS.
            EngineDead: the supervisor has ended.
        """
        try:
            async with asyncio.timeout(GATHER_SECONDS):
                return (await self._ask("gather", own=own)).samples
        except TimeoutError:
            raise EngineUnavailable("the supervising process does not answer") from None

    def hold(self) -> None:
        """Start no more engines, because the server is shutting down."""

    async def close(self) -> None:
        """Disconnect from all engines and the supervisor."""
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
                    log.exception("a message from the supervisor could not be handled")
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
            case Call():  # "collect", the only call in this direction
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
    """Return a client of the supervisor in the parent process (`ApiProcessPool`).

    `descriptor` is the inherited file descriptor of this process's end of the pipe.
    """
    return SupervisorClient(SocketPipe(socket.socket(fileno=descriptor), ToApiProcess))


class LocalSupervisorClient(SupervisorClient):
    """The only client of a supervisor in the same process; it runs the supervisor."""

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
        """Return nothing, because there are no other processes."""
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
