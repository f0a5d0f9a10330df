"""How an EngineClient reaches an engine: in a process of its own, or in a thread of this one."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import queue
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Hashable, Iterable
from typing import Protocol

import msgspec
import zmq
import zmq.asyncio

from engine.config import EngineConfig
from engine.errors import EngineDead
from engine.loop import EngineLoop, SteppedEngine
from engine.messages import FromEngine, Ping, Shutdown, ToEngine
from engine.socket_folder import SocketFolder

log = logging.getLogger(__name__)

GREETING = Ping(nonce=0)
STOP_SECONDS = 3.0  # given to a Shutdown, and again to SIGTERM, before the next harder means
LAST_WORDS_MS = 100  # how long a dead worker's messages may be under way
MOST_LAST_WORDS = 20  # times LAST_WORDS_MS, should nobody receive them


class Transport(Protocol):
    """Carries messages to one engine and back; all methods are called on one event loop."""

    async def start(self) -> None:
        """Starts the engine; it need not be loaded when this returns. Raises EngineDead."""

    def send(self, message: ToEngine) -> None:
        """Never blocks. Raises EngineDead, or TypeError or ValueError if it cannot be encoded."""

    async def receive(self) -> FromEngine:
        """The next message. Raises EngineDead when the engine has ended and all is received."""

    async def close(self) -> None:
        """Ends the engine, by force if need be; returns when it has ended. Idempotent."""


class ProcessTransport:
    """Runs `engine.worker` as a child process and speaks ZeroMQ over a unix socket to it.

    `engine` names the worker's engine factory, "module:function"; tests put a fake there.
    """

    def __init__(self, config: EngineConfig, engine: str | None = None) -> None:
        self._config = config
        self._engine = engine
        self.address: str | None = None  # the worker's, while there is one
        self._folder: SocketFolder | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._context: zmq.asyncio.Context | None = None
        self._socket: zmq.asyncio.Socket | None = None
        self._watcher: asyncio.Task[None] | None = None
        self._receiving: asyncio.Future[bytes] | None = None
        self._dead: EngineDead | None = None
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(FromEngine)

    @property
    def pid(self) -> int | None:
        """Of the worker, once it is started."""
        return None if self._process is None else self._process.pid

    async def start(self) -> None:
        try:
            self._folder = SocketFolder()
        except OSError as error:
            raise EngineDead(f"the engine's socket has no place: {error}") from error
        self.address = address = f"ipc://{self._folder.socket}"
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.set_hwm(0)
        self._socket.connect(address)
        command = ["-P", "-m", "engine.worker", address]
        command += [msgspec.json.encode(self._config).decode(), "--parent", str(os.getpid())]
        if self._engine is not None:
            command += ["--engine", self._engine]
        # The worker finds the modules that this process finds, and no others: -P keeps a folder
        # named `engine` in the working directory from taking the package's place.
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        try:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable, *command, stdin=asyncio.subprocess.DEVNULL, env=environment
            )
        except OSError as error:
            self._release()
            reason = f"{sys.executable}: {error.strerror or error}"
            raise EngineDead(f"the engine process cannot be started: {reason}") from error
        self._watcher = asyncio.create_task(self._watch(self._process, self._socket))
        self.send(GREETING)

    def send(self, message: ToEngine) -> None:
        if self._dead is not None or self._socket is None:
            raise self._dead or EngineDead("the engine process is not started")
        # Done when it returns: without a high-water mark a send never has to wait.
        self._socket.send(self._encoder.encode(message))

    async def receive(self) -> FromEngine:
        while True:
            if self._dead is not None or self._socket is None:
                raise self._dead or EngineDead("the engine process is not started")
            self._receiving = asyncio.ensure_future(self._socket.recv())
            raw = await self._receiving
            try:
                message: FromEngine = self._decoder.decode(raw)
                return message
            except msgspec.MsgspecError as error:
                log.error("dropped a malformed message of the engine: %s", error)

    async def close(self) -> None:
        process, watcher = self._process, self._watcher
        if process is None or watcher is None:
            self._release()
            return
        with contextlib.suppress(EngineDead):
            self.send(Shutdown())
        if not await _ends(watcher):
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
            if not await _ends(watcher):
                log.warning("the engine process does not end; killing it")
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                await watcher
        self._release()

    async def _watch(self, process: asyncio.subprocess.Process, socket: zmq.asyncio.Socket) -> None:
        """Waits for the process's end and then ends `receive`."""
        code = await process.wait()
        for _ in range(MOST_LAST_WORDS):
            if not await socket.poll(LAST_WORDS_MS):
                break
            await asyncio.sleep(LAST_WORDS_MS / 1000)
        self._dead = EngineDead(f"the engine process has ended ({_describe_exit(code)})")
        if self._receiving is not None and not self._receiving.done():
            self._receiving.set_exception(self._dead)

    def _release(self) -> None:
        if self._socket is not None and self._context is not None:
            self._socket.close(linger=0)
            self._context.term()
        if self._folder is not None:
            self._folder.remove()
        self._dead = self._dead or EngineDead("the engine process has been closed")
        self.address = self._folder = self._socket = self._context = self._process = (
            self._watcher
        ) = None


