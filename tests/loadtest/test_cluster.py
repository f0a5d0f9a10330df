"""loadtest.cluster: the fast simulation against one event by event, and what must always hold."""

from __future__ import annotations

import json
import math
from collections import OrderedDict
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, reject, settings
from hypothesis import strategies as st

from loadtest.cluster.capacity import (
    Demand,
    Shards,
    first,
    replicas_for,
    shards_for,
    slot_waits,
    store_waits,
    traffic,
    used,
)
from loadtest.cluster.command import main
from loadtest.cluster.costs import PRESETS, Costs
from loadtest.cluster.events import Counts, Events
from loadtest.cluster.memory import ages, until_used_again
from loadtest.cluster.replicas import PLACEMENTS, Failures, Placement, Replicas, place
from loadtest.cluster.shard import erlang_c, latencies, slot_wait
from loadtest.cluster.simulation import Scenario, age_of_sessions, draw, load_of, simulate
from loadtest.cluster.workload import DAY, Workload, draw_turns
from tests.redis_server import MISSING

COSTS = Costs(turn_seconds=0.5, slots=4, sync_seconds=2e-3)
WORK = Workload(pause=20, break_=900, daily=0, most_turns=100)
NEVER = math.inf


def scenario(replicas: Replicas, **other: Any) -> Scenario:
    usual: dict[str, Any] = {"sessions": 500, "ttl": 1800, "sample": 20_000, "period": 20_000.0}
    return Scenario(workload=WORK, replicas=replicas, turn=0.5, **(usual | other))


def by_events(one: Scenario, placement: Placement, rows: int, **other: Any) -> Counts:
    turns = draw(one)
    warm = age_of_sessions(turns, 0.999)
    return Events(one, placement, rows, COSTS, 2, load_of(one, turns).begun, warm, **other).run()


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize(
    ("count", "rows", "between_failures"), [(4, 50, 3600.0), (4, 20, NEVER), (8, 30, NEVER)]
)
def test_it_agrees_with_a_simulation_event_by_event(
    placement: Placement, count: int, rows: int, between_failures: float
) -> None:
    """Shares within three standard errors and a point, for there are few rows and failures."""
    one = scenario(Replicas(count, between_failures, down=120, detect=5))
    turns = draw(one)
    load = load_of(one, turns)
    (found,) = simulate(one, turns, placement, [rows])
    counts = by_events(one, placement, rows)
    assert counts.turns == counts.memory + counts.store + counts.new
    for name in ("memory", "store", "new"):
        fast, slow = getattr(found, name), counts.share(name)
        error = math.hypot(fast.error, slow.error)
        assert error < 0.015
        assert abs(fast.value - slow.value) < 3 * error + 0.01
    assert counts.state_seconds / counts.seconds == pytest.approx(one.sessions, rel=0.1)
    assert counts.turns / counts.seconds == pytest.approx(load.turns.value, rel=0.1)
    if between_failures < NEVER:
        expected = found.refused * counts.turns
        assert abs(counts.refused - expected) < 5 * math.sqrt(expected) + 20
        assert counts.failures and counts.cut_waits and max(counts.cut_waits) <= 6.0
    else:
        assert counts.refused == counts.cut == found.refused == 0


def test_sessions_that_move_to_new_replicas_read_as_often_as_event_by_event() -> None:
    one = scenario(Replicas(4, NEVER), sessions=2000, period=4000.0)
    (found,) = simulate(one, draw(one), "affinity", [10_000])
    soon = 400.0
    counts = by_events(one, "affinity", 10_000, scaled=(2000.0, 8))
    reads = sum(2000 <= at < 2000 + soon for at in counts.read_after)
    before = sum(2000 - soon <= at < 2000 for at in counts.read_after)
    turns = load_of(one, draw(one)).turns.value
    expected = found.read_again(0.5, turns, soon)
    assert expected > 100 and before == 0
    assert reads == pytest.approx(expected, rel=0.3)


