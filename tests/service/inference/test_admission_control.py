"""Places alone: who is taken, who is refused, and when those may come back."""

from __future__ import annotations

import math
from typing import cast

import pytest

from engine.client.interface import EngineBackend
from engine.errors import QueueFull, ShareFull
from engine.protocol.queue_policy import Queued
from service.http.errors import ApiError
from service.inference.admission_control import AdmissionControl


class Engine:
    """What a EngineBackend tells of itself, and a clock."""

    def __init__(self, *, running: int = 0, pace: float = 0.0) -> None:
        self.running = running
        self.pace = pace
        self.slots = 0
        self.clients = [self]
        self.queued = Queued()
        self.now = 1000.0
        self._ids = 0

    @property
    def in_flight(self) -> int:
        return self.running + len(self.queued)

    @property
    def waiting_tokens(self) -> int:
        return self.queued.tokens

    def queue(self, owner: str = "", requests: int = 1, tokens: int = 1) -> None:
        for _ in range(requests):
            self.queued.add(self._ids, owner, tokens)
            self._ids += 1

    def places(self, slots: int = 2, most: int = 8, tokens: int = 1000) -> AdmissionControl:
        self.slots = slots
        return AdmissionControl(cast(EngineBackend, self), most, tokens, clock=lambda: self.now)


def refusal(places: AdmissionControl, requests: int = 1, owner: str = "") -> QueueFull:
    with pytest.raises(QueueFull) as refused:
        places.check(requests, owner)
    return refused.value


def waits(places: AdmissionControl, count: int, requests: int = 1) -> list[float]:
    return [refusal(places, requests).retry_after or 0 for _ in range(count)]


def test_what_fits_is_taken_and_no_more() -> None:
    engine = Engine(running=2)
    places = engine.places(slots=2, most=3)
    places.reserve(2, "")
    places.check(1, "")
    assert "no room for 2 more" in refusal(places, 2).message
    places.reserve(1, "")
    refusal(places)
    places.release(3, "")
    places.check(3, "")
    with pytest.raises(ApiError, match="at most 5; send fewer"):
        places.check(6, "")


def test_a_key_leaves_room_for_others() -> None:
    engine = Engine(running=2)
    places = engine.places(slots=2, most=8)
    engine.queue("a", 4)
    places.reserve(2, "a")
    error = refusal(places, owner="a")
    assert (
        isinstance(error, ShareFull)
        and "6 requests of this key are waiting already" in error.message
    )
    places.check(1, "b")
    refusal(places, 2, owner="b")
    places.reserve(1, "b")
    places.check(1, "c")
    refusal(places, owner="b")
    places.reserve(1, "c")
    error = refusal(places, owner="d")
    assert type(error) is QueueFull and "the queue is full" in error.message


def test_while_slots_are_free_a_key_may_have_them_all() -> None:
    engine = Engine(running=3)
    places = engine.places(slots=8, most=1)
    places.check(5, "a")
    places.reserve(5, "a")
    places.reserve(1, "a")
    refusal(places, owner="a")


def test_more_of_one_key_than_ever_fits_is_refused_for_good() -> None:
    places = Engine().places(slots=2, most=8)
    places.check(10, "")
    places.check(8, "a")
    with pytest.raises(ApiError, match="at most 8 of one key"):
        places.check(9, "a")


def test_the_queue_is_bounded_in_prompt_tokens() -> None:
    engine = Engine(running=2)
    places = engine.places(slots=2, tokens=1000)
    places.reserve(1, "")
    places.check_tokens(5000, 1, "")  # the first that waits may have any length
    places.release(1, "")
    engine.queue(tokens=600)
    places.reserve(2, "")
    places.check_tokens(400, 2, "")
    with pytest.raises(
        QueueFull, match="600 prompt tokens are waiting already, and there is no room"
    ):
        places.check_tokens(401, 2, "")
    places.release(2, "")
    engine.queue(tokens=400)
    assert "1000 prompt tokens" in refusal(places).message, "before a body is read"
    engine.running = 0
    places.check(1, "")


def test_more_prompt_tokens_than_the_queue_ever_takes_are_refused_for_good() -> None:
    engine = Engine()
    places = engine.places(slots=2, tokens=1000)
    places.reserve(3, "")
    places.check_tokens(1000, 3, "")
    with pytest.raises(ApiError, match="at most 1000 prompt tokens"):
        places.check_tokens(1001, 3, "")
    places.check_tokens(750, 3, "a")
    with pytest.raises(ApiError, match="at most 750 prompt tokens of one key"):
        places.check_tokens(751, 3, "a")
    places.check_tokens(5000, 1, "")
    places.release(1, "")
    places.check_tokens(5000, 2, "")  # none of them waits
    engine.queue(requests=1)
    with pytest.raises(QueueFull, match="try again"):
        places.check_tokens(5000, 2, "")


def test_one_keys_prompt_tokens_leave_room_for_others() -> None:
    engine = Engine(running=2)
    places = engine.places(slots=2, tokens=1000)
    engine.queue("a", tokens=700)
    places.reserve(1, "a")
    with pytest.raises(ShareFull, match="700 prompt tokens of this key are waiting already"):
        places.check_tokens(100, 1, "a")
    places.reserve(1, "b")
    places.check_tokens(100, 1, "b")


@pytest.mark.parametrize(
    ("requests", "pace", "seconds"), [(2, 2.5, 2.5), (3, 2.5, 5), (2, 0.01, 1), (9, 20, 60)]
)
def test_retry_after_is_when_so_many_places_are_free(
    requests: int, pace: float, seconds: float
) -> None:
    engine = Engine(running=2, pace=pace)
    engine.queue(requests=7)
    error = refusal(engine.places(), requests)
    assert error.retry_after == pytest.approx(seconds)
    assert f"try again in {math.ceil(seconds)} s" in error.message


def test_those_refused_are_given_turns_until_the_queue_is_empty() -> None:
    engine = Engine(running=2, pace=2.0)
    engine.queue(requests=8)
    places = engine.places()
    assert waits(places, 10) == [2, 4, 6, 8, 10, 12, 14, 16, 16, 16]
    engine.now += 10  # the turns of five are over
    assert waits(places, 2) == [8, 10]
    engine.now += 1000
    assert waits(places, 1) == [2], "nobody's turn is left over"


def test_a_key_at_its_share_waits_for_departures_of_all() -> None:
    """With n owners who wait, a departure frees a place for all, and every n-th one of its own."""
    engine = Engine(running=2, pace=4.0)
    engine.queue("a", 6)
    alone = refusal(engine.places(most=8), owner="a").retry_after
    assert alone == pytest.approx(4.0), "one departure: five of its own, three free"
    engine.queue("b", 1)
    assert (refusal(engine.places(most=8), owner="a").retry_after or 0) > 4.0


def test_without_a_pace_it_is_a_second() -> None:
    engine = Engine(running=2)
    engine.queue(requests=8)
    assert waits(engine.places(), 3) == [1, 1, 1]
