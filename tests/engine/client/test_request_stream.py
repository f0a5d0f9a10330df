"""Deliveries: what a reader is given at once, what is held for more to come, and for how long."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from engine.client import request_stream
from engine.client.request_stream import MOST_TAKEN, FlushTimer, RequestStream, StreamInbox
from engine.errors import StepFailed
from engine.protocol.events import Finished
from engine.protocol.logprobs import TokenLogprobs
from engine.protocol.requests import Request
from engine.protocol.sampling_params import SamplingParams
from engine.protocol.token_ids import pack_ids

FINISHED = Finished(0, "length", 1, 0, 9)


def delivery(interval: int) -> RequestStream:
    return RequestStream(Request(id=0, prompt=pack_ids([1])), interval)


async def begun(interval: int) -> RequestStream:
    """One whose first token has been read."""
    one = delivery(interval)
    one.add_tokens([0])
    assert (await one.next()).tokens == [0], "the first comes at once"
    return one


async def test_tokens_are_held_until_they_are_enough() -> None:
    one = await begun(3)
    one.add_tokens([1, 2])
    assert not one.due
    waiting = asyncio.create_task(one.next())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert not waiting.done()
    one.add_tokens([3])
    assert (await waiting).tokens == [1, 2, 3]
    one.add_tokens([4, 5, 6, 7])
    assert (await one.next()).tokens == [4, 5, 6, 7]


async def test_the_end_holds_nothing_back() -> None:
    one = await begun(100)
    one.add_tokens([1])
    one.finish(FINISHED)
    update = await one.next()
    assert update.tokens == [1] and update.finished is FINISHED


async def test_an_error_comes_after_what_was_held() -> None:
    one = await begun(100)
    one.add_tokens([1])
    one.fail(StepFailed("boom"))
    assert (await one.next()).tokens == [1]
    with pytest.raises(StepFailed):
        await one.next()


async def test_scores_are_not_held() -> None:
    one = await begun(100)
    one.add_scores([TokenLogprobs(-1.0)])
    assert (await one.next()).scores


async def test_what_is_released_is_read_and_the_next_is_held_again() -> None:
    one = await begun(100)
    one.release()
    one.add_tokens([1])
    assert (await one.next()).tokens == [1]
    one.add_tokens([2])
    assert not one.due


async def test_tokens_that_were_read_alone_do_not_let_the_next_ones_out() -> None:
    """As a tap reads what was held for long enough."""
    one = await begun(100)
    one.add_tokens([1])
    one.release()
    assert one.due and one.only_tokens
    one.clear_tokens()
    one.add_tokens([2])
    assert not one.due and one.tokens == [2]


@pytest.mark.parametrize(
    "other",
    [
        lambda one: one.add_scores([TokenLogprobs(-1.0)]),
        lambda one: one.add_tokens([2], [TokenLogprobs(-1.0)]),
        lambda one: one.finish(FINISHED),
        lambda one: one.fail(StepFailed("boom")),
    ],
)
async def test_what_is_more_than_tokens_is_known(other: Callable[[RequestStream], None]) -> None:
    one = RequestStream(Request(id=0, prompt=pack_ids([1]), sampling=SamplingParams(logprobs=0)))
    one.add_tokens([1])
    assert one.only_tokens
    other(one)
    assert not one.only_tokens
    assert one.take().tokens[0] == 1 and one.only_tokens


@pytest.mark.parametrize("interval", [1, 2])
async def test_without_an_interval_nothing_is_held(interval: int) -> None:
    one = await begun(interval)
    one.add_tokens([1])
    assert one.due == (interval == 1)


class Held:
    def __init__(self) -> None:
        self.released: list[float] = []

    def release(self) -> None:
        self.released.append(asyncio.get_running_loop().time())


async def test_nothing_is_held_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_stream, "MOST_HELD_SECONDS", 0.03)
    keeper, first, second, third = FlushTimer(), Held(), Held(), Held()
    begin = asyncio.get_running_loop().time()
    keeper.add(first)
    keeper.add(third)
    keeper.add(first)  # which it holds already
    keeper.discard(third)
    await asyncio.sleep(0.01)
    later = asyncio.get_running_loop().time()
    keeper.add(second)
    while not second.released:
        await asyncio.sleep(0.001)
    assert len(first.released) == 1 and first.released[0] >= begin + 0.03
    assert second.released[0] >= later + 0.03
    assert not third.released
    keeper.add(first)
    keeper.clear()
    await asyncio.sleep(0.05)
    assert len(first.released) == 1


async def _tapped(
    tap: Callable[[list[RequestStream]], list[RequestStream]],
) -> tuple[RequestStream, asyncio.Task[list[RequestStream]]]:
    """A delivery of an inbox with this tap, and the task that waits for its news."""
    inbox = StreamInbox()
    inbox.tap = tap
    one = RequestStream(Request(id=0, prompt=pack_ids([1])), inbox=inbox)
    waiting = asyncio.create_task(inbox.next())
    await asyncio.sleep(0)
    return one, waiting


async def test_a_tap_takes_what_comes_in_one_turn_while_the_task_waits() -> None:
    taken: list[list[int]] = []

    def tap(news: list[RequestStream]) -> list[RequestStream]:
        taken.extend(delivery.take().tokens for delivery in news)
        return []

    one, waiting = await _tapped(tap)
    one.add_tokens([1])
    one.add_tokens([2, 3])
    await asyncio.sleep(0)
    one.add_tokens([4])
    await asyncio.sleep(0)
    assert taken == [[1, 2, 3], [4]]
    assert not waiting.done()
    waiting.cancel()


async def test_the_task_gets_what_a_tap_leaves_and_all_that_follows() -> None:
    asked = []

    def tap(news: list[RequestStream]) -> list[RequestStream]:
        asked.append(len(news))
        return news

    one, waiting = await _tapped(tap)
    one.add_tokens([1])
    await asyncio.sleep(0)
    one.add_tokens([2])  # the task has been woken, and has not run yet
    assert await waiting == [one]
    one.add_tokens([3])  # it runs: nothing may overtake what it does
    await asyncio.sleep(0)
    assert one.take().tokens == [1, 2, 3]
    assert asked == [1]


async def test_the_task_is_told_that_a_tap_failed() -> None:
    def tap(news: list[RequestStream]) -> list[RequestStream]:
        raise ArithmeticError

    one, waiting = await _tapped(tap)
    one.add_tokens([1])
    with pytest.raises(ArithmeticError):
        await waiting


def reports_of(count: int) -> list[TokenLogprobs]:
    return [TokenLogprobs(-float(n)) for n in range(count)]


@pytest.mark.parametrize("top", [None, 0, 7])
async def test_a_stream_that_is_read_late_comes_in_pieces_of_bounded_size(top: int | None) -> None:
    """In their order, what ends it last."""
    sampling = SamplingParams(logprobs=top)
    inbox = StreamInbox()
    late = RequestStream(Request(id=0, prompt=pack_ids([1]), sampling=sampling), inbox=inbox)
    tokens = list(range(2 * MOST_TAKEN))
    reports = reports_of(len(tokens))
    for token, report in zip(tokens, reports, strict=True):
        late.add_tokens([token], () if top is None else [report])
    late.finish(FINISHED)
    assert late.unread == len(tokens) * (1 + (top or 0))
    got, told = [], []
    while True:
        (again,) = await inbox.next()
        assert again is late
        update = late.take()
        assert 0 < len(update.tokens) * (1 + (top or 0)) <= MOST_TAKEN
        got += update.tokens
        told += update.logprobs
        if update.finished is not None:
            break
        assert late.unread
    assert got == tokens and told == ([] if top is None else reports)
    assert late.unread == 0


async def test_an_answer_that_is_not_streamed_comes_whole() -> None:
    whole = RequestStream(Request(id=0, prompt=pack_ids([1]), stream=False))
    tokens = list(range(MOST_TAKEN + 1))
    whole.finish(Finished(0, "length", len(tokens), 0, 9, answer=pack_ids(tokens)))
    assert (await whole.next()).tokens == tokens


async def test_a_failure_waits_for_all_pieces() -> None:
    late = RequestStream(Request(id=0, prompt=pack_ids([1])))
    late.add_tokens(list(range(MOST_TAKEN + 1)))
    late.fail(StepFailed("boom"))
    assert len((await late.next()).tokens) == MOST_TAKEN
    assert (await late.next()).tokens == [MOST_TAKEN]
    with pytest.raises(StepFailed):
        await late.next()
