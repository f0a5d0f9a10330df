"""The engine process: `python -m engine.worker ADDRESS CONFIG --parent PID`.

CONFIG is EngineConfig's fields as a JSON object. The process binds a ZeroMQ ROUTER socket at
ADDRESS, so that several API processes can connect; loads the model; and serves it until it is told
to shut down or its parent has died. While the model loads, a thread answers `Ping`.

Exit codes: 0 after a `Shutdown`, 1 when the engine broke, 2 when it could not load.
"""

from __future__ import annotations

import argparse
import importlib
import logging
import operator
import os
import signal
import sys
import threading
from collections.abc import Callable, Hashable, Iterable
from dataclasses import replace
from typing import TypeAlias, cast

import msgspec
import zmq

from engine import gc_tuning
from engine.config import STORE_VARIABLE, EngineConfig
from engine.engine import Engine
from engine.errors import EngineError, EngineLoading, InvalidRequest
from engine.loop import EngineLoop, Undecodable
from engine.protocol.events import FromEngine, LoadFailed, Pong, StepEvents
from engine.protocol.failed import Failed
from engine.protocol.requests import Ping, Request, Shutdown, ToEngine
from engine.protocol.state_calls import StateCall, StateReply

log = logging.getLogger(__name__)

_MALFORMED = msgspec.MsgspecError, ValueError, RecursionError  # exceptions that decoding may raise
EngineFactory: TypeAlias = Callable[[EngineConfig], Engine]
LINGER_MS = 5000  # how long the last messages may take to be sent
GREETING_SECONDS = 30.0  # how long a worker whose load failed waits for a client to report it to


class ZmqMailbox:
    """The messages of all API processes, over one ROUTER socket; a client is its socket identity.

    The death of the parent process is reported as a `Shutdown`. Used by one thread at a time.
    """

    def __init__(self, address: str, parent: int) -> None:
        self._parent = parent
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        # No high-water mark: ZeroMQ would drop messages beyond it, and no token may be lost.
        self._socket.set_hwm(0)
        self._socket.bind(address)
        self._decoder = msgspec.msgpack.Decoder(list[ToEngine])
        self._encoder = msgspec.msgpack.Encoder()

    def receive(self, timeout: float) -> Iterable[tuple[Hashable, ToEngine | Undecodable]]:
        """Yield (client, message) pairs; messages that cannot be decoded are logged and dropped."""
        if os.getppid() != self._parent:
            log.error("the parent process has died")
            yield b"", Shutdown()
            return
        if timeout and not self._socket.poll(int(timeout * 1000)):
            return
        while True:
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            client, *lists = frames
            for raw in lists:
                for message in self._decode(raw):
                    yield client, message

    def send(self, client: Hashable, message: FromEngine) -> None:
        """Queue a message; ZeroMQ drops messages to a client that has left."""
        frames = (cast(bytes, client), self._encoder.encode(message))
        self._socket.send_multipart(frames, zmq.NOBLOCK)

    def close(self) -> None:
        """Close the socket; returns when all messages are sent, or after LINGER_MS."""
        self._socket.close(linger=LINGER_MS)
        self._context.term()

    def _decode(self, raw: bytes) -> Iterable[ToEngine | Undecodable]:
        """Decode what a client sent in one turn.

        A malformed message does not affect the others, unless the list itself is malformed.
        """
        try:
            messages: list[ToEngine] = self._decoder.decode(raw)
            return messages
        except _MALFORMED as error:
            reason = str(error)
        try:
            each = msgspec.msgpack.decode(raw, type=list[msgspec.Raw])
        except _MALFORMED:
            log.warning("dropped a malformed message of %d bytes: %s", len(raw), reason)
            return ()
        return [message for one in each if (message := self._decode_one(bytes(one))) is not None]

    def _decode_one(self, raw: bytes) -> ToEngine | Undecodable | None:
        try:
            message: ToEngine = msgspec.msgpack.decode(raw, type=ToEngine)
            return message
        except _MALFORMED as error:
            reason = str(error)
        try:
            # The sender of a request waits for its end, so it must get an answer.
            fields = msgspec.msgpack.decode(raw)
            if fields["type"] == "Request" and isinstance(fields["id"], int):
                return Undecodable(fields["id"], InvalidRequest(reason))
        except (*_MALFORMED, LookupError, TypeError):
            pass
        log.warning("dropped a malformed message of %d bytes: %s", len(raw), reason)
        return None


