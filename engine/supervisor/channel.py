"""Pipes between a supervisor and an API process, and the calls made over them.

A pipe works within one process, or over a socket to another process.
"""

from __future__ import annotations

import asyncio
import itertools
import socket
import struct
from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

import msgspec

from engine.supervisor.control_messages import Call, Method, Reply

In = TypeVar("In", covariant=True)
Out = TypeVar("Out", contravariant=True)
LENGTH = struct.Struct("!I")  # length prefix of a message


class Pipe(Protocol[In, Out]):
    """One end of a pipe; all methods are called on one event loop."""

    async def open(self) -> None:
        """Open the pipe; must be called first."""

    def send(self, message: Out) -> None:
        """Send without blocking; messages to a closed end are lost."""

    async def receive(self) -> In:
        """Return the next message. Raises EOFError at the end, when all has been received."""

    def close(self) -> None:
        """Close both directions. Idempotent."""


class MemoryPipe:
    """One end of a pipe within this process."""

    def __init__(self, inbox: asyncio.Queue[Any], outbox: asyncio.Queue[Any]) -> None:
        self._inbox = inbox
        self._outbox = outbox

    async def open(self) -> None:
        """Do nothing: a memory pipe is open from the start."""

    def send(self, message: Any) -> None:
        self._outbox.put_nowait(message)

    async def receive(self) -> Any:
        message = await self._inbox.get()
        if message is None:
            self._inbox.put_nowait(None)  # for later calls of receive
            raise EOFError
        return message

    def close(self) -> None:
        self._outbox.put_nowait(None)
        self._inbox.put_nowait(None)


def memory_pipe() -> tuple[MemoryPipe, MemoryPipe]:
    """Return both ends of a new pipe within this process."""
    here: asyncio.Queue[Any] = asyncio.Queue()
    there: asyncio.Queue[Any] = asyncio.Queue()
    return MemoryPipe(here, there), MemoryPipe(there, here)


class SocketPipe(Generic[In, Out]):
    """One end of a pipe to another process, over a socket pair.

    Both ends run this program under one user, but messages are still validated by decoding.
    """

    def __init__(self, handle: socket.socket, incoming: Any) -> None:
        """Take over the socket; `incoming` is the union of message types to receive."""
        self._handle = handle
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(incoming)

    async def open(self) -> None:
        self._reader, self._writer = await asyncio.open_unix_connection(sock=self._handle)

    def send(self, message: Out) -> None:
        raw = self._encoder.encode(message)
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(LENGTH.pack(len(raw)) + raw)

    async def receive(self) -> In:
        if self._reader is None:
            raise EOFError("the pipe is not open")
        try:
            (length,) = LENGTH.unpack(await self._reader.readexactly(LENGTH.size))
            message: In = self._decoder.decode(await self._reader.readexactly(length))
            return message
        except (OSError, asyncio.IncompleteReadError, msgspec.MsgspecError) as error:
            raise EOFError(str(error)) from error

    def close(self) -> None:
        if self._writer is None:
            self._handle.close()
        else:
            self._writer.close()


class PendingCalls:
    """Calls that one end of a pipe has made and the other has not answered yet."""

    def __init__(self, send: Callable[[Call], None]) -> None:
        """Create an empty table; `send` is the pipe's method."""
        self._send = send
        self._ids = itertools.count()
        self._replies: dict[int, asyncio.Future[Reply]] = {}

    def ask(
        self, method: Method, model: str | None = None, own: bytes = b""
    ) -> asyncio.Future[Reply]:
        """Send a Call with these fields and return a future of its Reply.

        Cancelling the future drops the reply.
        """
        id = next(self._ids)
        reply = self._replies[id] = asyncio.get_running_loop().create_future()
        reply.add_done_callback(lambda _: self._replies.pop(id, None))
        self._send(Call(id, method, model, own))
        return reply

    def resolve(self, reply: Reply) -> None:
        """Pass a Reply to its caller; replies to cancelled calls are ignored."""
        waiting = self._replies.get(reply.id)
        if waiting is not None and not waiting.done():
            waiting.set_result(reply)

    def close(self, error: Exception | None = None) -> None:
        """End all calls with `error`, or cancel them if it is None: the other end is gone."""
        for waiting in list(self._replies.values()):
            if waiting.done():
                continue
            if error is None:
                waiting.cancel()
            else:
                waiting.set_exception(error)
