"""InferenceRequest: one HTTP request that uses the engine, from its arrival to its last byte.

It consists of one or more engine requests: one for each prompt, sample or continuation. `which` is
the position of an engine request among those of the HTTP request, in the order of submission.
Whatever ends the HTTP request ends its engine requests, too.
"""

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

# The position of an engine request, and its update or the error with which it failed.
Arrival = tuple[int, Update | EngineError]

# Renders the events of plain tokens; returns None and does nothing if they are not plain.
RenderTokens = Callable[[list[int]], bytes | None]

ASK_SECONDS = 60.0  # for the engine to answer a call about states
LEAST_TIMEOUT = 1e-6  # seconds; with it the engine ends a late request at once


class RequestsInFlight(set["InferenceRequest"]):
    """The requests of a runtime that have not ended, and follow-up work of those that have."""

    def __init__(self) -> None:
        super().__init__()
        # Follow-up work; the event loop itself holds tasks only weakly.
        self._afterwards: set[asyncio.Task[None]] = set()
        self._ended = asyncio.Event()  # set by the last request; waiters clear it before they wait

    def leave(self, request: InferenceRequest) -> None:
        """Remove a request that has ended; wake whoever waits for the last one."""
        self.discard(request)
        if not self:
            self._ended.set()

    def follow_up(self, work: Coroutine[Any, Any, None]) -> None:
        """Run follow-up work of a request that has ended; it counts as in flight until done."""
        task = asyncio.get_running_loop().create_task(work)
        self._afterwards.add(task)
        task.add_done_callback(self._followed_up)

    def _followed_up(self, task: asyncio.Task[None]) -> None:
        self._afterwards.discard(task)
        self._ended.set()

    @property
    def all_ended(self) -> bool:
        """Whether there is no request in flight and no follow-up work."""
        return not (self or self._afterwards)

    async def ended(self) -> None:
        """Return when all requests and follow-up work have ended."""
        while not self.all_ended:
            self._ended.clear()
            await self._ended.wait()


