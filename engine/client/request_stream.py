"""RequestStream: what has come of a request and has not been read yet.

A RequestStream merges what comes between two reads, so that a slow reader costs memory for its own
tokens only, and never holds up another. What the reader of a stream takes at a time is bounded; how
much waits for it can be asked, so that it can be given up. Several streams can share a StreamInbox,
from which one task reads all that have news in one go. A FlushTimer sees to it that readers who are
not woken for every token have what there is after a moment all the same.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Protocol

import msgspec

from engine.errors import EngineError
from engine.protocol.events import Finished
from engine.protocol.logprobs import TokenLogprobs
from engine.protocol.requests import Request
from engine.protocol.token_ids import unpack_ids

MOST_TAKEN = 4096  # tokens, and alternatives that were asked for, in one update of a stream
MOST_HELD_SECONDS = 0.05  # that a token may be kept from its reader for the sake of others


class Holder(Protocol):
    """Something that keeps what has come from its reader."""

    def release(self) -> None:
        """Gives it what there is."""


class FlushTimer:
    """Readers that are not woken for every token, but not kept waiting for long either.

    Releases what has been held for MOST_HELD_SECONDS; used on one event loop.
    """

    def __init__(self) -> None:
        self._until: dict[Holder, float] = {}  # by the loop's time, the earliest first
        self._timer: asyncio.TimerHandle | None = None

    def add(self, holder: Holder) -> None:
        """It holds something, since now if it did not before."""
        if holder in self._until:
            return
        loop = asyncio.get_running_loop()
        self._until[holder] = loop.time() + MOST_HELD_SECONDS
        if self._timer is None:
            self._timer = loop.call_later(MOST_HELD_SECONDS, self._release)

    def discard(self, holder: Holder) -> None:
        """It holds nothing."""
        self._until.pop(holder, None)

    def clear(self) -> None:
        """Nothing is held any more."""
        self._until.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _release(self) -> None:
        loop = asyncio.get_running_loop()
        self._timer, now = None, loop.time()
        for holder, until in list(self._until.items()):
            if until > now:
                self._timer = loop.call_at(until, self._release)
                return
            del self._until[holder]
            holder.release()


class Update(msgspec.Struct):
    """What has come of one request since the last update.

    The tokens of a request that is not streamed come with `finished`, as tokens here too; their
    log-probabilities stay packed there, for to unpack many takes a while.
    """

    tokens: list[int] = []
    # Runs in parallel to `tokens`; empty when the request asks for none, or is not streamed.
    logprobs: list[TokenLogprobs] = []
    scores: list[TokenLogprobs] = []
    finished: Finished | None = None


# Takes the news of streams that it can deal with at once; returns the others, untaken.
Tap = Callable[[list["RequestStream"]], list["RequestStream"]]


class ReadyStreams:
    """Those that are to be asked in the event loop's next turn, in one go."""

    def __init__(self) -> None:
        self._inboxes: list[StreamInbox] = []
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """That of those who read the inboxes. To ask for it takes Python 3.11 a system call."""
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
        return self._loop

    def add(self, inbox: StreamInbox) -> None:
        """Its tap is asked, which is not going to be yet."""
        if not self._inboxes:
            self.loop.call_soon(self._ask)
        self._inboxes.append(inbox)

    def _ask(self) -> None:
        inboxes, self._inboxes = self._inboxes, []
        for inbox in inboxes:
            inbox.ask_tap()


class StreamInbox:
    """Streams with news, each once, in the order in which they came; one task reads it.

    A `tap` saves waking the task: while the task waits, news are shown to the tap first, once in a
    turn of the event loop, and the task is woken for what the tap leaves.
    """

    __slots__ = ("_closed", "_news", "_ready", "_unaware", "_waiter", "tap")

    def __init__(self, ready: ReadyStreams | None = None) -> None:
        """`ready`: asks its tap together with others'; these need not be one engine's."""
        self._ready = ready or ReadyStreams()
        self._news: list[RequestStream] = []
        self._waiter: asyncio.Future[None] | None = None
        self._unaware = False  # the task waits, and neither it nor the tap is going to look
        self._closed = False
        self.tap: Tap | None = None

    def close(self) -> None:
        """Nobody reads it any more: it forgets its news, and whatever is still put into it."""
        self._closed = True
        self._news.clear()
        self.tap = None

    async def next(self) -> list[RequestStream]:
        """All streams with news, each of which is to be taken; waits for the first one."""
        while not self._news:
            self._waiter = self._ready.loop.create_future()
            self._unaware = True
            try:
                await self._waiter
            finally:
                self._waiter, self._unaware = None, False
        news, self._news = self._news, []
        return news

    def put(self, stream: RequestStream) -> None:
        """A stream has news, and was read since it last had some."""
        if self._closed:
            return
        self._news.append(stream)
        if self._unaware:
            self._unaware = False
            if self.tap is not None:
                self._ready.add(self)
            elif self._waiter is not None and not self._waiter.done():  # it may be cancelled
                self._waiter.set_result(None)

    def ask_tap(self) -> None:
        """Shows it the news, unless the task sees to them."""
        waiter, tap = self._waiter, self.tap
        if waiter is None or waiter.done() or tap is None:
            return
        news, self._news = self._news, []
        try:
            left = tap(news)
        except Exception as error:
            waiter.set_exception(error)
            return
        if left:
            self._news += left
            waiter.set_result(None)
        else:
            self._unaware = True


