"""Generation: prompts in, answers out, gathered or streamed. Both generating endpoints use it."""

from __future__ import annotations

from array import array
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass
from functools import partial
from typing import Any

from engine.client import Update
from engine.errors import EngineError
from engine.messages import SamplingParams
from service.answer import Answer, Piece
from service.flight import Flight
from service.runtime import Runtime
from service.stop import StopStrings
from service.streaming import ends_all, event_chunks
from service.wire import render


@dataclass(frozen=True, slots=True)
class Task:
    """One prompt, and what to do with it."""

    prompt: array[int]
    packed: bytes  # the prompt as messages.pack_ids gives it; samples of one prompt share both
    params: SamplingParams
    stop: StopStrings | None
    timeout: float
    score_top: int | None = None  # score the prompt too, with the k best at each position
    shared: bool = False  # other tasks have the same prompt: read it once
    ends: frozenset[int] = frozenset()  # see Answer

    def answer(self, runtime: Runtime) -> Answer:
        return Answer(runtime.tokenizer, self.prompt, self.stop, self.ends)

    def submit(self, flight: Flight, *, stream: bool) -> None:
        several = len(self.prompt) > 1  # a prompt of one token has nothing to score or to share
        flight.submit(
            self.packed,
            sampling=self.params,
            # Without stop strings nobody looks at the tokens of an answer that is not streamed.
            stream=stream or self.stop is not None,
            score=self.score_top is not None and several,
            score_top=self.score_top or 0,
            share_at=(len(self.prompt) - 1,) if self.shared and several else (),
            timeout=self.timeout,
        )


@dataclass(slots=True)
class Outcome:
    """What came of a task: the answer with its pieces, or the error."""

    answer: Answer
    pieces: list[Piece]
    error: EngineError | None = None

    @property
    def text(self) -> str:
        return "".join([piece.text for piece in self.pieces])

    @property
    def tokens(self) -> list[int]:
        return [piece.token for piece in self.pieces if piece.token is not None]


async def gather(runtime: Runtime, flight: Flight, tasks: list[Task]) -> list[Outcome]:
    """The outcome of every task. Raises EngineError where no task was served."""
    outcomes = [Outcome(task.answer(runtime), []) for task in tasks]
    failed = 0
    for task in tasks:
        task.submit(flight, stream=False)
    async for batch in flight.arrivals():
        for which, came in batch:
            outcome = outcomes[which]
            if isinstance(came, EngineError):
                outcome.error = came
                failed += 1
                if failed == len(tasks) or ends_all(came):
                    raise came
            else:
                # A whole answer may come at once.
                take = partial(outcome.answer.take, came)
                outcome.pieces += await render(len(came.tokens), take)
                _stop(flight, which, outcome.answer, came)
    return outcomes


async def stream(
    runtime: Runtime,
    flight: Flight,
    tasks: list[Task],
    render_pieces: Callable[[int, Answer, list[Piece]], bytes | Coroutine[Any, Any, bytes]],
    render_error: Callable[[int, EngineError], bytes],
    last: Callable[[list[Answer]], bytes],
) -> AsyncIterator[bytes]:
    """Chunks of events. Errors as `streaming.event_chunks`."""
    answers = [task.answer(runtime) for task in tasks]

    def render_update(which: int, update: Update) -> bytes | Coroutine[Any, Any, bytes]:
        pieces = answers[which].take(update)
        _stop(flight, which, answers[which], update)
        return render_pieces(which, answers[which], pieces)

    for task in tasks:
        task.submit(flight, stream=True)
    async for chunk in event_chunks(
        flight, len(tasks), render_update, render_error, lambda: last(answers)
    ):
        yield chunk


def _stop(flight: Flight, which: int, answer: Answer, update: Update) -> None:
    """Tells the engine where a stop string ended the answer that took the update."""
    if answer.stopped and update.finished is None:
        flight.abort([which], "stop")
