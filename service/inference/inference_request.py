"""InferenceRequest: one HTTP request for the model, from its arrival to its last byte, and what it
asks of the engine. Whatever ends the HTTP request ends its engine requests too.

A prompt, each sample of it and each continuation is one engine request. `which` is the position of
one among those of the HTTP request, in the order in which they were submitted.
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

# What a request brought: its position among the engine requests, and an update or its failure.
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
    """A context manager; on leaving it, engine requests that have not ended are aborted.

    Used on one event loop.
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
        """Made by `Runtime.begin`.

        `in_flight` holds all that have not ended. The request's headers came at `arrived`, in
        seconds by time.perf_counter. Prefix cache and states are shared with requests of the same
        `owner` (the name of the API key, or ""), whose priorities begin at `least_priority`.
        """
        self._backend = backend
        self._metrics = metrics
        self._admission = admission
        self._reserved = 0  # engine requests that are admitted and not submitted yet
        self._in_flight = in_flight
        self._open: set[int] = set()  # ids of requests that have not ended
        self.keep_field: str | None = None  # by which the client asked for a state to be kept
        self._borrowed: list[str] = []  # ids of states that are there for this request alone
        self.brought: dict[str, StateInfo] = {}  # of them, by the snapshots that they were
        self._inbox = StreamInbox(backend.ready_streams)
        self._streams: list[RequestStream] = []
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
        """Whether two of this owner's states are on different engines, as EngineBackend has it."""
        return self._backend.keeps_apart(self.owner, id, other)

    async def ask_state(self, action: StateAction, **fields: Any) -> StateReply:
        """Asks the engine about the states of this request's owner; returns its reply.

        `fields` as of `EngineBackend.ask_state`. Raises what that raises (StateError and its kinds,
        EngineUnavailable), with the names that clients know parameters by.
        """
        try:
            return await self._backend.ask_state(
                action, timeout=ASK_SECONDS, owner=self.owner, **fields
            )
        except EngineError as error:
            if error.param == "target":  # clients call it the id
                error.param = "id"
            raise

    def borrow(self, id: str) -> None:
        """Has the state `id` deleted when the request is over."""
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

        for stream in self._streams:
            if stream.id in self._open:
                client = self._backend.client_of(stream.id)
                stream.on_finish = partial(note, client, client.event_messages)
        self.abort()

    def check_room(self) -> None:
        """Raises QueueFull where the queue has no room for a single engine request just now."""
        self._admission.check(1, self.owner)

    def check_tokens(self, tokens: int, requests: int) -> None:
        """Raises QueueFull where `tokens` prompt tokens in `requests` engine requests are too many
        just now, and ApiError 400 where they would be for an empty queue.

        They are submitted right after, or not at all.
        """
        self._admission.check_tokens(tokens, requests, self.owner)

    def check_kept(self, ids: Sequence[str]) -> None:
        """Raises ApiError 400 where more engine requests resume states of one engine, of these ids,
        than that engine can hold."""
        if len(ids) > 1:
            self._admission.check_kept(self._backend.most_of_one(self.owner, ids), self.owner)

    def reserve(self, requests: int) -> None:
        """Admits so many engine requests: their room in the queue is theirs until they are
        submitted or the request ends.

        Raises QueueFull, and ApiError 400 for more than the engines could ever hold.
        """
        self._admission.reserve(requests, self.owner)
        self._reserved += requests

    @contextmanager
    def lending(self, part: InferenceRequest) -> Iterator[None]:
        """Lends one of the admitted engine requests to `part`, of the same owner.

        It is admitted again at the context's end, whatever else has come meanwhile.
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
        """Submits an engine request, which has been admitted by `reserve`.

        Args:
            prompt: Token ids as `token_ids.pack_ids` packs them.
            timeout: Seconds from the HTTP request's arrival until it ends with what it has.
            interval: Tokens that a delivery of the stream gathers, as of a RequestStream.
            grammar_field: The parameter by which the client asked for its grammar, for errors.
            fields: Others of requests.Request, but `id` and `owner`.

        Raises EngineUnavailable, and Draining after `cut`.
        """
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
        """Aborts all engine requests that have not ended."""
        if self._open:
            self._backend.abort(sorted(self._open), "abort")

    def stop(self, which: int, kept: int | None) -> None:
        """Ends one engine request with the reason "stop", as a stop string has ended its text.

        `kept`: how many of its generated tokens stand in the state that it leaves; None where it
        leaves none. Does nothing once it has ended.
        """
        request = self._streams[which].id
        if request in self._open:
            reason: FinishReason = "stop"
            self._backend.abort([request], reason, [] if kept is None else [kept])

    def drop(self, which: int) -> None:
        """Aborts one engine request, whose output cannot be rendered."""
        request = self._streams[which].id
        if request in self._open:
            self._backend.abort([request], "abort")

    def end_if_behind(self, most: int) -> None:
        """Ends a stream of which more than `most` tokens and alternatives wait for its reader.

        What waits is still sent, and then the error ReaderBehind.
        """
        if not self.awaits_reader:
            return
        unread = sum(stream.unread for stream in self._streams)
        if unread <= most:
            return
        error = ReaderBehind(
            f"the stream is read more slowly than it is written: {unread} tokens and alternatives "
            f"wait, and at most {most} may; read faster, or ask for fewer tokens or alternatives"
        )
        for stream in self._streams:
            if stream.id in self._open:
                self._backend.give_up(stream.id, error)

    @property
    def is_over(self) -> bool:
        """Every engine request has ended, and its end has been read."""
        return not self._open

    @property
    def is_cut(self) -> bool:
        """Whether `cut` was called: it submits nothing more."""
        return self._cut

    def cut(self) -> None:
        """Ends all engine requests with what they have; nothing more is submitted."""
        self._cut = True
        self.abort()

    def write_through(self, renders: Sequence[RenderTokens], writer: Writer) -> None:
        """Has plain tokens rendered and written as they come, while `next_arrivals` waits.

        `renders` has a function for each engine request, by `which`. Tokens that come with anything
        else, and those for which it gives None, come by `next_arrivals` as before.
        """
        self._inbox.tap = _FastPath(self, renders, writer).take

    async def next_arrivals(self) -> list[Arrival]:
        """Waits for what arrives next; empty where every engine request has ended.

        Updates that came together are returned together, one for each engine request: what has come
        of one since it was last read is merged. A failed one brings its EngineError, once.
        """
        batch: list[Arrival] = []
        while self._unread and not batch:
            news = await self._inbox.next()
            now = time.perf_counter()
            for stream in news:
                update = stream.take()
                finished = update.finished
                if finished is not None and finished.answer:  # gathered in the engine
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
        """An error with the name that the client knows its parameter by."""
        if error.param == "keep":
            field = "session_id" if self._chosen[which] else "return_state"
            error.param = self.keep_field or field
        elif error.param == "grammar":
            error.param = self._grammar_fields[which]
        return error

    def observe(self, count: int, which: int, now: float) -> None:
        """Counts and times `count` tokens of one engine request that came at `now`, in seconds by
        time.perf_counter."""
        self.tokens_out += count
        last = self._latest[which]
        if last is None:
            self._metrics.first_tokens.observe(now - self._arrived)
        else:
            self._metrics.gaps.observe((now - last) / count)
        self._latest[which] = now


class _FastPath:
    """Renders and writes plain tokens of one request as they come, past `next_arrivals`.

    The inbox alone holds it: a request that knew its own fast path would be a reference cycle.
    """

    __slots__ = ("_inference", "_renders", "_writer")

    def __init__(
        self, inference: InferenceRequest, renders: Sequence[RenderTokens], writer: Writer
    ) -> None:
        self._inference = inference
        self._renders = renders
        self._writer = writer

    def take(self, news: list[RequestStream]) -> list[RequestStream]:
        """As engine.client.request_stream.Tap."""
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
                except Exception:  # it ends this answer alone, where it is raised again
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
