"""EngineLoop: serves an engine to its clients: receive messages, step, send events.

A client introduces itself by its first message, a `Ping`, and gets `Ready`. From then on it gets
one `StepEvents` for each step that concerns its requests. A client without requests gets the load
that others cause now and then, because it decides what the client may send. Counters of a step
(batch size, tokens, seconds) go to one client only, so that sums over clients count them once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import Protocol

import msgspec

from engine.errors import EngineDead, EngineError, InvalidRequest
from engine.protocol.events import FromEngine, ModelInfo, Pong, Ready, Stats, StepEvents
from engine.protocol.requests import Abort, FinishReason, Gone, Ping, Request, Shutdown, ToEngine
from engine.protocol.state_calls import StateCall, StateReply

IDLE_SECONDS = 1.0  # longest wait for a message in an idle loop
LOAD_SECONDS = 0.1  # the greatest age of the load that an idle client knows


@dataclass(frozen=True)
class Undecodable:
    """A request of which only the id could be decoded, and the reason."""

    request: int
    error: InvalidRequest


class Mailbox(Protocol):
    """Source and destination of all clients' messages. Neither method raises."""

    def receive(self, timeout: float) -> Iterable[tuple[Hashable, ToEngine | Undecodable]]:
        """Return (client, message) pairs; wait up to `timeout` seconds for the first one."""

    def send(self, client: Hashable, message: FromEngine) -> None:
        """Send without blocking; messages to a client that has left are dropped."""


class SteppedEngine(Protocol):
    """What the loop needs of engine.engine.Engine, declared here to avoid importing it."""

    info: ModelInfo
    broken: EngineDead | None

    @property
    def has_work(self) -> bool: ...
    def add(self, client: Hashable, request: Request) -> None: ...
    def reject(self, client: Hashable, request: int, error: EngineError) -> None: ...
    def abort(
        self,
        client: Hashable,
        ids: Iterable[int] | None,
        reason: FinishReason,
        kept: Iterable[int] = (),
    ) -> None: ...
    def ask(self, client: Hashable, call: StateCall) -> None: ...
    def replies(self) -> list[tuple[Hashable, StateReply]]: ...
    def load_now(self) -> Stats: ...
    def close(self) -> None: ...
    def abort_all(self) -> None: ...
    def step(self, take_in: Callable[[], None] | None = None) -> dict[Hashable, StepEvents]: ...


class EngineLoop:
    """Serves an engine; `run` returns after a `Shutdown` or when the engine is broken."""

    def __init__(
        self, engine: SteppedEngine, mailbox: Mailbox, clients: Iterable[Hashable] = ()
    ) -> None:
        self._engine = engine
        self._mailbox = mailbox
        self._clients: set[Hashable] = set()
        self._quiet: set[Hashable] = set()  # clients that want no load reports
        # clients that have left; late messages from them are ignored
        self._gone: set[Hashable] = set()
        self._stats: Stats | None = None  # stats of the latest step
        self._stopping = False
        self._load_sent_at = 0.0  # time.monotonic of the last load report
        for client in dict.fromkeys(clients):
            self._greet(client)

    def run(self) -> None:
        """Serve until the end, then abort everything that is in flight."""
        while not self._stopping:
            if self._engine.has_work:
                self._step()
            else:
                self._take_in(IDLE_SECONDS)
                self._reply()
            if self._engine.broken:
                break
        self._engine.abort_all()
        if self._engine.has_work:
            self._step()
        self._reply()
        self._engine.close()

    def _reply(self) -> None:
        for client, reply in self._engine.replies():
            if client not in self._gone:
                self._mailbox.send(client, reply)

    def _step(self) -> None:
        events_of = self._engine.step(self._take_in)
        sent = [client for client in events_of if client not in self._gone]
        for number, client in enumerate(sent):
            events = events_of[client]
            if number:
                events = msgspec.structs.replace(events, stats=events.stats.load())
            self._mailbox.send(client, events)
        self._reply()  # after the events, so that counters are not older than the reply
        if events_of:
            self._stats = next(iter(events_of.values())).stats
            if len(sent) < len(self._clients) - len(self._quiet):
                self._tell_load(sent)

    def _tell_load(self, sent: Iterable[Hashable]) -> None:
        """Report the load to clients without events in this step, but not too often."""
        now = time.monotonic()
        if now - self._load_sent_at < LOAD_SECONDS and self._engine.has_work:
            return
        self._load_sent_at = now
        assert self._stats is not None
        load = StepEvents(stats=self._stats.load())
        for client in self._clients - self._quiet - set(sent):
            self._mailbox.send(client, load)

    def _take_in(self, timeout: float = 0.0) -> None:
        for client, message in self._mailbox.receive(timeout):
            if client in self._gone:
                continue
            if isinstance(message, Gone):
                self._forget(client if message.client is None else message.client.encode())
                continue
            if client not in self._clients:
                self._greet(client)
            match message:
                case Request():
                    self._engine.add(client, message)
                case Abort():
                    self._engine.abort(client, message.ids, message.reason, message.kept)
                case StateCall():
                    self._engine.ask(client, message)
                case Ping():
                    if message.quiet:
                        self._quiet.add(client)
                    self._mailbox.send(client, Pong(message.nonce))
                case Undecodable():
                    self._engine.reject(client, message.request, message.error)
                case Shutdown():
                    self._stopping = True

    def _forget(self, client: Hashable) -> None:
        self._gone.add(client)
        self._clients.discard(client)
        self._quiet.discard(client)
        self._engine.abort(client, None, "abort")

    def _greet(self, client: Hashable) -> None:
        self._clients.add(client)
        self._mailbox.send(client, Ready(self._engine.info))
        # The next step may be a long time away.
        self._mailbox.send(client, StepEvents(stats=self._engine.load_now()))
