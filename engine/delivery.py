"""Delivery: the answer to one request as it comes, for one reader.

What has come since it was last read is merged, so that a slow reader costs memory for its own
tokens only, and never holds up another.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

from engine.errors import EngineError
from engine.messages import Finished, Request, TokenLogprobs


@dataclass(slots=True)
class Update:
    """What has come of one request since the last update.

    The tokens of a request that is not streamed come with `finished`, as tokens here too.
    """

    tokens: list[int] = field(default_factory=list)
    # Runs in parallel to `tokens`; empty when the request asks for none.
    logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    scores: list[TokenLogprobs] = field(default_factory=list)
    finished: Finished | None = None

    @property
    def empty(self) -> bool:
        """Nothing has come."""
        return not (self.tokens or self.scores or self.finished)


class Delivery:
    """The answer to one request; one task reads it.

    `async for update in delivery` ends after the update that holds `finished`. The reader is given
    the first tokens at once, and further ones when `interval` of them have come, when the first of
    them was held for MOST_HELD_SECONDS, or when the answer ends.
    """

    def __init__(self, request: Request, interval: int = 1) -> None:
        self.id = request.id
        self._wants_logprobs = request.sampling.logprobs is not None
        self._update = Update()
        self._error: EngineError | None = None
        self.interval = interval
        self._begun = False  # an update has been read
        self._released = False  # what is held may be read
        self._over = False  # the update with `finished` has been read
        self.on_finish: Callable[[], None] | None = None
        self._waiter: asyncio.Future[None] | None = None

    @property
    def failed(self) -> bool:
        """Nothing more will come."""
        return self._error is not None

    @property
    def due(self) -> bool:
        """There is something to read, and no reason to wait for more."""
        update = self._update
        if update.empty:
            return False
        if self.interval == 1 or self._released or not self._begun or self.failed:
            return True
        return bool(
            len(update.tokens) >= self.interval or update.finished is not None or update.scores
        )

    async def next(self) -> Update:
        """All that has come since the last call; waits when that is nothing, or is held.

        Raises the request's error once all that came before it has been read, and
        RuntimeError after the end or while another task waits here.
        """
        if self._over:
            raise RuntimeError(f"request {self.id} has ended")
        if self._waiter is not None:
            raise RuntimeError(f"request {self.id} is being read by another task")
        while self._update.empty or (self.interval > 1 and not self.due):
            if self._error is not None:
                raise self._error
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        update, self._update = self._update, Update()
        self._begun, self._released = True, False
        self._over = update.finished is not None
        return update

    def __aiter__(self) -> AsyncIterator[Update]:
        return self

    async def __anext__(self) -> Update:
        if self._over:
            raise StopAsyncIteration
        return await self.next()

    # Filled by EngineClient, which calls `wake` once per message.

    def add_token(self, token: int, logprobs: TokenLogprobs | None) -> None:
        self._update.tokens.append(token)
        if self._wants_logprobs:
            self._update.logprobs.append(logprobs)

    def add_tokens(self, tokens: list[int]) -> None:
        """Tokens of a request that asked for no log-probabilities."""
        self._update.tokens.extend(tokens)

    def add_scores(self, scores: list[TokenLogprobs]) -> None:
        self._update.scores.extend(scores)

    def finish(self, finished: Finished) -> None:
        self._update.tokens.extend(finished.tokens)
        self._update.logprobs.extend(finished.logprobs)
        self._update.finished = finished
        if self.on_finish is not None:
            self.on_finish()

    def fail(self, error: EngineError) -> None:
        self._error = error

    def release(self) -> None:
        """What is held may be read now."""
        self._released = True
        self.wake()

    def wake(self) -> None:
        """Lets the reader run, if one waits; its task may have been cancelled meanwhile."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