def test_a_shard_waits_as_event_by_event() -> None:
    """Both calls of a turn, at a shard that is busy half of the time."""
    busy = dict.fromkeys(("open_seconds", "read_seconds", "write_seconds", "sync_seconds"), 1e-2)
    costs = replace(COSTS, slots=64, **busy)
    one = scenario(Replicas(1, NEVER), sessions=5000, period=2000.0)
    load = load_of(one, draw(one))
    counts = Events(one, "affinity", 10**6, costs, 1, one.sessions / load.life, 4000.0).run()
    rate = 2 * load.turns.value
    assert 0.2 < rate * 1e-2 < 0.9
    rng = np.random.default_rng(0)
    sample = latencies(rate, 1e-2, costs.sync_seconds, rng)
    both = sample + rng.permutation(sample)
    for share in (0.5, 0.9, 0.99):
        found = float(np.quantile(both, share))
        assert found == pytest.approx(float(np.quantile(counts.store_waits, share)), rel=0.15)


def test_slots_wait_as_event_by_event() -> None:
    costs = replace(COSTS, slots=3, turn_seconds=1.0)
    one = scenario(Replicas(1, NEVER), sessions=700, period=20_000.0)
    load = load_of(one, draw(one))
    counts = Events(one, "affinity", 10**6, costs, 1, one.sessions / load.life, 4000.0).run()
    waited = np.array(counts.slot_waits)
    offered = counts.turns / counts.seconds
    assert 0.4 < offered / 3 < 0.95
    assert float((waited > 0).mean()) == pytest.approx(erlang_c(3, offered), rel=0.2)
    assert float(np.quantile(waited, 0.99)) == pytest.approx(
        slot_wait(3, offered, 1.0, 0.99), rel=0.3
    )


def test_the_age_of_states_is_that_of_an_lru() -> None:
    """One replica, so that every sampled session is in the same memory."""
    turns = draw_turns(WORK, 3000, 20_000.0, 0.5, np.random.default_rng(3))
    replica = np.zeros(len(turns.session), np.int64)
    again = until_used_again(turns, replica)
    (kept,) = ages(turns, again, math.inf, [100], np.array([10_000.0]))
    memory: OrderedDict[int, float] = OrderedDict()
    order = np.argsort(turns.time)
    for session, time in zip(turns.session[order], turns.time[order], strict=True):
        if time > 10_000:
            break
        memory[session] = float(time)
        memory.move_to_end(session)
        if len(memory) > 101:
            memory.popitem(last=False)
    # the 101st state is the first that 100 rows have no room for
    assert kept[0] == pytest.approx(10_000 - next(iter(memory.values())))


works = st.builds(
    Workload,
    tail=st.floats(1.1, 3),
    turns=st.floats(0.5, 10),
    pause=st.floats(1, 1000),
    break_=st.floats(100, 50_000),
    breaks=st.floats(0, 1),
    daily=st.floats(0, 1),
)
replicas = st.builds(
    Replicas,
    count=st.integers(1, 50),
    between_failures=st.sampled_from([3e3, 1e6, NEVER]),
    down=st.floats(10, 1000),
    detect=st.floats(0, 10),
)


@settings(max_examples=15, deadline=None)
@given(works, replicas, st.sampled_from(PLACEMENTS), st.floats(1000, 80_000), st.integers(0, 9))
def test_what_always_holds(
    work: Workload, some: Replicas, placement: Placement, ttl: float, seed: int
) -> None:
    one = Scenario(work, some, 1e5, ttl, 1.0, sample=1000, period=DAY, seed=seed)
    turns = draw(one)
    try:
        load = load_of(one, turns)
    except ValueError:  # too few of the sample at a time
        reject()
    assert load.turns.value > 0 and load.turns.error >= 0 and load.peak >= 1 and load.life > 0
    assert (turns.time >= 0).all() and (turns.time < one.period).all() and (turns.gap > 0).all()
    sizes = [0.0, 10.0, 1000.0, 1e9]
    found = simulate(one, turns, placement, sizes)
    for some_found in found:
        shares = [some_found.memory, some_found.store, some_found.new]
        assert sum(share.value for share in shares) == pytest.approx(1)
        assert all(0 <= share.value <= 1 and share.error >= 0 for share in shares)
        assert 0 <= some_found.refused <= 1
        reads = [some_found.read_again(0.1, 10.0, seconds) for seconds in (0.0, 1.0, 60.0)]
        assert reads[0] == 0 and reads == sorted(reads)
    hits = [one.memory.value for one in found]
    assert hits == sorted(hits) and hits[0] == 0  # more memory never lowers the share of hits
    assert found[0].new == found[-1].new  # the store's, whatever replicas have


