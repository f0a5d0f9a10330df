"""RequestStream: what a request has produced and its reader has not taken yet.

A RequestStream merges everything that arrives between two reads. A slow reader therefore uses
memory for its own tokens only, and never delays another. One read returns a bounded amount;
`unread` says how much is waiting, so that a reader that falls behind can be dropped. Several
streams can share a StreamInbox, through which one task reads all streams with news at once. A
FlushTimer makes sure that readers which are not woken for every token still get their tokens within
MOST_HELD_SECONDS.
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

MOST_TAKEN = 4096  # tokens, plus requested alternatives, in one update of a streamed request
MOST_HELD_SECONDS = 0.05  # the longest time for which a token is held back to be merged with others


class Holder(Protocol):
    """Something that may hold back data from its reader."""

    def release(self) -> None:
        """Let the reader have what is held back."""


class FlushTimer:
    """Bounds how long data is held back from readers that are not woken for every token.

    Calls `release` on each holder MOST_HELD_SECONDS after it was added. Used on one event loop.
    """

    def __init__(self) -> None:
        self._until: dict[Holder, float] = {}  # deadlines by the loop's clock, the earliest first
        self._timer: asyncio.TimerHandle | None = None

    def add(self, holder: Holder) -> None:
        """Start the holder's deadline, unless it is running already."""
        if holder in self._until:
            return
        loop = asyncio.get_running_loop()
        self._until[holder] = loop.time() + MOST_HELD_SECONDS
        if self._timer is None:
            self._timer = loop.call_later(MOST_HELD_SECONDS, self._release)

    def discard(self, holder: Holder) -> None:
        """Cancel the holder's deadline: it holds nothing back any more."""
        self._until.pop(holder, None)

    def clear(self) -> None:
        """Cancel all deadlines."""
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
    """What one request has produced since its last update.

    A request that is not streamed gets its tokens with `finished`, but they appear in `tokens` too.
    Their log-probabilities stay packed in `finished`, because unpacking many takes time.
    """

    tokens: list[int] = []
    # Parallel to `tokens`; empty if the request asks for none or is not streamed.
    logprobs: list[TokenLogprobs] = []
    scores: list[TokenLogprobs] = []
    finished: Finished | None = None


# Handles the streams that it can handle at once, and returns the others untouched.
Tap = Callable[[list["RequestStream"]], list["RequestStream"]]


class ReadyStreams:
    """Inboxes with news, whose taps are all called in the event loop's next turn."""

    def __init__(self) -> None:
        self._inboxes: list[StreamInbox] = []
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The event loop of the inboxes' readers, cached since Python 3.11 makes a system call."""
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
        return self._loop

    def add(self, inbox: StreamInbox) -> None:
        """Schedule the inbox's tap; the inbox must not be scheduled already."""
        if not self._inboxes:
            self.loop.call_soon(self._ask)
        self._inboxes.append(inbox)

    def _ask(self) -> None:
        inboxes, self._inboxes = self._inboxes, []
        for inbox in inboxes:
            inbox.ask_tap()


