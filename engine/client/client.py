"""EngineClient: an API process's connection to one engine, on one asyncio event loop.

`submit` returns a RequestStream, from which the request's tokens are read. When the engine dies,
every RequestStream raises EngineDead.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from engine.client.interface import State
from engine.client.request_stream import (
    FlushTimer,
    RequestStream,
    StreamInbox,
)
from engine.client.socket_transport import Transport
from engine.errors import (
    BY_CODE,
    EngineDead,
    EngineError,
    EngineLoading,
    EngineUnavailable,
    InvalidRequest,
)
from engine.protocol.events import FromEngine, LoadFailed, ModelInfo, Pong, Ready, Stats, StepEvents
from engine.protocol.queue_policy import Queued
from engine.protocol.requests import Abort, FinishReason, Ping, Request
from engine.protocol.state_calls import StateAction, StateCall, StateReply

log = logging.getLogger(__name__)

# Bounds on the engine messages handled before other tasks on the event loop get a turn.
TURN_MESSAGES = 64
TURN_SECONDS = 0.004


class EngineClient:
    """One engine as seen by an API process, which sends its requests through an EngineRouter.

    All methods are called on one event loop: `start` first, `close` last.
    """

    def __init__(self, transport: Transport, quiet: bool = False) -> None:
        """Create the client without starting anything.

        Args:
            transport: the connection to the engine; owned by this client.
            quiet: this client submits no requests, so the engine need not report its load to it.
        """
        self._transport = transport
        self._quiet = quiet
        self._info: ModelInfo | None = None
        self._state: State = "loading"
        self._stats = Stats()
        self.event_messages = 0  # number of StepEvents received
        self._others = 0  # requests of other processes, as of the latest stats
        self._others_tokens = 0  # prompt tokens of other processes' waiting requests
        self._nonces = itertools.count(1)
        self._streams: dict[int, RequestStream] = {}
        self.queued = Queued()  # requests of this client that have no slot yet
        self._flush_timer = FlushTimer()
        self._pings: dict[int, asyncio.Future[None]] = {}
        self._state_calls: dict[int, asyncio.Future[StateReply]] = {}
        self._listeners: list[Callable[[StepEvents], None]] = []
        self._settled = asyncio.Event()  # the model is loaded, or is known to have failed
        self._dead = asyncio.Event()
        self._death: EngineError | None = None
        self._reader: asyncio.Task[None] | None = None
        self._closing: asyncio.Task[None] | None = None

    @property
    def info(self) -> ModelInfo | None:
        """The loaded model's info; None while it is loading."""
        return self._info

    @property
    def state(self) -> State:
        """The engine's state: "loading", "ready" or, once it has ended, "dead"."""
        return self._state

    @property
    def death(self) -> EngineError | None:
        """Why the engine has ended; None while it runs."""
        return self._death

    @property
    def stats(self) -> Stats:
        """Stats of the latest round that concerned this process; the load is at most 0.1 s old."""
        return self._stats

    @property
    def slots(self) -> int:
        """How many requests run at once; 0 before the model is loaded."""
        return 0 if self._info is None else self._info.slots

    @property
    def pace(self) -> float:
        """Mean seconds between two requests leaving the queue; 0: unknown."""
        return self._stats.pace

    @property
    def in_flight(self) -> int:
        """Requests that the engine holds: this process's, and others' as of the latest stats."""
        return len(self._streams) + self._others

    @property
    def waiting_tokens(self) -> int:
        """Prompt tokens of waiting requests: this process's, and others' as of the latest stats."""
        return self.queued.tokens + self._others_tokens

    async def start(self) -> None:
        """Start the engine, which then loads its model in the background. Raises EngineDead."""
        try:
            await self._transport.start()
        except EngineDead as error:
            self._die(error)
            raise
        self._reader = asyncio.create_task(self._read())

    async def ready(self, timeout: float | None = None) -> ModelInfo:
        """Wait until the model is loaded and return its info.

        Args:
            timeout: seconds; None: no limit.

        Raises:
            EngineLoading: `timeout` seconds have passed.
            EngineDead: the engine has ended.
            EngineError: a CheckpointError, DeviceError or ConfigError if the model cannot be
                loaded.
        """
        try:
            await asyncio.wait_for(self._settled.wait(), timeout)
        except TimeoutError:
            raise EngineLoading(f"the model is not loaded after {timeout:g} seconds") from None
        if self._death is not None:
            raise self._death
        assert self._info is not None
        return self._info

    async def wait_dead(self) -> None:
        """Wait until the engine has ended, for whatever reason."""
        await self._dead.wait()

    def submit(
        self, request: Request, interval: int = 1, inbox: StreamInbox | None = None, which: int = 0
    ) -> RequestStream:
        """Send a request; see EngineBackend.submit.

        Raises:
            EngineLoading: the model is not loaded yet.
            EngineDead: the engine has ended.
            InvalidRequest: the request cannot be encoded.
            ValueError: a request with this id is in flight.
        """
        if self._death is not None:
            raise _again(self._death)
        if self._state == "loading":
            raise EngineLoading("the model is still loading")
        if request.id in self._streams:
            raise ValueError(f"request id {request.id} is in flight already")
        try:
            self._transport.send(request)
        except (TypeError, ValueError, OverflowError, msgspec.MsgspecError) as error:
            raise InvalidRequest(f"the request cannot be encoded: {error}") from error
        self.queued.add(request.id, request.owner, request.prompt_tokens)
        stream = RequestStream(request, interval, inbox, which, self._flush_timer)
        self._streams[request.id] = stream
        return stream

    def has(self, request_id: int) -> bool:
        """Return whether this request is in flight."""
        return request_id in self._streams

    def abort(
        self, ids: Iterable[int], reason: FinishReason = "abort", kept: Iterable[int] = ()
    ) -> None:
        """End requests early; see EngineBackend.abort."""
        mine = [request_id for request_id in ids if request_id in self._streams]
        if mine:
            with contextlib.suppress(EngineDead):
                self._transport.send(Abort(mine, reason, list(kept)))

    def give_up(self, request_id: int, error: EngineError) -> None:
        """Abort a request and fail its stream; see EngineBackend.give_up."""
        self.abort([request_id])
        if (stream := self._streams.pop(request_id, None)) is not None:
            self.queued.discard(request_id)
            stream.fail(error)

    async def ask_state(
        self,
        action: StateAction,
        *,
        timeout: float,
        **fields: Any,
    ) -> StateReply:
        """Send a StateCall and return its reply; see EngineBackend.ask_state.

        `fields` are the fields of StateCall, among them `owner`.
        """
        if self._death is not None:
            raise _again(self._death)
        if self._state == "loading":
            raise EngineLoading("the model is still loading")
        call = next(self._nonces)
        waiting = self._state_calls[call] = asyncio.get_running_loop().create_future()
        try:
            self._transport.send(StateCall(call=call, action=action, **fields))
            reply: StateReply = await asyncio.wait_for(waiting, timeout)
        except TimeoutError:
            raise EngineUnavailable(f"the engine has not answered for {timeout:g} s") from None
        finally:
            del self._state_calls[call]
        if reply.failed is not None:
            raise reply.failed.error()
        return reply

    def on_step(self, callback: Callable[[StepEvents], None]) -> None:
        """Call `callback` with every StepEvents from now on, after the streams have received it.

        The callback must not block.
        """
        self._listeners.append(callback)

    async def ping(self, timeout: float) -> None:
        """Wait until the engine has answered a ping.

        Raises:
            EngineUnavailable: it has not answered within `timeout` seconds.
            EngineDead: it has ended.
        """
        if self._death is not None:
            raise _again(self._death)
        nonce = next(self._nonces)
        pong = self._pings[nonce] = asyncio.get_running_loop().create_future()
        try:
            self._transport.send(Ping(nonce, self._quiet))
            await asyncio.wait_for(pong, timeout)
        except TimeoutError:
            raise EngineUnavailable(f"the engine has not answered for {timeout:g} s") from None
        finally:
            del self._pings[nonce]

    async def close(self) -> None:
        """End the engine; unfinished requests are aborted or fail with EngineDead. Idempotent."""
        if self._closing is None:
            self._closing = asyncio.create_task(self._close())
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        await self._transport.close()
        if self._reader is not None:
            # Wait a moment for the reader to handle the engine's last messages and end by itself.
            await asyncio.wait({self._reader}, timeout=1)
            self._reader.cancel()
        self._die(EngineDead("the engine has been closed"))

    # Handling of the engine's messages.

    async def _read(self) -> None:
        # A busy transport returns messages without ever yielding, so other tasks must be given
        # turns. Between two turns, the updates of one request are merged.
        messages, seconds = 0, 0.0
        try:
            while True:
                message = await self._transport.receive()
                begun = time.perf_counter()
                try:
                    self._handle(message)
                except Exception:
                    # One bad callback must not stop the streams of all other requests.
                    log.exception("a message from the engine could not be handled")
                messages += 1
                seconds += time.perf_counter() - begun
                if messages >= TURN_MESSAGES or seconds >= TURN_SECONDS:
                    messages, seconds = 0, 0.0
                    await asyncio.sleep(0)
        except EngineError as error:
            self._die(error)
        except Exception as error:
            log.exception("the connection to the engine failed")
            self._die(EngineDead(f"the connection to the engine failed: {error}"))

    def _handle(self, message: FromEngine) -> None:
        match message:
            case StepEvents():
                self._deliver(message)
            case Pong():
                pong = self._pings.get(message.nonce)
                if pong is not None and not pong.done():
                    pong.set_result(None)
            case StateReply():
                waiting = self._state_calls.get(message.call)
                if waiting is not None and not waiting.done():
                    waiting.set_result(message)
            case Ready():
                self._info = message.info
                if self._state == "loading":
                    self._state = "ready"
                self._settled.set()
            case LoadFailed():
                self._die(BY_CODE.get(message.code, EngineError)(message.message))

    def _deliver(self, events: StepEvents) -> None:
        self._stats = events.stats
        self.event_messages += 1
        streams = self._streams
        find = streams.get
        for request, token in zip(events.requests, events.tokens, strict=False):
            if (stream := find(request)) is not None:
                stream.tokens.append(token)
                if not stream.notified:
                    stream.notify()
        for request, tokens, logprobs in events.in_runs():
            if (stream := find(request)) is not None:
                stream.add_tokens(tokens, logprobs)
        for scores in events.scores:
            if (stream := find(scores.request)) is not None:
                stream.add_scores(scores.reports.unpack())
        for request in events.started:
            self.queued.discard(request)
        for finished in events.finished:
            self.queued.discard(finished.request)
            if (stream := streams.pop(finished.request, None)) is not None:
                stream.finish(finished)
        for failed in events.failed:
            self.queued.discard(failed.request)
            if (stream := streams.pop(failed.request, None)) is not None:
                stream.fail(failed.error())
        # The stats may not include the requests sent last, so these are rather under-estimates.
        self._others = max(0, events.stats.running + events.stats.waiting - len(streams))
        self._others_tokens = max(0, events.stats.waiting_tokens - self.queued.tokens)
        for listener in self._listeners:
            listener(events)

    def _die(self, error: EngineError) -> None:
        """Fail everything that is in flight; the first error is kept as the cause of death.

        A failed load, for example, explains the end of the process that follows.
        """
        if self._death is None:
            self._death = error
            self._state = "dead"
            self._settled.set()
        streams, self._streams = self._streams, {}
        self.queued.clear()
        self._flush_timer.clear()
        for stream in streams.values():
            stream.fail(_again(error))
        waiting: list[asyncio.Future[Any]] = [*self._pings.values(), *self._state_calls.values()]
        for future in waiting:
            if not future.done():
                future.set_exception(_again(error))
        self._dead.set()


def _again(error: EngineError) -> EngineDead:
    """Return a new EngineDead with the error's message, since each waiter raises its own."""
    return EngineDead(error.message, retry_after=error.retry_after)
