"""Transports: how an EngineClient reaches an engine.

The engine may be a child process (ProcessTransport), a process run by somebody else
(SocketTransport), or a thread of this process (engine/inline.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
from dataclasses import replace
from typing import Protocol

import msgspec
import zmq

from engine.client.ipc_folder import SocketFolder
from engine.config import STORE_VARIABLE, EngineConfig
from engine.errors import EngineDead
from engine.protocol.events import FromEngine
from engine.protocol.requests import Gone, Ping, Shutdown, ToEngine
from engine.subprocesses import describe_exit, module_environment

log = logging.getLogger(__name__)

GREETING = Ping(nonce=0)
_READABLE = int(zmq.POLLIN)
STOP_SECONDS = 3.0  # wait after Shutdown, and again after SIGTERM
LAST_WORDS_MS = 100  # how long the messages of an ended worker may take to arrive
MOST_LAST_WORDS = 20  # at most this many times LAST_WORDS_MS, in case nobody reads them
LEAVE_MS = 200  # how long a client's last messages may take to be sent


class Transport(Protocol):
    """Carries messages to one engine and back; all methods are called on one event loop."""

    async def start(self) -> None:
        """Start the engine; it may still be loading when this returns. Raises EngineDead."""

    def send(self, message: ToEngine) -> None:
        """Queue a message without blocking.

        Raises EngineDead, or TypeError or ValueError if the message cannot be encoded.
        """

    async def receive(self) -> FromEngine:
        """Return the next message. Raises EngineDead at the end, when all has been received."""

    async def close(self) -> None:
        """End the engine, by force if necessary, and wait for its end. Idempotent."""


class SocketTransport:
    """A ZeroMQ connection over a unix socket to an engine that somebody else runs.

    Whoever runs the engine must call `end` when it has ended.

    The event loop watches the raw socket, because a future for each message, as in zmq.asyncio,
    costs more than the message. Messages sent in one turn of the loop leave at its end as one list,
    because separate frames would cost both ends a microsecond each.
    """

    def __init__(self, address: str = "", name: str = "") -> None:
        """Create an unconnected transport.

        Args:
            address: the engine's ZeroMQ address.
            name: a unique name by which the engine knows this client; "": it gets a random one.
        """
        self.address: str | None = address or None  # address of the engine, while connected
        self._name = name
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._socket: zmq.Socket[bytes] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._waiter: asyncio.Future[None] | None = None  # set while `receive` waits
        self._received = 0  # number of messages
        self._leaving: list[msgspec.Raw] = []  # encoded messages to send at the end of this turn
        self._dead: EngineDead | None = None
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(FromEngine)

    async def start(self) -> None:
        self._connect()
        self.send(GREETING)

    def send(self, message: ToEngine) -> None:
        if self._dead is not None or self._socket is None:
            raise self._dead or EngineDead("there is no connection to the engine")
        encoded = self._encoder.encode(message)
        if not self._leaving:
            assert self._loop is not None
            self._loop.call_soon(self._flush)
        self._leaving.append(msgspec.Raw(encoded))

    def _flush(self) -> None:
        """Send the queued messages; this never blocks because there is no high-water mark."""
        leaving, self._leaving = self._leaving, []
        if leaving and self._socket is not None:
            self._socket.send(self._encoder.encode(leaving), zmq.NOBLOCK)
            # Sending may clear the descriptor's readable state, so the loop would not call _look.
            self._look()

    def _look(self) -> None:
        """Wake `receive` if a message has arrived.

        The loop calls this while the socket's descriptor is readable, which means that the socket's
        state must be queried.
        """
        if self._has_news() and self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _has_news(self) -> bool:
        # Faster than the `events` property and zmq's enum flags.
        return self._socket is not None and bool(int(self._socket.get(zmq.EVENTS)) & _READABLE)

    async def receive(self) -> FromEngine:
        while True:
            if self._socket is None:
                raise self._dead or EngineDead("there is no connection to the engine")
            try:
                raw = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                if self._dead is not None:
                    raise self._dead from None
                await self._news()
                continue
            self._received += 1
            try:
                message: FromEngine = self._decoder.decode(raw)
                return message
            except msgspec.MsgspecError as error:
                log.error("dropped a malformed message from the engine: %s", error)

    async def _news(self) -> None:
        """Wait until a message may have arrived or the engine has ended."""
        assert self._loop is not None
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    async def end(self, error: EngineDead) -> None:
        """Tell the transport that the engine has ended.

        Gives the engine's last messages time to arrive, then makes `receive` raise the error.
        """
        for _ in range(MOST_LAST_WORDS):
            received = self._received
            await asyncio.sleep(LAST_WORDS_MS / 1000)
            if not self._has_news() and received == self._received:
                break
        self._die(error)

    async def close(self) -> None:
        if self._dead is None and self._socket is not None:
            self.send(Gone())
        await self._disconnect()

    def _connect(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.set_hwm(0)
        if self._name:
            self._socket.setsockopt(zmq.IDENTITY, self._name.encode())
        assert self.address is not None
        self._socket.connect(self.address)
        self._loop.add_reader(self._socket.fileno(), self._look)

    async def _disconnect(self) -> None:
        linger = LEAVE_MS if self._dead is None else 0
        self._flush()
        self._die(EngineDead("the connection to the engine has been closed"))
        socket, context, self._socket, self._context = self._socket, self._context, None, None
        self.address = None
        if socket is not None and context is not None:
            assert self._loop is not None
            self._loop.remove_reader(socket.fileno())
            socket.close(linger=linger)
            await asyncio.to_thread(context.term)  # returns when queued messages have been sent

    def _die(self, error: EngineDead) -> None:
        if self._dead is None:
            self._dead = error
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)  # wakes `receive`, which then raises


class ProcessTransport(SocketTransport):
    """Runs `engine.worker` as a child process and connects to it as its first client.

    `engine` names another engine factory for the worker, as "module:function": a mock or a test's
    fake.
    """

    def __init__(self, config: EngineConfig, engine: str | None = None) -> None:
        super().__init__()
        self._config = config
        self._engine = engine
        self._folder: SocketFolder | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._watcher: asyncio.Task[None] | None = None
        self._killed: str | None = None  # why it was killed

    @property
    def pid(self) -> int | None:
        """The worker's process id; None before it is started."""
        return None if self._process is None else self._process.pid

    async def start(self) -> None:
        try:
            self._folder = SocketFolder()
        except OSError as error:
            raise EngineDead(f"cannot create a folder for the engine's socket: {error}") from error
        self.address = address = f"ipc://{self._folder.socket}"
        self._connect()
        command = ["-P", "-m", "engine.worker", address]
        # Other users can read a process's arguments, and the store's URL may hold a password.
        config = replace(self._config, state_store=None)
        environment = module_environment() | {STORE_VARIABLE: self._config.state_store or ""}
        command += [msgspec.json.encode(config).decode(), "--parent", str(os.getpid())]
        if self._engine is not None:
            command += ["--engine", self._engine]
        try:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                *command,
                stdin=asyncio.subprocess.DEVNULL,
                env=environment,
            )
        except OSError as error:
            reason = f"{sys.executable}: {error.strerror or error}"
            dead = EngineDead(f"the engine process cannot be started: {reason}")
            self._die(dead)
            await self._release()
            raise dead from error
        self._watcher = asyncio.create_task(self._watch(self._process))
        self.send(GREETING)

    def kill(self, reason: str) -> None:
        """Kill the worker at once; `reason` becomes the message of its death."""
        if self._process is not None and self._process.returncode is None:
            self._killed = reason
            self._process.kill()

    async def close(self) -> None:
        process, watcher = self._process, self._watcher
        if process is not None and watcher is not None:
            with contextlib.suppress(EngineDead):
                self.send(Shutdown())
            if not await _ends(watcher):
                with contextlib.suppress(ProcessLookupError):
                    process.terminate()
                if not await _ends(watcher):
                    log.warning("the engine process does not end on SIGTERM; killing it")
                    with contextlib.suppress(ProcessLookupError):
                        process.kill()
                    await watcher
        await self._release()

    async def _watch(self, process: asyncio.subprocess.Process) -> None:
        """Wait for the process to end, then report its end."""
        code = await process.wait()
        reason = self._killed or f"the engine process has ended ({describe_exit(code)})"
        await self.end(EngineDead(reason))

    async def _release(self) -> None:
        await self._disconnect()
        if self._folder is not None:
            self._folder.remove()
        self._folder = self._process = self._watcher = None


async def _ends(task: asyncio.Task[None]) -> bool:
    """Return whether a task ends within STOP_SECONDS."""
    done, _ = await asyncio.wait({task}, timeout=STOP_SECONDS)
    return bool(done)
