"""The waiting queue alone: who is next, who may wait, and what that costs nobody."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.cache.tiered_store import CachedState
from engine.deadlines import Deadlines
from engine.lazy_heap import SPARE, LazyHeap
from engine.protocol.requests import Request
from engine.protocol.sampling_params import SamplingParams
from engine.protocol.token_ids import pack_ids
from engine.scheduler.request_queue import (
    MEMORY_SECONDS,
    OTHERS_TURN,
    DepartureRate,
    FifoByKey,
    RequestQueue,
)
from engine.sequence import Sequence


def sequence(
    key: int, owner: str = "", priority: int = 0, prompt: int = 1, answer: int = 9
) -> Sequence:
    request = Request(
        id=key,
        prompt=pack_ids([1] * prompt),
        sampling=SamplingParams(max_tokens=answer),
        owner=owner,
        priority=priority,
    )
    return Sequence(key, "client", request, (), 0.0)


def depart(queue: RequestQueue) -> Sequence:
    first = queue.first()
    assert first is not None
    queue.dequeue(first, first.unspent)
    return first


def order(queue: RequestQueue) -> list[int]:
    return [depart(queue).key for _ in range(len(queue))]


def filled(*sequences: Sequence) -> RequestQueue:
    queue = RequestQueue()
    for one in sequences:
        queue.enqueue(one, 0.0)
    return queue


def test_without_owners_and_priorities_it_is_first_in_first_out() -> None:
    costs = [3, 1, 50, 2, 9]
    assert order(filled(*(sequence(key, answer=cost) for key, cost in enumerate(costs)))) == [
        0, 1, 2, 3, 4,
    ]  # fmt: skip


def test_owners_take_turns_however_many_of_one_were_first() -> None:
    flood = [sequence(key, "flood") for key in range(6)]
    late = [sequence(key, "late") for key in (6, 7)]
    assert order(filled(*flood, *late)) == [0, 6, 1, 7, 2, 3, 4, 5]


def test_turns_are_weighed_by_tokens() -> None:
    long = [sequence(key, "long", prompt=20, answer=20) for key in range(3)]
    short = [sequence(key, "short", prompt=5, answer=5) for key in range(3, 15)]
    assert order(filled(*long, *short)) == [0, 3, 4, 5, 6, 1, 7, 8, 9, 10, 2, 11, 12, 13, 14]


def test_what_was_not_used_is_given_back() -> None:
    queue = filled(*(sequence(key, "careful", answer=10) for key in range(8)))
    generous = [sequence(key, "generous", answer=1000) for key in range(8, 12)]
    for one in generous:
        queue.enqueue(one, 0.0)
    assert [depart(queue).key for _ in range(2)] == [0, 8]
    assert [depart(queue).key for _ in range(2)] == [1, 2], "the other one is a thousand ahead"
    queue.refund(generous[0], 995)
    assert depart(queue).key == 9, "it took five tokens only"


def test_a_pause_saves_nothing_up() -> None:
    queue = filled(*(sequence(key, "busy") for key in range(20)))
    for _ in range(10):
        depart(queue)
    for key in range(20, 26):
        queue.enqueue(sequence(key, "back"), 0.0)
    owners = [depart(queue).owner for _ in range(8)]
    assert Counter(owners) == {"busy": 4, "back": 4}


def test_being_held_saves_nothing_up() -> None:
    queue = filled(*(sequence(key, "busy") for key in range(20)))
    held = sequence(20, "held")
    queue.enqueue(held, 0.0)
    queue.hold(held, prefix := CachedState(1))
    for _ in range(10):
        assert depart(queue).owner == "busy"
    for key in range(21, 30):
        queue.enqueue(sequence(key, "held"), 0.0)
    queue.resume(prefix)
    owners = [depart(queue).owner for _ in range(8)]
    assert Counter(owners) == {"busy": 4, "held": 4}


def test_giving_back_earns_no_head_start() -> None:
    """What was charged and not used moved the clock on, from which others then started."""
    queue = RequestQueue()
    for key in range(5):
        queue.enqueue(sequence(key, "early", answer=1000), 0.0)
    gone = [depart(queue) for _ in range(3)]
    for key in range(5, 10):
        queue.enqueue(sequence(key, "new", answer=10), 0.0)
    for one in gone:
        queue.refund(one, 1000)
    assert [depart(queue).owner for _ in range(3)] in (
        ["early", "new", "new"],
        ["new", "early", "new"],
    )


def test_urgent_ones_come_first_but_not_always() -> None:
    urgent = [sequence(key, "u", priority=-1) for key in range(100)]
    later = [sequence(100 + key, "l", priority=0) for key in range(10)]
    last = [sequence(200 + key, "z", priority=7) for key in range(10)]
    queue = filled(*last, *later, *urgent)
    gone = [depart(queue).priority for _ in range(6 * OTHERS_TURN)]
    turns = [gone[i : i + OTHERS_TURN] for i in range(0, len(gone), OTHERS_TURN)]
    for turn in turns:
        assert turn[:-1] == [-1] * (OTHERS_TURN - 1)
    assert [turn[-1] for turn in turns] == [7, 0, 7, 0, 7, 0], "others take turns too"


def test_an_urgent_arrival_overtakes() -> None:
    queue = filled(sequence(0), sequence(1))
    queue.enqueue(sequence(2, priority=-5), 0.0)
    queue.enqueue(sequence(3, priority=5), 0.0)
    assert order(queue) == [2, 0, 1, 3]


def test_held_ones_are_passed_over_and_come_back_to_their_place() -> None:
    prefix = CachedState(1)
    mine = [sequence(key, "a") for key in range(4)]
    queue = filled(*mine)
    queue.hold(mine[0], prefix)
    queue.hold(mine[1], prefix)
    assert depart(queue).key == 2 and len(queue) == 3
    queue.remove(mine[1])
    queue.resume(prefix)
    queue.resume(prefix)
    assert order(queue) == [0, 3]


def test_when_all_are_held_nobody_is_next() -> None:
    only = sequence(0)
    queue = filled(only)
    queue.hold(only, CachedState(1))
    assert queue.first() is None and len(queue) == 1
    queue.remove(only)
    assert len(queue) == 0 and queue.tokens == 0


def test_owners_that_come_and_go_leave_nothing() -> None:
    queue = RequestQueue()
    for key in range(1000):
        queue.enqueue(sequence(key, f"owner {key}", priority=key % 3), 0.0)
        queue.refund(depart(queue), 0)
        if key % 2:
            queue.enqueue(aborted := sequence(-1 - key, f"owner {key}"), 0.0)
            queue.remove(aborted)
    assert len(queue) == 0 and queue.tokens == 0 and queue.of("owner 3") == (0, 0)
    assert not queue._levels and not queue._queued.owners


@dataclass
class Model:
    """A server of equal steps: one departure at a time, and all that is charged is used."""

    queue: RequestQueue = field(default_factory=RequestQueue)
    waiting: dict[int, Sequence] = field(default_factory=dict)
    departed: list[Sequence] = field(default_factory=list)
    key: int = 0

    def add(self, owner: str, priority: int, prompt: int, answer: int) -> None:
        one = sequence(self.key, owner, priority, prompt, answer)
        self.waiting[self.key] = one
        self.key += 1
        self.queue.enqueue(one, 0.0)

    def depart(self) -> Sequence | None:
        first = self.queue.first()
        assert (first is None) == (not self.waiting), "it is work-conserving"
        if first is None:
            return None
        self.queue.dequeue(first, first.unspent)
        del self.waiting[first.key]
        self.departed.append(first)
        return first


owners = st.sampled_from("abc")
arrivals = st.tuples(owners, st.integers(-1, 1), st.integers(1, 30), st.integers(0, 30))
events = st.lists(
    st.one_of(st.just("depart"), arrivals, st.tuples(st.just("abort"), st.integers(0, 99))),
    max_size=120,
)


@settings(deadline=None, derandomize=True, max_examples=300)
@given(events)
def test_whatever_comes_and_goes_everyone_is_counted_and_leaves_once(happens: list[object]) -> None:
    model = Model()
    for what in happens:
        if what == "depart":
            model.depart()
        elif isinstance(what, tuple) and what[0] == "abort":
            if model.waiting:
                chosen = sorted(model.waiting)[what[1] % len(model.waiting)]
                model.queue.remove(model.waiting.pop(chosen))
        else:
            assert isinstance(what, tuple)
            model.add(*what)
        assert len(model.queue) == len(model.waiting)
        assert model.queue.tokens == sum(one.prompt_tokens for one in model.waiting.values())
        for owner in "abc":
            own = [one for one in model.waiting.values() if one.owner == owner]
            assert model.queue.of(owner) == (len(own), sum(one.prompt_tokens for one in own))
    while model.depart():
        pass
    keys = [one.key for one in model.departed]
    assert len(keys) == len(set(keys))
    lines = defaultdict(list)
    for one in model.departed:
        lines[one.owner, one.priority].append(one.key)
    assert all(line == sorted(line) for line in lines.values()), "owners keep their order"


@settings(deadline=None, derandomize=True, max_examples=100)
@given(st.integers(2, 5), st.randoms(use_true_random=False))
def test_owners_that_always_wait_get_equal_parts(count: int, chance: random.Random) -> None:
    """At any time, to within the largest request of either."""
    most = 60
    model, names = Model(), [f"owner {i}" for i in range(count)]
    sizes = {name: chance.randint(1, most) for name in names}
    for name in names:
        for _ in range(3):
            model.add(name, 0, sizes[name], 0)
    given_: Counter[str] = Counter(dict.fromkeys(names, 0))
    for _ in range(400):
        one = model.depart()
        assert one is not None
        given_[one.owner] += one.prompt_tokens
        model.add(one.owner, 0, chance.randint(1, sizes[one.owner]), 0)
        assert max(given_.values()) - min(given_.values()) <= 2 * most


@settings(deadline=None, derandomize=True, max_examples=50)
@given(st.randoms(use_true_random=False))
def test_nobody_starves(chance: random.Random) -> None:
    """Among floods of every priority and owner, a request of the least urgent level departs after
    a bounded number of departures."""
    model = Model()
    floods = [("a", -1), ("b", -1), ("a", 0), ("b", 0), ("b", 1)]
    for owner, priority in floods * 3:
        model.add(owner, priority, 10, 0)
    model.add("late", 1, 10, 0)
    late = model.key - 1
    while (one := model.depart()) is not None and one.key != late:
        assert len(model.departed) < 1000
        model.add(one.owner, one.priority, chance.randint(1, 10), 0)
    # Two other levels, and at its own level one other owner of requests of up to ten tokens.
    assert len(model.departed) <= 2 * OTHERS_TURN * 2 + OTHERS_TURN


# Who may wait.


def test_the_queue_says_why_it_has_no_room() -> None:
    queue = RequestQueue(most=8, most_tokens=100)

    def refused(owner: str, tokens: int, free: int = 0) -> tuple[str, str] | None:
        refusal = queue.refusal(owner, tokens, free, 0.0)
        return None if refusal is None else (refusal.code, refusal.message.split(";")[0])

    assert refused("a", 10_000) is None, "the first may have any length"
    for key in range(6):
        assert refused("a", 1) is None
        queue.enqueue(sequence(key, "a"), 0.0)
    assert refused("a", 1) == ("share_full", "6 requests of this key are waiting already")
    assert refused("a", 1, free=1) is None
    assert refused("b", 1) is None
    assert refused("b", 95) == ("queue_full", "6 prompt tokens are waiting already")
    assert refused("b", 95, free=7) is None, "it waits for nobody's end"
    queue.enqueue(sequence(6, "a", prompt=60), 0.0)
    message = "66 prompt tokens of this key are waiting already"
    assert refused("a", 30, free=3) == ("share_full", message)
    assert refused("b", 25, free=3) is None
    queue.enqueue(sequence(7, "b"), 0.0)
    assert refused("c", 1) == ("queue_full", "8 requests are waiting already")


# What it stands on.


@given(st.lists(st.tuples(st.integers(0, 9), st.one_of(st.none(), st.integers(0, 99)))))
def test_a_ranking_tells_the_least(changes: list[tuple[int, int | None]]) -> None:
    ranking: LazyHeap[int] = LazyHeap()
    expected: dict[int, tuple[int, int]] = {}
    for item, rank in changes:
        if rank is None:
            ranking.discard(item)
            expected.pop(item, None)
        else:
            ranking.put(item, (rank, item))
            expected[item] = rank, item
        assert ranking.first() == min(expected, key=expected.__getitem__, default=None)


A_TIME = st.one_of(st.none(), st.floats(0, 5), st.just(1e300))


@given(st.lists(st.tuples(st.integers(0, 9), A_TIME, st.floats(0, 1))))
def test_deadlines_tell_who_is_overdue(changes: list[tuple[int, float | None, float]]) -> None:
    """While time passes, and deadlines come that are over already. A clock may have run for years:
    it is not counted through."""
    deadlines: Deadlines[int] = Deadlines()
    expected: dict[int, float] = {}
    now = 1e12
    assert deadlines.overdue(now) == []
    for item, due, passes in changes:
        if item in expected:
            deadlines.discard(item, expected.pop(item))
        if due is not None:
            expected[item] = now + due - 1
            deadlines.put(item, expected[item])
        now += passes if expected else 1e9
        overdue = [item for item, due in expected.items() if due <= now]
        found = deadlines.overdue(now)
        assert sorted(found) == sorted(overdue)
        assert [expected[item] for item in found] == sorted(expected[item] for item in found)
        if passes > 0.5:
            for item in found:
                deadlines.discard(item, expected.pop(item))


@given(st.lists(st.integers(0, 12)))
def test_arrivals_keep_their_order_though_some_were_away(moves: list[int]) -> None:
    arrivals: FifoByKey[str] = FifoByKey()
    here: set[int] = set()
    away: list[int] = []
    latest = 0
    for move in moves:
        if move < 6:
            latest += 1
            arrivals.add(latest, str(latest))
            here.add(latest)
        elif move < 9 and here:  # the first one, or another one
            number = sorted(here)[0 if move < 8 else len(here) // 2]
            arrivals.discard(number)
            here.discard(number)
            away.append(number)
        elif move < 12 and away:
            number = away.pop(move % len(away))
            arrivals.add(number, str(number))
            here.add(number)
        else:
            arrivals.discard(latest + 1)
        assert len(arrivals) == len(here)
        assert arrivals.first() == (str(min(here)) if here else None)


def test_a_ranking_forgets_what_is_outdated() -> None:
    ranking: LazyHeap[int] = LazyHeap()
    for i in range(10_000):
        ranking.put(i % 10, (-i, i % 10))
    assert len(ranking._heap) <= 2 * 10 + SPARE + 1


def test_the_pace_is_that_of_departures_however_they_are_bundled() -> None:
    evenly, in_bursts = DepartureRate(), DepartureRate()
    for second in range(1, 61):
        for pace, gap in ((evenly, 0.5), (in_bursts, 0.99)):
            pace.note(1, second - 1 + gap)
            pace.note(99, float(second))
    assert evenly.at(60.0) == pytest.approx(0.01, rel=0.1)
    assert in_bursts.at(60.0) == pytest.approx(0.01, rel=0.1)
    assert evenly.at(61.0) > 0.01, "a standstill tells too"
    assert evenly.at(60.0 + 20 * MEMORY_SECONDS) > 60
    assert evenly.at_rest() == pytest.approx(0.01, rel=0.1)


def test_the_pace_does_not_count_the_time_without_a_queue() -> None:
    pace = DepartureRate()
    assert pace.at_rest() == 0
    pace.restart(100.0)
    assert pace.at(100.25) == 0.25, "so long has the first one been waited for"
    pace.note(1, 100.5)
    pace.restart(200.0)
    pace.note(1, 200.5)
    assert pace.at(200.5) == pytest.approx(0.5)