def test_a_run_is_the_same_with_the_same_seed_only() -> None:
    one = scenario(Replicas(4))
    runs = [simulate(some, draw(some), "random", [50.0])[0] for some in (one, one)]
    assert runs[0].memory == runs[1].memory
    other = replace(one, seed=1)
    assert simulate(other, draw(other), "random", [50.0])[0].memory != runs[0].memory


def test_the_stated_error_is_that_of_the_sample() -> None:
    """Of 30 samples, about one of 20 is further than two errors from the mean."""
    found = []
    for seed in range(30):
        one = scenario(Replicas(4, NEVER), sample=2000, seed=seed)
        found.append(simulate(one, draw(one), "affinity", [50.0])[0].memory)
    values = np.array([one.value for one in found])
    stated = float(np.mean([one.error for one in found]))
    assert stated == pytest.approx(float(values.std()), rel=0.5)


def test_affinity_hits_more_and_random_as_often_as_there_are_replicas() -> None:
    one = scenario(Replicas(10, NEVER))
    turns = draw(one)
    (affinity,), (random,) = (simulate(one, turns, name, [1e9]) for name in PLACEMENTS[::-1])
    assert affinity.store.value == 0
    exist = 1 - affinity.new.value
    assert random.memory.value == pytest.approx(exist / 10, rel=0.05)


def test_failures_take_turns_elsewhere() -> None:
    some = Replicas(5, 2000.0, down=200.0, detect=20.0)
    turns = draw_turns(WORK, 5000, 20_000.0, 0.5, np.random.default_rng(0))
    failures = Failures(some, turns.period, np.random.default_rng(1))
    assert failures.count > 10
    for placement in PLACEMENTS:
        placed = place(turns, placement, some, failures, np.random.default_rng(2))
        since = failures.since_last(placed.replica, turns.time)
        assert float((since < some.down).mean()) < 0.005  # only if all that were asked are down
        down = some.down / some.between_failures
        assert placed.refused / len(turns.time) == pytest.approx(down / 10, rel=0.5)


def test_times_since_failures_are_right() -> None:
    some = Replicas(3, 500.0)
    failures = Failures(some, 1000.0, np.random.default_rng(0))
    times = np.linspace(0, 999.9, 2000)
    for replica in range(3):
        at = failures._at[(failures._at >= replica) & (failures._at < replica + 1)] % 1 * 1000
        expected = ((times[:, None] - at[None, :]) % 1000).min(axis=1, initial=np.inf)
        found = failures.since_last(np.full(len(times), replica), times)
        assert np.allclose(found, expected, atol=1e-6)


def test_a_shard_that_has_too_much_to_do_is_overloaded() -> None:
    rng = np.random.default_rng(0)
    assert np.isinf(latencies(1000, 1e-3, 0, rng)).all()
    quiet = latencies(1e-3, 1e-4, 1e-3, rng)
    assert quiet.min() >= 6e-4 and quiet.mean() == pytest.approx(1.1e-3, rel=0.05)
    means = [latencies(rate, 1e-3, 1e-3, rng).mean() for rate in (10, 300, 900)]
    assert means == sorted(means)


def test_a_queue_of_one_slot_is_the_known_one() -> None:
    assert erlang_c(1, 0.5) == pytest.approx(0.5)
    assert erlang_c(2, 1.0) == pytest.approx(1 / 3)  # a textbook's
    assert erlang_c(4, 4.0) == 1.0
    assert slot_wait(1, 0.5, 1.0, 0.99) == pytest.approx(2 * math.log(50))
    assert slot_wait(1, 0.5, 1.0, 0.4) == 0.0
    assert slot_wait(1, 1.5, 1.0, 0.5) == math.inf