class InferenceRequest:
    """One HTTP request with its engine requests; made by `Runtime.begin`, used on one event loop.

    A context manager: on exit, engine requests that have not ended are aborted.
    """

    def __init__(
        self,
        backend: EngineBackend,
        metrics: Metrics,
        admission: AdmissionControl,
        in_flight: RequestsInFlight,
        arrived: float,
        owner: str,
        least_priority: int,
    ) -> None:
        """Begin a request.

        Args:
            backend: The engines.
            metrics: The process's metrics.
            admission: The admission control of these engines.
            in_flight: The set that holds the request until it has ended.
            arrived: When the request's headers arrived, in seconds by time.perf_counter.
            owner: The API key's name, or "". Prefix cache and states are shared with requests of
                the same owner.
            least_priority: The most urgent priority that the owner may ask for.
        """
        self._backend = backend
        self._metrics = metrics
        self._admission = admission
        self._reserved = 0  # engine requests that are admitted and not submitted yet
        self._in_flight = in_flight
        self._open: set[int] = set()  # ids of engine requests that have not ended
        self.keep_field: str | None = None  # the field that asked for a state to be kept, if known
        self._borrowed: list[str] = []  # ids of states to delete when the request ends
        self.brought: dict[str, StateInfo] = {}  # imported states by the client's snapshots
        self._inbox = StreamInbox(backend.ready_streams)
        self._streams: list[RequestStream] = []
        self._unread = 0  # engine requests whose end has not been read
        self._latest: list[float | None] = []  # arrival of each one's latest tokens
        self._chosen: list[bool] = []  # whether each keeps a state under a given id
        self._grammar_fields: list[str | None] = []  # the field that gave each one's grammar
        self._arrived = arrived
        self.owner = owner
        self.least_priority = least_priority
        self.placement = ""  # engine requests with the same text go to the same engine if possible
        self.session_field = "session_id"  # what named the session: this field, or a header
        self._before_engine = 0.0  # seconds from the arrival until the latest submit
        self._cut = False
        self.awaits_reader = False  # a write is waiting for the client to read
        self.trace: Trace | None = None  # with tracing on
        self.tokens_in = 0  # prompt tokens submitted, once for all samples of a prompt
        self.tokens_out = 0  # tokens generated

    def __enter__(self) -> InferenceRequest:
        self._in_flight.add(self)
        return self

    def __exit__(self, *_: object) -> None:
        self._in_flight.leave(self)
        if self._reserved:
            self._release(self._reserved)
        self._leave()
        self._open.clear()
        self._inbox.close()
        if self._borrowed:
            self._in_flight.follow_up(self._give_back())

    def keeps_apart(self, id: str, other: str) -> bool:
        """Whether the states of two ids of this owner belong to different engines."""
        return self._backend.keeps_apart(self.owner, id, other)

    async def ask_state(self, action: StateAction, **fields: Any) -> StateReply:
        """Call the engine about states of this request's owner and return its reply.

        `fields`: those of `EngineBackend.ask_state`. Raises what that raises (StateError and its
        subclasses, EngineUnavailable), with parameters named as clients know them.
        """
        try:
            return await self._backend.ask_state(
                action, timeout=ASK_SECONDS, owner=self.owner, **fields
            )
        except EngineError as error:
            if error.param == "target":  # clients call this parameter id
                error.param = "id"
            raise

    def borrow(self, id: str) -> None:
        """Have the state `id` deleted when the request has ended."""
        self._borrowed.append(id)

    async def _give_back(self) -> None:
        for id in self._borrowed:
            with suppress(EngineError):  # the state will expire
                await self.ask_state("delete", id=id)

    def _leave(self) -> None:
        """Abort what is still running, and measure how long the engine takes to release it."""
        if not self._open:
            return
        released, since = self._metrics.released, time.perf_counter()

        def note(client: EngineClient, before: int) -> None:
            released(since, client.event_messages - before)

        for stream in self._streams:
            if stream.id in self._open:
                client = self._backend.client_of(stream.id)
                stream.on_finish = partial(note, client, client.event_messages)
        self.abort()

    def check_room(self) -> None:
        """Raise QueueFull if there is no room for one more engine request at the moment."""
        self._admission.check(1, self.owner)

    def check_tokens(self, tokens: int, requests: int) -> None:
        """Check the queue's room for `tokens` prompt tokens in `requests` engine requests.

        The caller submits them right after this. Raises QueueFull if there is no room at the
        moment, and ApiError 400 if an empty queue would have none.
        """
        self._admission.check_tokens(tokens, requests, self.owner)

    def check_kept(self, ids: Sequence[str]) -> None:
        """Check that no engine gets more requests that resume its states than it can hold.

        `ids`: the state of each engine request. Raises ApiError 400.
        """
        if len(ids) > 1:
            self._admission.check_kept(self._backend.most_of_one(self.owner, ids), self.owner)

    def reserve(self, requests: int) -> None:
        """Admit `requests` engine requests; their places are reserved until they are submitted.

        Raises QueueFull if there is no room at the moment, and ApiError 400 for more than the
        engines can ever hold.
        """
        self._admission.reserve(requests, self.owner)
        self._reserved += requests

    @contextmanager
    def lending(self, part: InferenceRequest) -> Iterator[None]:
        """Lend the place of one admitted engine request to `part`, of the same owner.

        At the context's end the place is reserved again, even if the queue is full by then.
        """
        self._reserved -= 1
        part._reserved += 1
        try:
            yield
        finally:
            if part._reserved:
                part._reserved -= 1
            else:
                self._admission.retake(1, self.owner)
            self._reserved += 1

    def _release(self, requests: int) -> None:
        self._reserved -= requests
        self._admission.release(requests, self.owner)

    def submit(
        self,
        prompt: bytes,
        timeout: float,
        interval: int = 1,
        grammar_field: str | None = None,
        **fields: Any,
    ) -> None:
        """Submit an engine request that has been admitted by `reserve`.

        Args:
            prompt: Token ids packed by `token_ids.pack_ids`.
            timeout: Seconds from the HTTP request's arrival after which the engine request ends
                with what it has.
            interval: Tokens that a delivery of the stream gathers (see RequestStream).
            grammar_field: The client's field that gave the grammar, for error messages.
            fields: Other fields of requests.Request, except `id`, `owner` and `placement`.

        Raises EngineUnavailable, and Draining after `cut`.
        """
        if self._cut:
            raise Draining("the server shut down before the request was read")
        self._before_engine = time.perf_counter() - self._arrived
        request = Request(
            id=self._backend.new_id(),
            prompt=prompt,
            owner=self.owner,
            placement=self.placement,
            timeout=max(timeout - self._before_engine, LEAST_TIMEOUT),
            **fields,
        )
        which = len(self._streams)
        self._streams.append(self._backend.submit(request, interval, self._inbox, which))
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
        """Abort all engine requests that have not ended."""
        if self._open:
            self._backend.abort(sorted(self._open), "abort")

    def stop(self, which: int, kept: int | None) -> None:
        """End one engine request with the reason "stop", after a stop string ended its text.

        `kept`: how many of its generated tokens the kept state is to have read; None if no state is
        kept. Does nothing if the engine request has ended.
        """
        request = self._streams[which].id
        if request in self._open:
            reason: FinishReason = "stop"
            self._backend.abort([request], reason, [] if kept is None else [kept])

    def drop(self, which: int) -> None:
        """Abort one engine request whose output cannot be rendered."""
        request = self._streams[which].id
        if request in self._open:
            self._backend.abort([request], "abort")

    def end_if_behind(self, most: int) -> None:
        """End the stream if more than `most` tokens and alternatives wait for its reader.

        What waits is still sent, and then the error ReaderBehind.
        """
        if not self.awaits_reader:
            return
        unread = sum(stream.unread for stream in self._streams)
        if unread <= most:
            return
        error = ReaderBehind(
            f"the client reads the stream too slowly: {unread} tokens and alternatives are queued; "
            f"allowed: up to {most}; read faster, or ask for fewer tokens or alternatives"
        )
        for stream in self._streams:
            if stream.id in self._open:
                self._backend.give_up(stream.id, error)

    @property
    def is_over(self) -> bool:
        """Whether every engine request has ended and its end has been read."""
        return not self._open

    @property
    def is_cut(self) -> bool:
        """Whether `cut` was called."""
        return self._cut

    def cut(self) -> None:
        """End all engine requests with what they have; later submits raise Draining."""
        self._cut = True
        self.abort()

    def write_through(self, renders: Sequence[RenderTokens], writer: Writer) -> None:
        """Render and write plain tokens as they arrive from now on, without `next_arrivals`.

        `renders`: one function for each engine request. `next_arrivals` still returns tokens that
        arrive together with anything else, and those for which the function returns None.
        """
        self._inbox.tap = _FastPath(self, renders, writer).take

    async def next_arrivals(self) -> list[Arrival]:
        """Wait for the next updates; return an empty list once every engine request has ended.

        Updates that arrived together are returned together, merged into one for each engine
        request. A failed engine request brings its EngineError once.
        """
        batch: list[Arrival] = []
        while self._unread and not batch:
            news = await self._inbox.next()
            now = time.perf_counter()
            for stream in news:
                update = stream.take()
                finished = update.finished
                if finished is not None and finished.answer:  # the engine gathered the tokens
                    self.tokens_out += len(update.tokens)
                    self._metrics.gathered(finished, self._before_engine)
                elif update.tokens:
                    self.observe(len(update.tokens), stream.which, now)
                if update.tokens or update.scores or finished is not None:
                    batch.append((stream.which, update))
                if finished is not None:
                    self._open.discard(stream.id)
                    if self.trace is not None:
                        self.trace.ended(finished)
                    self._unread -= 1
                elif stream.error is not None and not stream.tokens:
                    self._open.discard(stream.id)
                    self._unread -= 1
                    batch.append((stream.which, self._named(stream.error, stream.which)))
        return batch

    def _named(self, error: EngineError, which: int) -> EngineError:
        """Name an engine error's parameter as the client knows it."""
        if error.param == "keep":
            field = self.session_field if self._chosen[which] else "return_state"
            error.param = self.keep_field or field
        elif error.param == "grammar":
            error.param = self._grammar_fields[which]
        return error

    def observe(self, count: int, which: int, now: float) -> None:
        """Count and time `count` tokens of one engine request.

        `now`: their arrival, in seconds by time.perf_counter.
        """
        self.tokens_out += count
        last = self._latest[which]
        if last is None:
            self._metrics.first_tokens.observe(now - self._arrived)
        else:
            self._metrics.gaps.observe((now - last) / count)
        self._latest[which] = now


class _FastPath:
    """Renders and writes plain tokens of one request as they arrive, without `next_arrivals`.

    Only the inbox refers to it: a reference from the request would be a cycle.
    """

    __slots__ = ("_inference", "_renders", "_writer")

    def __init__(
        self, inference: InferenceRequest, renders: Sequence[RenderTokens], writer: Writer
    ) -> None:
        self._inference = inference
        self._renders = renders
        self._writer = writer

    def take(self, news: list[RequestStream]) -> list[RequestStream]:
        """Write what can be written and return the other streams (request_stream.Tap)."""
        writer = self._writer
        if not writer.is_open():
            return news
        renders, observe, now = self._renders, self._inference.observe, time.perf_counter()
        left, rendered = [], []
        for stream in news:
            tokens = stream.tokens
            events = None
            if tokens and stream.only_tokens:
                try:
                    events = renders[stream.which](tokens)
                except Exception:  # it will be raised again by the slow path, for this answer alone
                    events = None
            if events is None:
                left.append(stream)
                continue
            rendered.append(events)
            observe(len(tokens), stream.which, now)
            stream.clear_tokens()
        if rendered:
            writer.write(b"".join(rendered))
        return left
