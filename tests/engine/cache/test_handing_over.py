"""Slots whose answers end with the round under way go to others before that is over."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from engine.engine import Engine
from engine.protocol.events import Finished
from engine.protocol.failed import Failed
from engine.protocol.requests import Request
from engine.protocol.sampling_params import SamplingParams
from engine.protocol.token_ids import pack_ids
from engine.step_plan import StepPlan, StepResult
from tests.engine.fake import FakeRunner, recite

FIRST, SECOND = list(b"abcde"), list(b"klm")


def request(
    id: int, prompt: list[int], count: int, stop_token_ids: tuple[int, ...] = ()
) -> Request:
    params = SamplingParams(
        temperature=0, max_tokens=count, ignore_eos=True, stop_token_ids=stop_token_ids
    )
    return Request(id=id, prompt=pack_ids(prompt), sampling=params, stream=False)


class Watched:
    """An engine with one slot and a device that works by itself: what is begun and what is told."""

    def __init__(self) -> None:
        self.runner = FakeRunner(slots=1, share_slots=4, most_steps=4, overlaps=True)
        self.engine = Engine(self.runner)
        self.begun: list[tuple[StepPlan, bool]] = []  # and whether another round was under way
        self.ends: dict[int, Finished | Failed] = {}
        self.handed_over = False
        start = self.runner.start

        def noting(plan: StepPlan) -> StepResult | Exception:
            self.begun.append((plan, bool(self.runner.begun)))
            return start(plan)

        self.runner.start = noting  # type: ignore[method-assign]

    def run(self, between: Callable[[], None] = lambda: None) -> dict[int, Finished | Failed]:
        """To the end. `between` is called when request 2 has begun, and 1 has not ended."""
        called = False

        def take_in() -> None:
            nonlocal called
            plan, unseen = self.begun[-1]
            if unseen and plan.admit and plan.admit[0].request.id == 2 and not called:
                assert 1 not in self.ends
                called = True
                between()

        while self.engine.has_work:
            events = self.engine.step(take_in).get("c")
            for end in () if events is None else (*events.finished, *events.failed):
                assert end.request not in self.ends
                self.ends[end.request] = end
        self.handed_over = self.handed_over or called
        return self.ends

    def add(self, *requests: Request) -> None:
        for one in requests:
            self.engine.add("c", one)


def answer(end: Finished | Failed) -> list[int]:
    assert isinstance(end, Finished)
    return list(end.tokens)


def cached(end: Finished | Failed) -> int:
    assert isinstance(end, Finished)
    return end.cached_tokens


def test_the_next_one_begins_while_the_last_tokens_are_drawn() -> None:
    watched = Watched()
    watched.add(request(1, FIRST, 9), request(2, SECOND, 6))
    ends = watched.run()
    assert watched.handed_over
    assert answer(ends[1]) == recite(FIRST, 9)
    assert answer(ends[2]) == recite(SECOND, 6)


def test_nobody_hands_over_what_nobody_waits_for() -> None:
    watched = Watched()
    watched.add(request(1, FIRST, 9))
    assert answer(watched.run()[1]) == recite(FIRST, 9)
    assert not any(plan.before for plan, unseen in watched.begun if unseen)


def test_the_answer_is_cached_as_far_as_it_was_read() -> None:
    """Who goes on from it finds it, though its slot had gone before it was known."""
    watched = Watched()
    watched.add(request(1, FIRST, 9), request(2, SECOND, 6))
    watched.run()
    whole = FIRST + recite(FIRST, 9)
    watched.add(request(3, [*whole, 1, 2], 2))
    assert cached(watched.run()[3]) == len(whole) - 1


def test_a_stop_id_may_end_it_earlier() -> None:
    watched = Watched()
    stop = recite(FIRST, 9)[8]
    watched.add(request(1, FIRST, 9, stop_token_ids=(stop,)), request(2, SECOND, 6))
    ends = watched.run()
    assert watched.handed_over and answer(ends[1]) == recite(FIRST, 8)
    assert answer(ends[2]) == recite(SECOND, 6)
    watched.add(request(3, FIRST + recite(FIRST, 8) + [1, 2], 2))
    assert cached(watched.run()[3]) == len(FIRST) + 8


@pytest.mark.parametrize("who", [1, 2])
def test_either_may_be_aborted_in_between(who: int) -> None:
    watched = Watched()
    watched.add(request(1, FIRST, 9), request(2, SECOND, 6), request(3, SECOND, 3))
    ends = watched.run(lambda: watched.engine.abort("c", [who]))
    assert watched.handed_over
    aborted = ends[who]
    assert isinstance(aborted, Finished) and aborted.reason == "abort"
    assert answer(ends[3 - who]) == (recite(SECOND, 6) if who == 1 else recite(FIRST, 9))
    assert answer(ends[3]) == recite(SECOND, 3)


def test_both_fail_with_the_round_that_fails() -> None:
    """The earlier one with its last tokens, the later one with its prompt; then the slot is free,
    and what was to be kept of the first one's answer is not taken for that."""
    watched = Watched()

    def fail() -> None:
        assert watched.begun[-1][0].before, "the state of the first one was to be kept"
        finish = watched.runner.finish

        def failing(pending: StepResult | Exception) -> StepResult:
            watched.runner.finish = finish  # type: ignore[method-assign]
            finish(pending)
            raise RuntimeError("no luck")

        watched.runner.finish = failing  # type: ignore[method-assign]

    watched.add(request(1, FIRST, 9), request(2, SECOND, 6))
    ends = watched.run(fail)
    assert watched.handed_over
    assert isinstance(ends[1], Failed) and isinstance(ends[2], Failed)
    watched.add(request(3, FIRST + recite(FIRST, 9) + [1, 2], 3), request(4, SECOND, 3))
    ends = watched.run()
    assert cached(ends[3]) == len(FIRST)
    assert answer(ends[4]) == recite(SECOND, 3)