class StreamInbox:
    """A queue of streams with news, each listed once, in order of arrival; one task reads it.

    An optional `tap` saves waking the task. While the task waits, the tap is called with the news
    once per turn of the event loop. The task is woken only for streams that the tap returns.
    """

    __slots__ = ("_closed", "_news", "_ready", "_unaware", "_waiter", "tap")

    def __init__(self, ready: ReadyStreams | None = None) -> None:
        """Create an empty inbox; `ready` calls its tap, and may be shared with other inboxes."""
        self._ready = ready or ReadyStreams()
        self._news: list[RequestStream] = []
        self._waiter: asyncio.Future[None] | None = None
        self._unaware = False  # the task waits, and no call of the tap is scheduled
        self._closed = False
        self.tap: Tap | None = None

    def close(self) -> None:
        """Stop using the inbox: drop its news and ignore streams that are put into it later."""
        self._closed = True
        self._news.clear()
        self.tap = None

    async def next(self) -> list[RequestStream]:
        """Wait for news, and return all streams with news; the caller must take from each."""
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
        """Add a stream that has news and was read since it last had some."""
        if self._closed:
            return
        self._news.append(stream)
        if self._unaware:
            self._unaware = False
            if self.tap is not None:
                self._ready.add(self)
            # the waiting task may have been cancelled
            elif self._waiter is not None and not self._waiter.done():
                self._waiter.set_result(None)

    def ask_tap(self) -> None:
        """Call the tap with the news, unless the task is already going to read them."""
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
    """The output of one request; one task reads it, directly or through an inbox.

    `async for update in stream` ends after the update that holds `finished`. The reader gets the
    first tokens at once. It gets later ones when `interval` of them have arrived, when the oldest
    was held back for MOST_HELD_SECONDS (by `flush_timer`), or when the request ends.
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
        """Create an empty stream.

        Args:
            request: the request whose output it carries.
            interval: tokens to merge before the reader is woken.
            inbox: the inbox through which it is read; None: it is read directly.
            which: a number for the stream, chosen by its reader.
            flush_timer: bounds how long tokens are held back.
        """
        self.interval = interval
        self.on_finish: Callable[[], None] | None = None
        self._flush_timer = flush_timer
        self._released = True  # tokens held back may be read now; true at first
        self.id = request.id
        self.which = which
        self.error: EngineError | None = None  # raised after everything in `take` has been read
        self.tokens: list[int] = []  # tokens that have arrived since the last take
        self._rest = Update()  # everything else that has arrived
        self.only_tokens = True  # nothing but tokens has arrived
        self.notified = False  # the reader was told of news that it has not taken yet
        self._reports = 1 + (request.sampling.logprobs or 0)  # values reported for each token
        # The answer of a request that is not streamed is returned as a whole.
        self._most = max(1, MOST_TAKEN // self._reports) if request.stream else None
        self._inbox = inbox
        self._over = False  # the update with `finished` has been read
        self._waiter: asyncio.Future[None] | None = None

    @property
    def unread(self) -> int:
        """How much is waiting for the reader: tokens, plus requested alternatives."""
        return len(self.tokens) * self._reports

    def take(self) -> Update:
        """Return what has arrived since the last call, which may be nothing.

        For a streamed request it returns at most MOST_TAKEN values; if more are waiting, the stream
        has news again at once.
        """
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
        """Discard the tokens, which the caller has read; only allowed while `only_tokens`."""
        self.tokens.clear()
        self.notified = self._released = False

    @property
    def due(self) -> bool:
        """Whether there is something to read and no reason to wait for more."""
        tokens, rest = self.tokens, self._rest
        if rest.scores or rest.finished is not None:
            return True
        if self.interval == 1 or self._released or self.error is not None:
            return bool(tokens)
        return len(tokens) >= self.interval

    async def next(self) -> Update:
        """Return the next update, as `take` does; wait while there is none or it is held back.

        Raises the request's error once everything before it has been read. Raises RuntimeError
        after the end, or if another task is waiting here.
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

    # Methods called by EngineClient. The reader runs only after the whole message was handled.

    def add_tokens(self, tokens: list[int], logprobs: Sequence[TokenLogprobs] = ()) -> None:
        """Append tokens, with the log-probabilities of each if the request asked for them."""
        self.tokens.extend(tokens)
        if logprobs:
            self._rest.logprobs.extend(logprobs)
            self.only_tokens = False
        if not self.notified:
            self.notify()

    def add_scores(self, scores: list[TokenLogprobs]) -> None:
        """Append log-probabilities of prompt tokens."""
        self._rest.scores.extend(scores)
        self.only_tokens = False
        if not self.notified:
            self.notify()

    def finish(self, finished: Finished) -> None:
        """Append the terminal event of a request that was served."""
        if finished.answer:
            self.tokens.extend(unpack_ids(finished.answer))
        self._rest.finished = finished
        self.only_tokens = False
        if not self.notified:
            self.notify()
        if self.on_finish is not None:
            self.on_finish()

    def fail(self, error: EngineError) -> None:
        """End the stream with an error, which is raised after everything received so far."""
        self.error = error
        self.only_tokens = False
        if not self.notified:
            self.notify()

    def release(self) -> None:
        """Let the reader have what is held back."""
        self._released = True
        if not self.notified:
            self.notify()

    def notify(self) -> None:
        """Wake the reader, unless it is to wait for more tokens."""
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
