"""InferenceRequest: one HTTP request for the model, from its arrival to its last byte, and what it
asks of the engine. Whatever ends the HTTP request ends its engine requests too."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

from engine.client.client import EngineClient
from engine.client.interface import EngineBackend
from engine.client.request_stream import RequestStream, StreamInbox, Update
from engine.errors import Draining, EngineError, ReaderBehind
from engine.protocol.requests import FinishReason, Request
from engine.protocol.state_calls import StateAction, StateInfo, StateReply
from service.http.connection import Writer
from service.inference.admission_control import AdmissionControl
from service.observability.metrics import Metrics
from service.observability.traces import Trace

# What a request brought: its position among the flight's requests, and an update or its failure.
Arrival = tuple[int, Update | EngineError]

# Gives the events of plain tokens; None, and takes nothing, where they are not plain.
RenderTokens = Callable[[list[int]], bytes | None]

ASK_SECONDS = 60.0  # for the engine to answer what is asked of states, a long round included
LEAST_TIMEOUT = 1e-6  # seconds; the engine then ends a request that is late with what it has


class RequestsInFlight(set["InferenceRequest"]):
    """The requests of a runtime that have not ended, and what is still to do for those that
    have."""

    def __init__(self) -> None:
        super().__init__()
        self._afterwards: set[asyncio.Task[None]] = set()  # which the loop itself would forget
        self._ended = asyncio.Event()  # set by the last one; who waits clears it before

    def leave(self, request: InferenceRequest) -> None:
        """The request has ended; whoever waits for the last one goes on."""
        self.discard(request)
        if not self:
            self._ended.set()

    def follow_up(self, work: Coroutine[Any, Any, None]) -> None:
        """Does what a request that has ended leaves to do; it counts as in flight until then."""
        task = asyncio.get_running_loop().create_task(work)
        self._afterwards.add(task)
        task.add_done_callback(self._followed_up)

    def _followed_up(self, task: asyncio.Task[None]) -> None:
        self._afterwards.discard(task)
        self._ended.set()

    @property
    def all_ended(self) -> bool:
        """There are none, and nothing is left to do for any."""
        return not (self or self._afterwards)

    async def ended(self) -> None:
        """Returns when all have ended."""
        while not self.all_ended:
            self._ended.clear()
            await self._ended.wait()


class InferenceRequest:
    """A context manager; on leaving it, requests that have not ended are aborted."""

    def __init__(
        self,
        backend: EngineBackend,
        metrics: Metrics,
        places: AdmissionControl,
        aloft: RequestsInFlight,
        arrived: float,
        owner: str,
        least_priority: int,
    ) -> None:
        """`aloft` holds the flights under way; the request's headers came at `arrived`, by
        time.perf_counter; what it shares, it shares with requests of the same `owner`, whose
        priorities begin at `least_priority`."""
        self._backend = backend
        self._metrics = metrics
        self._places = places
        self._reserved = 0  # places that are not used yet
        self._aloft = aloft
        self._open: set[int] = set()  # ids of requests that have not ended
        self.keep_field: str | None = None  # by which the client asked for a state to be kept
        self._borrowed: list[str] = []  # ids of states that are there for this request alone
        self.brought: dict[str, StateInfo] = {}  # of them, by the snapshots that they were
        self._inbox = StreamInbox(backend.ready_streams)
        self._deliveries: list[RequestStream] = []
        self._unread = 0  # requests whose end nobody has read
        self._latest: list[float | None] = []  # when tokens of each came last
        self._chosen: list[bool] = []  # whether each leaves a state under an id that is given
        self._grammar_fields: list[str | None] = []  # by which the client asked for each grammar
        self._arrived = arrived
        self.owner = owner
        self.least_priority = least_priority
        self._before_engine = 0.0  # seconds from the arrival until the latest submit
        self._cut = False
        self.awaits_reader = False  # what has come cannot be written yet
        self.trace: Trace | None = None  # where traces are taken
        self.tokens_in = 0  # of prompts that the engine was given, once for all samples of one
        self.tokens_out = 0  # that it generated

    def __enter__(self) -> InferenceRequest:
        self._aloft.add(self)
        return self

    def __exit__(self, *_: object) -> None:
        self._aloft.leave(self)
        if self._reserved:
            self._release(self._reserved)
        self._leave()
        self._open.clear()
        self._inbox.close()
        if self._borrowed:
            self._aloft.follow_up(self._give_back())

    def keeps_apart(self, id: str, other: str) -> bool:
        """As `EngineBackend.keeps_apart`, of this request's owner."""
        return self._backend.keeps_apart(self.owner, id, other)

    async def ask_state(self, action: StateAction, **fields: Any) -> StateReply:
        """As `EngineBackend.ask_state`, of the states of this request's owner."""
        try:
            return await self._backend.ask_state(
                action, timeout=ASK_SECONDS, owner=self.owner, **fields
            )
        except EngineError as error:
            if error.param == "target":  # clients call it the id
                error.param = "id"
            raise

    def borrow(self, id: str) -> None:
        """The state `id` is deleted when this is over."""
        self._borrowed.append(id)

    async def _give_back(self) -> None:
        for id in self._borrowed:
            with suppress(EngineError):  # it will expire
                await self.ask_state("delete", id=id)

    def _leave(self) -> None:
        """Nobody reads an answer any more."""
        if not self._open:
            return
        released, since = self._metrics.released, time.perf_counter()

        def note(client: EngineClient, before: int) -> None:
            released(since, client.event_messages - before)

        for delivery in self._deliveries:
            if delivery.id in self._open:
                client = self._backend.client_of(delivery.id)
                delivery.on_finish = partial(note, client, client.event_messages)
        self.abort()

    def check_room(self) -> None:
        """Raises QueueFull where not even one request finds room."""
        self._places.check(1, self.owner)

    def check_tokens(self, tokens: int, requests: int) -> None:
        """Raises QueueFull where requests of so many prompt tokens are too many just now; they are
        submitted right after, or not at all."""
        self._places.check_tokens(tokens, requests, self.owner)

    def check_kept(self, ids: Sequence[str]) -> None:
        """Raises ApiError 400 where so many requests go on from kept states, of these ids, that the
        engine that keeps them cannot hold them all."""
        if len(ids) > 1:
            self._places.check_kept(self._backend.most_of_one(self.owner, ids), self.owner)

    def reserve(self, requests: int) -> None:
        """Speaks for the places of so many requests. Raises QueueFull, or ApiError 400 for more
        than the engine can hold."""
        self._places.reserve(requests, self.owner)
        self._reserved += requests

    @contextmanager
    def lending(self, part: InferenceRequest) -> Iterator[None]:
        """Lends a reserved place to a flight of the same owner, for one request of its. It comes
        back afterwards, whoever asks for places meanwhile."""
        self._reserved -= 1
        part._reserved += 1
        try:
            yield
        finally:
            if part._reserved:
                part._reserved -= 1
            else:
                self._places.retake(1, self.owner)
            self._reserved += 1

    def _release(self, requests: int) -> None:
        self._reserved -= requests
        self._places.release(requests, self.owner)

    def submit(
        self,
        prompt: bytes,
        timeout: float,
        interval: int = 1,
        grammar_field: str | None = None,
        **fields: Any,
    ) -> None:
        """Makes a request, for which a place is reserved: `prompt` packed, `interval` as of a
        RequestStream, `timeout` in seconds from the arrival, `grammar_field` that by which the
        client asked for its grammar, `fields` the others of requests.Request but `owner`. Raises
        EngineUnavailable, Draining."""
        if self._cut:
            raise Draining("the server shut down before the request was read")
        self._before_engine = time.perf_counter() - self._arrived
        request = Request(
            id=self._backend.new_id(),
            prompt=prompt,
            owner=self.owner,
            timeout=max(timeout - self._before_engine, LEAST_TIMEOUT),
            **fields,
        )
        place = len(self._deliveries)
        self._deliveries.append(self._backend.submit(request, interval, self._inbox, place))
        self._unread += 1
        self._latest.append(None)
        self._chosen.append(request.keep is not None and bool(request.keep.id))
        self._grammar_fields.append(grammar_field)
        if self.trace is not None:
            self.trace.sent(request)
        if request.sampling.choice == 0:
            self.tokens_in += request.prompt_tokens
        self._release(1)
        self._open.add(request.id)

    def abort(self) -> None:
        """Ends all requests early."""
        if self._open:
            self._backend.abort(sorted(self._open), "abort")

    def stop(self, which: int, kept: int | None) -> None:
        """Ends the request at this position, which a stop string ended; `kept` of its answer's
        tokens stand in the state that it leaves, where it leaves one."""
        request = self._deliveries[which].id
        if request in self._open:
            reason: FinishReason = "stop"
            self._backend.abort([request], reason, [] if kept is None else [kept])

    def drop(self, which: int) -> None:
        """Ends the request at this position, whose answer cannot be told."""
        request = self._deliveries[which].id
        if request in self._open:
            self._backend.abort([request], "abort")

    def end_if_behind(self, most: int) -> None:
        """Ends a stream of which more than `most` tokens and alternatives wait for its reader; what
        waits is still sent, and then an error."""
        if not self.awaits_reader:
            return
        unread = sum(delivery.unread for delivery in self._deliveries)
        if unread <= most:
            return
        error = ReaderBehind(
            f"the stream is read more slowly than it is written: {unread} tokens and alternatives "
            f"wait, and at most {most} may; read faster, or ask for fewer tokens or alternatives"
        )
        for delivery in self._deliveries:
            if delivery.id in self._open:
                self._backend.give_up(delivery.id, error)

    @property
    def is_over(self) -> bool:
        """All that it has asked has come."""
        return not self._open

    @property
    def is_cut(self) -> bool:
        """It makes no more requests."""
        return self._cut

    def cut(self) -> None:
        """Ends all requests with what they have, and makes no more."""
        self._cut = True
        self.abort()

    def tap(self, renders: Sequence[RenderTokens], writer: Writer) -> None:
        """From now on tokens that come while `next_arrivals` waits, and come alone, are
        rendered and written at once where their request's one of `renders` has something for them.
        All else comes by `next_arrivals`."""
        self._inbox.tap = _FastPath(self, renders, writer).take

    async def next_arrivals(self) -> list[Arrival]:
        """What arrives next, several requests' updates at once where they came together; none
        where every request has ended. What comes of a request before it is looked at again is
        merged into one update."""
        batch: list[Arrival] = []
        while self._unread and not batch:
            news = await self._inbox.next()
            now = time.perf_counter()
            for delivery in news:
                update = delivery.take()
                finished = update.finished
                if finished is not None and finished.answer:  # gathered in the engine
                    self.tokens_out += len(update.tokens)
                    self._metrics.gathered(finished, self._before_engine)
                elif update.tokens:
                    self.observe(len(update.tokens), delivery.which, now)
                if update.tokens or update.scores or finished is not None:
                    batch.append((delivery.which, update))
                if finished is not None:
                    self._open.discard(delivery.id)
                    if self.trace is not None:
                        self.trace.ended(finished)
                    self._unread -= 1
                elif delivery.error is not None and not delivery.tokens:
                    self._open.discard(delivery.id)
                    self._unread -= 1
                    batch.append((delivery.which, self._named(delivery.error, delivery.which)))
        return batch

    def _named(self, error: EngineError, which: int) -> EngineError:
        """An error with the name that the client knows its parameter by."""
        if error.param == "keep":
            field = "session_id" if self._chosen[which] else "return_state"
            error.param = self.keep_field or field
        elif error.param == "grammar":
            error.param = self._grammar_fields[which]
        return error

    def observe(self, count: int, which: int, now: float) -> None:
        """Times so many tokens of a request, which came just now."""
        self.tokens_out += count
        last = self._latest[which]
        if last is None:
            self._metrics.first_tokens.observe(now - self._arrived)
        else:
            self._metrics.gaps.observe((now - last) / count)
        self._latest[which] = now


class _FastPath:
    """A flight's. What it knows is let go of with the inbox's tap."""

    __slots__ = ("_flight", "_renders", "_writer")

    def __init__(
        self, flight: InferenceRequest, renders: Sequence[RenderTokens], writer: Writer
    ) -> None:
        self._flight = flight
        self._renders = renders
        self._writer = writer

    def take(self, news: list[RequestStream]) -> list[RequestStream]:
        """As engine.client.request_stream.Tap."""
        writer = self._writer
        if not writer.is_open():
            return news
        renders, observe, now = self._renders, self._flight.observe, time.perf_counter()
        left, rendered = [], []
        for delivery in news:
            tokens = delivery.tokens
            events = None
            if tokens and delivery.only_tokens:
                try:
                    events = renders[delivery.which](tokens)
                except Exception:  # it ends this answer alone, where it is raised again
                    events = None
            if events is None:
                left.append(delivery)
                continue
            rendered.append(events)
            observe(len(tokens), delivery.which, now)
            delivery.clear_tokens()
        if rendered:
            writer.write(b"".join(rendered))
        return left