demands = st.builds(
    Demand, turns=st.floats(1, 1e5), reads=st.floats(0, 1), sessions=st.floats(1, 1e9)
)


@given(demands, st.integers(1, 500), st.floats(0, 1))
def test_resources_are_shared_by_shards(demand: Demand, count: int, largest: float) -> None:
    shards = Shards(count, largest_owner=largest)
    taken = used(COSTS, shards, 10, demand)
    more = used(COSTS, replace(shards, count=count + 1), 10, demand)
    assert all(0 <= share < math.inf for share in taken.values())
    assert all(more[name] <= taken[name] * 1.000001 for name in taken)
    name, times = first(taken)
    assert name in taken and times == pytest.approx(1 / max(taken.values()))
    memory = traffic(COSTS, demand).memory
    index = demand.sessions * COSTS.index_bytes * largest
    assert taken["store: memory"] * count * shards.memory == pytest.approx(memory - index, rel=1e-6)


def test_a_shard_that_is_overloaded_comes_before_those_who_wait_for_it() -> None:
    taken = used(COSTS, Shards(1), 10_000, Demand(1e6, 0.5, 1e6), waits=math.inf)
    assert first(taken)[0].startswith("store: thread")


def test_one_owner_of_all_sessions_fills_one_shard() -> None:
    demand = Demand(turns=10_000, reads=0.1, sessions=1e9)
    shards = Shards(1000, largest_owner=1.0)
    assert first(used(COSTS, shards, 100_000, demand))[0] == "store: memory, with the largest index"
    even = replace(shards, largest_owner=0.0)
    assert first(used(COSTS, even, 100_000, demand))[0] == "store: memory"


def test_threads_of_a_replica_wait_for_the_store() -> None:
    demand = Demand(turns=10_000, reads=0.1, sessions=1e6)
    taken = used(COSTS, Shards(10), 2, demand, waits=4e-3)
    assert taken["replica: threads for the store"] == pytest.approx(5000 * 4e-3 / 8)


def test_as_many_replicas_and_shards_as_it_says_are_enough() -> None:
    demand = Demand(turns=9000, reads=0.9, sessions=1e8)
    count = replicas_for(COSTS, demand.turns)
    shards = replace(Shards(1), largest_owner=0.0)
    enough = replace(shards, count=shards_for(COSTS, shards, demand))
    taken = used(COSTS, enough, count, demand)
    assert max(taken.values()) <= 0.7
    fewer = replace(enough, count=enough.count - 1)
    assert max(used(COSTS, fewer, count - 1, demand).values()) > 0.7
    assert slot_waits(COSTS, count, demand.turns)[2] < math.inf


def test_a_cluster_asks_for_the_index_apart() -> None:
    demand, rng = Demand(turns=10, reads=0.5, sessions=1e6), np.random.default_rng(0)
    one, two = (store_waits(COSTS, Shards(count), demand, rng) for count in (1, 2))
    assert two.store[0] > 1.5 * one.store[0]
    assert two.look_up[0] == pytest.approx(one.look_up[0], rel=0.1)
    for waits in (one, two):
        for some in (waits.look_up, waits.store, waits.turn):
            assert some == sorted(some) and some[0] > 0
    busy = store_waits(COSTS, Shards(1), Demand(1e6, 0.5, 1e6), rng)
    assert busy.turn == [math.inf] * 3 and busy.mean == math.inf


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("{", "is no JSON"),
        ("[]", "JSON object"),
        ('{"slot": 3}', "unknown slot; allowed: state_bytes"),
        ('{"slots": 0}', "slots is 0; allowed: more than 0"),
        ('{"slots": 1.5}', "whole number"),
        ('{"slots": "many"}', "allowed: a number"),
        ('{"sync_seconds": -1}', "allowed: 0 or more"),
        ('{"turn_seconds": NaN}', "allowed: more than 0"),
    ],
)
def test_costs_that_make_no_sense_are_refused(tmp_path: Path, text: str, told: str) -> None:
    path = tmp_path / "costs.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=told):
        Costs.read(path)