class RequestStream:
    """What comes of one request; one task reads it, by itself or through an inbox.

    `async for update in stream` ends after the update that holds `finished`. The reader is given
    the first tokens at once, and further ones when `interval` of them have come, when the first of
    them was held for MOST_HELD_SECONDS (by `flush_timer`), or when the request ends.
    """

    __slots__ = (
        "_flush_timer", "_inbox", "_most", "_over", "_released", "_reports", "_rest", "_waiter",
        "error", "id", "interval", "notified", "on_finish", "only_tokens", "tokens", "which",
    )  # fmt: skip

    def __init__(
        self,
        request: Request,
        interval: int = 1,
        inbox: StreamInbox | None = None,
        which: int = 0,
        flush_timer: FlushTimer | None = None,
    ) -> None:
        """`inbox`: through which it is read, if not by itself; `which` is its reader's own number
        for it."""
        self.interval = interval
        self.on_finish: Callable[[], None] | None = None
        self._flush_timer = flush_timer
        self._released = True  # what is held may be read, as the first tokens may
        self.id = request.id
        self.which = which
        self.error: EngineError | None = None  # after all that `take` gives
        self.tokens: list[int] = []  # that have come since they were last taken
        self._rest = Update()  # what else has
        self.only_tokens = True  # nothing else has
        self.notified = False  # the reader knows that there is news, which it has not taken
        self._reports = 1 + (request.sampling.logprobs or 0)  # of a token
        # What is not streamed is read as a whole.
        self._most = max(1, MOST_TAKEN // self._reports) if request.stream else None
        self._inbox = inbox
        self._over = False  # the update with `finished` has been read
        self._waiter: asyncio.Future[None] | None = None

    @property
    def unread(self) -> int:
        """How much waits for the reader: tokens, and alternatives that were asked for."""
        return len(self.tokens) * self._reports

    def take(self) -> Update:
        """What has come since the last call, which may be nothing; of a stream not more than
        MOST_TAKEN, and then there are news at once."""
        if self._most is not None and len(self.tokens) > self._most:
            return self._take_first(self._most)
        update, self._rest = self._rest, Update()
        update.tokens, self.tokens = self.tokens, []
        self._released, self.only_tokens, self.notified = False, True, False
        return update

    def _take_first(self, count: int) -> Update:
        rest = self._rest
        update = Update(self.tokens[:count], rest.logprobs[:count], rest.scores)
        del self.tokens[:count], rest.logprobs[:count]
        rest.scores = []
        self._released, self.notified = True, False
        self.notify()
        return update

    def clear_tokens(self) -> None:
        """As `take`, where `only_tokens` have come, which the caller has read."""
        self.tokens.clear()
        self.notified = self._released = False

    @property
    def due(self) -> bool:
        """There is something to read, and no reason to wait for more."""
        tokens, rest = self.tokens, self._rest
        if rest.scores or rest.finished is not None:
            return True
        if self.interval == 1 or self._released or self.error is not None:
            return bool(tokens)
        return len(tokens) >= self.interval

    async def next(self) -> Update:
        """As `take`; waits when that is nothing, or is held.

        Raises the request's error once all that came before it has been read, and
        RuntimeError after the end or while another task waits here.
        """
        if self._over:
            raise RuntimeError(f"request {self.id} has ended")
        if self._waiter is not None:
            raise RuntimeError(f"request {self.id} is being read by another task")
        self.notified = False
        while not self.due:
            if self.error is not None:
                raise self.error
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
                self.notified = False
        update = self.take()
        self._over = update.finished is not None
        return update

    def __aiter__(self) -> AsyncIterator[Update]:
        return self

    async def __anext__(self) -> Update:
        if self._over:
            raise StopAsyncIteration
        return await self.next()

    # Filled by EngineClient. The reader runs after the whole message has been handled.

    def add_tokens(self, tokens: list[int], logprobs: Sequence[TokenLogprobs] = ()) -> None:
        """`logprobs`: of each of them, where the request asked for them."""
        self.tokens.extend(tokens)
        if logprobs:
            self._rest.logprobs.extend(logprobs)
            self.only_tokens = False
        if not self.notified:
            self.notify()

    def add_scores(self, scores: list[TokenLogprobs]) -> None:
        self._rest.scores.extend(scores)
        self.only_tokens = False
        if not self.notified:
            self.notify()

    def finish(self, finished: Finished) -> None:
        if finished.answer:
            self.tokens.extend(unpack_ids(finished.answer))
        self._rest.finished = finished
        self.only_tokens = False
        if not self.notified:
            self.notify()
        if self.on_finish is not None:
            self.on_finish()

    def fail(self, error: EngineError) -> None:
        self.error = error
        self.only_tokens = False
        if not self.notified:
            self.notify()

    def release(self) -> None:
        """What is held may be read now."""
        self._released = True
        if not self.notified:
            self.notify()

    def notify(self) -> None:
        """Lets the reader run, unless it is to wait for more; its task may have been cancelled."""
        if self.interval > 1 and self._flush_timer is not None:
            if not self.due and self.error is None:
                self._flush_timer.add(self)
                return
            self._flush_timer.discard(self)
        self.notified = True
        if self._inbox is not None:
            self._inbox.put(self)
        elif self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
