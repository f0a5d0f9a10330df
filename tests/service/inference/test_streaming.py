"""Events of several requests in one stream: none of a request comes behind its end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import pytest

from engine.client.request_stream import Update
from engine.errors import EngineError, QueueFull, StepFailed
from service.http.connection import Writer
from service.inference.inference_request import Arrival, InferenceRequest, RenderTokens
from service.inference.sse import EventSource

ERROR = StepFailed("a step failed")
BREAKS = 0  # a token that nobody can tell


class Arrivals:
    """A request to which this comes."""

    def __init__(self, *batches: list[Arrival]) -> None:
        self._batches = list(batches)

    @property
    def is_over(self) -> bool:
        return not self._batches

    async def next_arrivals(self) -> list[Arrival]:
        return [] if self.is_over else self._batches.pop(0)

    def drop(self, which: int) -> None:
        """What else comes of it is among the batches."""

    def write_through(self, renders: Sequence[RenderTokens], writer: Writer) -> None:
        self.renders = renders


class Named:
    """A request that tells which one it is and its tokens."""

    def __init__(self, which: int) -> None:
        self._which = which

    def render(self, update: Update) -> bytes:
        if update.tokens[0] == BREAKS:
            raise ValueError("no text")
        return b"%d:%d " % (self._which, update.tokens[0])

    def render_tokens(self, tokens: Sequence[int]) -> bytes | None:
        return b"%d:%d " % (self._which, tokens[0])


async def _sent(count: int, *batches: list[Arrival]) -> list[str]:
    """What a client reads; `raise` where the stream ends with an error."""
    sent = b""
    try:
        chunks = EventSource(
            cast(InferenceRequest, Arrivals(*batches)),
            [Named(which) for which in range(count)],
            lambda which, error: b"%d:error " % which,
            lambda: b"",
        )
        while not chunks.over:
            sent += await chunks.next()
    except EngineError:
        sent += b"raise"
    return sent.replace(b"data: [DONE]\n\n", b"done").decode().split()


def _token(which: int, token: int = 7) -> Arrival:
    return which, Update(tokens=[token])


@pytest.mark.parametrize("begun", [False, True])
async def test_a_failure_comes_behind_the_tokens_before_it(begun: bool) -> None:
    """Though both came together."""
    before = [[_token(0, 1), _token(1, 1)]] if begun else []
    sent = await _sent(2, *before, [_token(0), (0, ERROR), _token(1)], [_token(1, 8)])
    assert sent[2 * begun :] == ["0:7", "0:error", "1:7", "1:8", "done"]


async def test_failures_that_end_a_stream_leave_out_nothing_that_came_before() -> None:
    sent = await _sent(2, [_token(0), _token(1)], [_token(0, 8), (0, ERROR), (1, ERROR)])
    assert sent == ["0:7", "1:7", "0:8", "0:error", "raise"]


async def test_failures_before_anything_else_wait_for_what_comes() -> None:
    """For where all fail, the first bytes are those of an HTTP error."""
    assert await _sent(2, [(0, ERROR)], [(1, ERROR)]) == ["raise"]
    assert await _sent(2, [(0, ERROR)], [_token(1)]) == ["0:error", "1:7", "done"]
    assert await _sent(2, [(0, ERROR), _token(1)]) == ["0:error", "1:7", "done"]


async def test_an_error_before_all_else_is_told_with_the_first_token() -> None:
    assert await _sent(2, [(1, ERROR)], [_token(0)]) == ["1:error", "0:7", "done"]


async def test_a_batch_of_which_the_queue_refuses_a_part_is_refused_whole() -> None:
    assert await _sent(2, [_token(0), (1, QueueFull("full"))]) == ["raise"]


async def test_an_answer_that_cannot_be_told_says_no_more() -> None:
    """Neither here nor past the task that asks, until its request has ended."""
    assert await _sent(2, [_token(0), _token(1, BREAKS)], [_token(1), _token(0)]) == [
        "0:7", "1:error", "0:7", "done",
    ]  # fmt: skip
    inference = Arrivals([_token(0), _token(1)], [_token(1, BREAKS)], [_token(0)])
    chunks = EventSource(
        cast(InferenceRequest, inference),
        [Named(0), Named(1)],
        lambda which, _: b"%d:error " % which,
        bytes,
    )
    await chunks.next()
    chunks.write_through(cast(Writer, None))
    assert [render([5]) for render in inference.renders] == [b"0:5 ", b"1:5 "]
    assert await chunks.next() == b"1:error "
    assert [render([5]) for render in inference.renders] == [b"0:5 ", None]