async def _ends(task: asyncio.Task[None]) -> bool:
    """Whether a task ends within STOP_SECONDS."""
    done, _ = await asyncio.wait({task}, timeout=STOP_SECONDS)
    return bool(done)


def _describe_exit(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"


class InlineTransport:
    """Steps an engine on a thread of this process: for tests and one-off commands."""

    def __init__(self, engine: SteppedEngine) -> None:
        self._engine = engine
        self._inbox: queue.SimpleQueue[ToEngine] = queue.SimpleQueue()
        self._outbox: deque[FromEngine] = deque()
        self._news = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._ended = False

    async def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()
        self.send(GREETING)

    def send(self, message: ToEngine) -> None:
        if self._ended or self._thread is None:
            raise EngineDead("the in-line engine has ended")
        self._inbox.put(message)

    async def receive(self) -> FromEngine:
        while not self._outbox:
            if self._ended:
                raise EngineDead("the in-line engine has ended")
            self._news.clear()
            await self._news.wait()
        return self._outbox.popleft()

    async def close(self) -> None:
        if self._thread is None:
            return
        self._inbox.put(Shutdown())
        await asyncio.to_thread(self._thread.join, STOP_SECONDS)
        if self._thread.is_alive():
            log.warning("the in-line engine does not end; its thread is left behind")
        self._end()

    def _run(self) -> None:
        try:
            EngineLoop(self._engine, _QueueMailbox(self._inbox, self._hand_over)).run()
        except Exception:
            log.exception("the in-line engine has died")
        self._on_loop(self._end)

    def _hand_over(self, message: FromEngine) -> None:
        self._on_loop(lambda: self._put(message))

    def _on_loop(self, callback: Callable[[], None]) -> None:
        assert self._loop is not None
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody listens any more
            self._loop.call_soon_threadsafe(callback)

    def _put(self, message: FromEngine) -> None:
        self._outbox.append(message)
        self._news.set()

    def _end(self) -> None:
        self._ended = True
        self._news.set()


class _QueueMailbox:
    """The one client of an in-line engine."""

    def __init__(
        self, inbox: queue.SimpleQueue[ToEngine], deliver: Callable[[FromEngine], None]
    ) -> None:
        self._inbox = inbox
        self._deliver = deliver

    def receive(self, timeout: float) -> Iterable[tuple[Hashable, ToEngine]]:
        try:
            yield None, self._inbox.get(block=timeout > 0, timeout=timeout)
            while True:
                yield None, self._inbox.get_nowait()
        except queue.Empty:
            return

    def send(self, client: Hashable, message: FromEngine) -> None:
        self._deliver(message)