def test_costs_of_a_file_replace_defaults(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    path.write_text('{"slots": 7, "sync_seconds": 0}')
    assert Costs.read(path) == replace(Costs(), slots=7, sync_seconds=0)
    path.write_text(json.dumps(asdict(PRESETS["h200"])))
    assert Costs.read(path) == PRESETS["h200"]


SMALL = [
    "--replicas",
    "4",
    "--sessions",
    "500",
    "--sample",
    "2000",
    "--rows",
    "60",
    "--days",
    "2",
    "--ttl",
    "6",
]


def test_a_small_run_prints_and_saves_all(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "found.json"
    some = ["--shards", "1", "3", "--days", "1", "--events", "--json", str(path)]
    assert main([*SMALL, *some]) == 0
    printed = capsys.readouterr().out
    assert "both simulations" in printed and "used up first" in printed
    saved = json.loads(path.read_text())
    assert [one["shards"] for one in saved["store"]] == [1, 3, 1, 3]
    assert {one["placement"] for one in saved["found"]} == set(PLACEMENTS)


def test_a_shorter_lifetime_needs_a_smaller_store(tmp_path: Path) -> None:
    saved = []
    for ttl in ("1", "6"):
        path = tmp_path / f"{ttl}.json"
        assert (
            main([*SMALL, "--begun", "0.1", "--ttl", ttl, "--sample", "4000", "--json", str(path)])
            == 0
        )
        saved.append(json.loads(path.read_text()))
    short, long = saved
    assert short["load"]["turns"]["value"] == pytest.approx(long["load"]["turns"]["value"])
    assert 2 * short["store"][0]["memory"] < long["store"][0]["memory"]
    assert short["found"][0]["new"]["value"] > long["found"][0]["new"]["value"]


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--replicas", "0"], "replicas is 0; allowed: 1 or more"),
        (["--sessions", "-1"], "sessions is -1.0"),
        (["--begun", "0"], "sessions is 0.0"),
        (["--ttl", "500"], "allowed: more than 0, and less than"),
        (["--days", "2.5"], "whole days"),
        (["--sample", "10"], "allowed: 200 on"),
        (["--ttl", "0.01", "--sample", "400"], "at a time"),
        (["--shards", "0"], "shards is 0"),
        (["--rows", "-3"], "allowed: 0 or more"),
        (["--daily", "1.5"], "daily is 1.5; allowed: 0 to 1"),
        (["--pause", "inf"], "pause is inf; allowed: a finite number"),
        (["--detect", "500"], "before it is over"),
        (["--between-failures", "0"], "allowed: at least the 120 s for which it is down"),
        (["--costs", "/nowhere.json"], "No such file"),
        (["--sessions", "1e8", "--events"], "too many to simulate event by event"),
    ],
)
def test_options_that_make_no_sense_are_refused(
    options: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*SMALL, *options]) == 2
    assert told in capsys.readouterr().out


def test_measured_costs_replace_those_of_the_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measure(state_bytes: int) -> dict[str, float]:
        return {"state_bytes": state_bytes, "open_seconds": 1.0}

    monkeypatch.setattr("loadtest.cluster.measured.measure", measure)
    path = tmp_path / "costs.json"
    assert main(["--costs", "h200", "--measure", str(path)]) == 0
    assert Costs.read(path) == replace(PRESETS["h200"], open_seconds=1.0)


@pytest.mark.skipif(bool(MISSING), reason=MISSING)
def test_the_costs_of_a_real_redis(tmp_path: Path) -> None:
    from loadtest.cluster.measured import measure

    found = measure(5000, sessions=300, calls=200)
    path = tmp_path / "costs.json"
    path.write_text(json.dumps({name: value or 1e-6 for name, value in found.items()}))
    costs = Costs.read(path)
    assert costs.state_bytes == 5000 and 5000 < costs.stored_bytes < 8000
    assert 50 < costs.index_bytes < 1000