class _LoadingResponder(threading.Thread):
    """Answers clients while the main thread loads the model, then gives the mailbox back."""

    def __init__(self, mailbox: ZmqMailbox) -> None:
        super().__init__(name="loading-responder", daemon=True)
        self._mailbox = mailbox
        self._closing = threading.Event()
        self._greeted = threading.Event()
        self.clients: set[Hashable] = set()

    def run(self) -> None:
        while not self._closing.is_set():
            for client, message in self._mailbox.receive(0.1):
                if isinstance(message, Shutdown):
                    # Loading cannot be interrupted in another way, and there is nothing to save.
                    os._exit(0)
                self.clients.add(client)
                self._greeted.set()
                self._answer(client, message)

    def _answer(self, client: Hashable, message: ToEngine | Undecodable) -> None:
        if isinstance(message, Ping):
            self._mailbox.send(client, Pong(message.nonce))
        elif isinstance(message, Request | StateCall):
            error = EngineLoading("the model is still loading")
            if isinstance(message, StateCall):
                failed = Failed.of(message.call, error)
                self._mailbox.send(client, StateReply(message.call, failed))
            else:
                failed = Failed.of(message.id, error)
                self._mailbox.send(client, StepEvents(failed=[failed]))

    def close(self, await_client: bool = False) -> None:
        """End the thread; with `await_client`, first wait until a client is known."""
        if await_client:
            self._greeted.wait(GREETING_SECONDS)
        self._closing.set()
        self.join()


def serve(mailbox: ZmqMailbox, config: EngineConfig, load: EngineFactory) -> int:
    """Load the engine and serve it to the end; return the exit code."""
    responder = _LoadingResponder(mailbox)
    responder.start()
    try:
        engine = load(config)
    except Exception as error:
        failure = _load_failure(error)
        responder.close(await_client=True)
        if not responder.clients:  # otherwise the clients report it
            log.error("the model cannot be loaded: %s", failure.message)
        log.debug("traceback of the failure to load", exc_info=True)
        for client in responder.clients:
            mailbox.send(client, failure)
        return 2
    responder.close()
    gc_tuning.tune_gc()
    EngineLoop(engine, mailbox, responder.clients).run()
    if engine.broken:
        log.error("%s", engine.broken.message)
        return 1
    return 0


def _load_failure(error: Exception) -> LoadFailed:
    if isinstance(error, EngineError):
        return LoadFailed(error.code, error.message)
    return LoadFailed(EngineError.code, f"{type(error).__name__}: {error}")


def _factory(path: str) -> EngineFactory:
    module, _, name = path.partition(":")
    return cast(EngineFactory, operator.attrgetter(name)(importlib.import_module(module)))


def main(arguments: list[str]) -> int:
    """Run the engine process; `arguments` are those of the command line."""
    parser = argparse.ArgumentParser(prog="engine.worker", description=__doc__)
    parser.add_argument("address", help="ZeroMQ address to bind, for example ipc:///tmp/engine")
    parser.add_argument("config", help="the fields of EngineConfig as a JSON object")
    parser.add_argument("--parent", type=int, required=True, help="pid of the parent; exit with it")
    parser.add_argument("--engine", default="engine.engine:Engine.load", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    # Ctrl-C and a supervisor's SIGTERM reach the whole process group. The parent decides how to
    # shut down, and this process must live on to finish the requests in flight.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    logging.basicConfig(level=logging.INFO, format="%(levelname)s engine: %(message)s")
    config = msgspec.json.decode(options.config, type=EngineConfig)
    config = replace(config, state_store=os.environ.pop(STORE_VARIABLE, "") or None)
    try:
        mailbox = ZmqMailbox(options.address, options.parent)
    except zmq.ZMQError as error:
        log.error("cannot listen on %s: %s", options.address, error)
        return 2
    try:
        return serve(mailbox, config, _factory(options.engine))
    finally:
        mailbox.close()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
