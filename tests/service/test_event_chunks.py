"""event_chunks: the order of a stream's events, whatever comes together."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, cast

import pytest

from engine.client import Update
from engine.errors import EngineError, QueueFull, StepFailed
from service.flight import Flight
from service.streaming import event_chunks

Arrivals = list[list[tuple[int, Update | EngineError]]]


class Arriving:
    """A flight of which nothing is known but what arrives."""

    def __init__(self, batches: Arrivals) -> None:
        self._batches = batches

    async def arrivals(self) -> AsyncIterator[list[Any]]:
        for batch in self._batches:
            yield batch


def chunks(batches: Arrivals, count: int) -> AsyncIterator[bytes]:
    return event_chunks(
        cast(Flight, Arriving(batches)),
        count,
        lambda which, update: b"".join(b"%d:%d " % (which, token) for token in update.tokens),
        lambda which, error: b"%d:error " % which,
        lambda: b"last ",
    )


async def test_the_error_of_a_request_comes_after_its_tokens() -> None:
    batch: list[tuple[int, Update | EngineError]] = [
        (0, Update([7])), (0, StepFailed("m")), (1, Update([8])), (1, StepFailed("m")),
        (2, Update([9])),
    ]  # fmt: skip
    got = b"".join([chunk async for chunk in chunks([batch], 3)])
    assert got == b"0:7 0:error 1:8 1:error 2:9 last data: [DONE]\n\n"


async def test_the_last_error_ends_the_stream_after_all_that_came_before() -> None:
    got = b""
    with pytest.raises(StepFailed):
        async for chunk in chunks(
            [[(0, StepFailed("m")), (1, Update([8])), (1, StepFailed("m"))]], 2
        ):
            got += chunk
    assert got == b"0:error 1:8 "


async def test_errors_before_any_token_wait_until_something_is_served() -> None:
    got = [chunk async for chunk in chunks([[(1, StepFailed("m"))], [(0, Update([7]))]], 2)]
    assert got == [b"1:error 0:7 ", b"last data: [DONE]\n\n"]


async def test_a_batch_that_the_queue_refuses_a_part_of_is_refused_whole() -> None:
    with pytest.raises(QueueFull):
        async for _ in chunks([[(0, Update([7])), (1, QueueFull("m"))]], 2):
            raise AssertionError("nothing may be sent before")
