"""The command line: the scenario, its simulations, and their tables."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from loadtest import cluster
from loadtest.cluster.capacity import (
    SHARES,
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
from loadtest.cluster.costs import PRESETS, Costs, costs_of
from loadtest.cluster.events import Counts, Events
from loadtest.cluster.replicas import PLACEMENTS, Replicas
from loadtest.cluster.simulation import (
    Estimate,
    Found,
    Load,
    Scenario,
    age_of_sessions,
    draw,
    load_of,
    simulate,
)
from loadtest.cluster.workload import DAY, Turns, Workload
from loadtest.report import command_line, print_environment, print_table, save_json

MEMORY = (0.25, 1.0, 4.0)  # times --rows
MOST_USED = 0.7
CONNECTIONS = 16  # of a replica with one engine, at most, to each shard
MAX_CLIENTS = 10_000  # of a Redis, by default
SOON = (1.0, 60.0, 3600.0)  # seconds after a change


def _percent(one: Estimate) -> str:
    return f"{100 * one.value:.2f} ± {100 * one.error:.2f}"


def _time(seconds: float) -> str:
    for unit, size in (("h", 3600.0), ("min", 60.0), ("s", 1.0)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{1e3 * seconds:.3g} ms" if seconds else "0"


def _waits(seconds: Sequence[float]) -> list[str]:
    return [_time(one) if math.isfinite(one) else "overloaded" for one in seconds]


def _used(share: float) -> str:
    return f"{100 * share:.1f}" if math.isfinite(share) else "waits for ever"


def _bytes(count: float) -> str:
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if count >= size:
            return f"{count / size:,.1f} {unit}"
    return f"{count / 1e3:,.1f} kB"


def _print_load(load: Load, scenario: Scenario, costs: Costs) -> float:
    peak = load.turns.value * load.peak
    print(
        f"{scenario.sessions:,.0f} sessions in the store, {scenario.replicas.count:,} replicas; "
        f"{scenario.sample:,} sessions with {load.sampled:,} turns are the sample\n"
        f"{load.turns.value:,.0f} ± {load.turns.error:,.0f} turns/s on average, {peak:,.0f} in the "
        f"busiest hour; {load.turns_of_session:.1f} turns a session; the store has a session for "
        f"{_time(load.life)} on average\n"
        f"replicas that leave 30 % of their slots free in the busiest hour: "
        f"{replicas_for(costs, peak, MOST_USED):,}"
    )
    return peak


def _print_found(found: Sequence[Found]) -> None:
    rows = [
        [
            one.placement, f"{one.rows:,.0f}", _percent(one.memory), _percent(one.store),
            _percent(one.new), _time(one.kept), f"{1e6 * one.refused:.1f}",
        ]
        for one in found
    ]  # fmt: skip
    print_table(
        "where a turn finds its state, % of all turns",
        [
            "placement", "rows of a replica", "in memory", "read from the store", "new",
            "memory keeps a state", "sent to a dead replica, per million",
        ],
        rows,
    )  # fmt: skip


def _print_changes(
    found: Sequence[Found], load: Load, scenario: Scenario, costs: Costs, peak: float
) -> dict[str, Any]:
    count, step = scenario.replicas.count, max(scenario.replicas.count // 10, 1)
    changes = {
        "a replica dies": 1 / count,
        f"{step:,} replicas are added": step / (count + step),
        f"{step:,} replicas are taken away": step / count if count > 1 else 0.0,
    }
    saved: dict[str, Any] = {}
    rows = []
    for name, moved in changes.items():
        for one in found:
            share = moved if one.placement == "affinity" else moved * (name == "a replica dies")
            reads = [one.read_again(share, peak, seconds) for seconds in SOON]
            saved[f"{name}, {one.placement}"] = {"moved": share, "reads": reads}
            before = one.store.value * peak
            rows.append(
                [
                    name, one.placement, f"{100 * share:.2f}",
                    f"{share * scenario.sessions:,.0f}", f"{before:,.0f}",
                    *(f"{n:,.0f}" for n in reads),
                ]
            )  # fmt: skip
    print_table(
        "a change in the busiest hour: states read more than without it",
        [
            "change", "placement", "sessions moved, %", "sessions", "reads/s before",
            *(f"more within {_time(seconds)}" for seconds in SOON),
        ],
        rows,
    )  # fmt: skip
    times = scenario.replicas
    saved["failures a day"] = count * DAY / times.between_failures
    saved["cut"] = peak / count * costs.turn_seconds
    saved["refused"] = peak / count * times.detect
    print(
        f"A replica dies: {saved['cut']:,.1f} turns under way end in an error, and their sessions "
        f"are busy for up to 6 s;\n{saved['refused']:,.1f} turns are sent to it until that is "
        f"noticed, {times.detect:g} s. No finished turn is lost. Failures a day: "
        f"{saved['failures a day']:,.1f}"
    )
    return saved


def _print_store(
    found: Sequence[Found],
    sizes: Sequence[Shards],
    scenario: Scenario,
    costs: Costs,
    peak: float,
) -> list[dict[str, Any]]:
    rng = np.random.default_rng([scenario.seed, 3])
    totals, columns, waits, saved = [], list[str](), [], list[dict[str, Any]]()
    for one in found:
        demand = Demand(peak, one.store.value, scenario.sessions)
        whole = traffic(costs, demand)
        totals.append(
            [
                one.placement, f"{whole.operations:,.0f}", _bytes(whole.reading),
                _bytes(whole.writing), _bytes(whole.memory),
                f"{shards_for(costs, sizes[0], demand, MOST_USED):,}",
            ]
        )  # fmt: skip
        for shards in sizes:
            seconds = store_waits(costs, shards, demand, rng)
            taken = used(costs, shards, scenario.replicas.count, demand, seconds.mean)
            name, times = first(taken)
            label = [one.placement, f"{shards.count:,}"]
            columns.append(", ".join(label))
            every = (*seconds.look_up, *seconds.store, *seconds.turn)
            waits.append([*label, *_waits(every)])
            saved.append(
                {
                    "placement": one.placement, "shards": shards.count,
                    "operations": whole.operations / shards.count,
                    "reading": whole.reading / shards.count,
                    "writing": whole.writing / shards.count,
                    "memory": whole.memory / shards.count,
                    "used": taken, "first": name, "times": times, "waits": asdict(seconds),
                }
            )  # fmt: skip
    print_table(
        "the store in the busiest hour, all shards together",
        [
            "placement", "operations/s", "read a second", "written a second", "memory",
            "shards that leave 30 % free",
        ],
        totals,
    )  # fmt: skip
    rows = [[name, *(_used(one["used"][name]) for one in saved)] for name in saved[0]["used"]]
    rows.append(["used up first", *(one["first"] for one in saved)])
    rows.append(["at how many times this load", *(f"{one['times']:.2f}" for one in saved)])
    print_table("taken in the busiest hour, %, by placement and shards", ["", *columns], rows)
    calls = ("look-up", "store", "both")
    print(
        f"connections to a shard: up to {CONNECTIONS * scenario.replicas.count:,}, {CONNECTIONS} "
        f"of each replica; Redis allows {MAX_CLIENTS:,} unless `maxclients` says otherwise"
    )
    parts = [f"{name} p{100 * share:g}" for name in calls for share in SHARES]
    print_table(
        "what the store adds to a turn in the busiest hour",
        ["placement", "shards", *parts],
        waits,
    )
    return saved


def _print_slots(costs: Costs, replicas: int, peak: float) -> list[dict[str, Any]]:
    wanted = replicas_for(costs, peak, MOST_USED)
    counts = sorted({replicas, wanted, max(replicas - 1, 1)})
    rows, saved = [], []
    for count in counts:
        waits = slot_waits(costs, count, peak)
        taken = peak * costs.turn_seconds / (count * costs.slots)
        rows.append([f"{count:,}", f"{100 * taken:.1f}", *_waits(waits)])
        saved.append({"replicas": count, "taken": taken, "waits": waits})
    print_table(
        "waiting for a slot in the busiest hour",
        ["replicas", "slots taken, %", *(f"p{100 * share:g}" for share in SHARES)],
        rows,
    )
    return saved


def compared(
    scenario: Scenario, costs: Costs, turns: Turns, shards: int, rows: float
) -> dict[str, dict[str, Any]]:
    """Simulate both ways; return both results by placement.

    Raises ValueError if the scenario is too large.
    """
    rate = load_of(scenario, turns).begun
    age = age_of_sessions(turns, 0.999)
    warm = math.ceil(age / DAY) * DAY if scenario.workload.daily else age
    results: dict[str, dict[str, Any]] = {}
    for placement in PLACEMENTS:
        (fast,) = simulate(scenario, turns, placement, [rows])
        counts = Events(scenario, placement, int(rows), costs, shards, rate, warm).run()
        results[placement] = {"fast": fast, "events": counts}
    return results


def _print_compared(results: dict[str, dict[str, Any]]) -> None:
    rows = []
    for placement, both in results.items():
        fast, events = both["fast"], both["events"]
        assert isinstance(fast, Found) and isinstance(events, Counts)
        for name in ("memory", "store", "new"):
            one, other = getattr(fast, name), events.share(name)
            rows.append([placement, name, _percent(one), _percent(other)])
        rows.append([placement, "turns", "", f"{events.turns:,}"])
    print_table(
        "both simulations, % of all turns", ["placement", "", "fast", "event by event"], rows
    )


def _options() -> argparse.ArgumentParser:
    options = command_line("cluster", cluster.__doc__)
    options.add_argument("--replicas", type=int, default=1000, help="how many")
    options.add_argument(
        "--sessions", type=float, default=100e6, help="whose states are in the store, on average"
    )
    options.add_argument(
        "--begun", type=float, help="sessions that begin a second, instead of --sessions"
    )
    options.add_argument(
        "--shards", type=int, nargs="+", default=[16, 64, 128], help="of the store, several to try"
    )
    options.add_argument(
        "--costs",
        default="cpu",
        help=f"measured costs: {', '.join(PRESETS)}, or a JSON file with some of the fields of "
        "loadtest/cluster/costs.py",
    )
    options.add_argument(
        "--measure",
        type=Path,
        help="measure the store's costs on a Redis here, and write all costs to such a file",
    )
    options.add_argument(
        "--host-state-bytes", type=float, default=2**31, help="memory of a replica for sessions"
    )
    options.add_argument(
        "--rows", type=float, help="states in it (default: --host-state-bytes over those of a row)"
    )
    options.add_argument(
        "--ttl", type=float, default=24.0, help="hours after its last use until a state is removed"
    )
    work = Workload()
    options.add_argument("--tail", type=float, default=work.tail, help="index of turns a session")
    options.add_argument("--turns", type=float, default=work.turns, help="scale of turns a session")
    options.add_argument(
        "--pause", type=float, default=work.pause, help="median pause between turns, seconds"
    )
    options.add_argument(
        "--break", dest="break_", type=float, default=work.break_ / 3600,
        help="median break between two sittings, hours",
    )  # fmt: skip
    options.add_argument(
        "--breaks", type=float, default=work.breaks, help="share of breaks among pauses"
    )
    options.add_argument(
        "--daily", type=float, default=work.daily, help="course of a day, 0 (even) to 1"
    )
    some = Replicas(1)
    options.add_argument(
        "--between-failures", type=float, default=some.between_failures / DAY,
        help="mean time between failures of a replica, days",
    )  # fmt: skip
    options.add_argument("--down", type=float, default=some.down, help="seconds until it is back")
    options.add_argument(
        "--detect", type=float, default=some.detect, help="seconds until it gets no turns"
    )
    one = Shards(1)
    options.add_argument(
        "--shard-memory", type=float, default=one.memory / 1e9, help="of a shard for data, GB"
    )
    options.add_argument(
        "--shard-bandwidth", type=float, default=one.bandwidth / 1e6, help="of a shard, MB/s"
    )
    options.add_argument(
        "--shard-disk", type=float, default=one.disk / 1e6, help="for a shard's log, MB/s"
    )
    options.add_argument(
        "--largest-owner", type=float, default=one.largest_owner,
        help="share of the sessions that are the largest owner's; 1: all have one API key",
    )  # fmt: skip
    options.add_argument("--sample", type=int, default=300_000, help="sessions to simulate")
    options.add_argument("--days", type=float, default=7, help="days to simulate")
    options.add_argument("--events", action="store_true", help="also event by event; few sessions")
    options.add_argument("--seed", type=int, default=0, help="seed of all random choices")
    options.add_argument("--json", type=Path, help="write every figure to this file")
    return options


def _scenario(args: argparse.Namespace, costs: Costs) -> Scenario:
    workload = replace(
        Workload(), tail=args.tail, turns=args.turns, pause=args.pause,
        break_=3600 * args.break_, breaks=args.breaks, daily=args.daily,
    )  # fmt: skip
    replicas = Replicas(args.replicas, DAY * args.between_failures, args.down, args.detect)
    return Scenario(
        workload=workload, replicas=replicas, sessions=args.sessions, ttl=3600 * args.ttl,
        turn=costs.turn_seconds, sample=args.sample, period=DAY * args.days, seed=args.seed,
    )  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Return 0, or 2 for options that make no sense or if nothing could be measured."""
    options = _options()
    args = options.parse_args(argv)
    print_environment()
    try:
        costs = costs_of(args.costs)
        if args.measure:
            from loadtest.cluster.measured import measure

            measured = replace(costs, **measure(int(costs.state_bytes)))
            told = json.dumps(asdict(measured), indent=1)
            args.measure.write_text(told + "\n")
            print(told)
            return 0
        scenario = _scenario(args, costs)
        sizes = [
            Shards(
                count, 1e9 * args.shard_memory, 1e6 * args.shard_bandwidth, 1e6 * args.shard_disk,
                args.largest_owner,
            )
            for count in args.shards
        ]  # fmt: skip
        rows = args.host_state_bytes / costs.row_bytes if args.rows is None else args.rows
        turns = draw(scenario)
        load = load_of(scenario, turns)
        if args.begun is not None:  # how long the store has a session does not depend on how many
            scenario = replace(scenario, sessions=args.begun * load.life)
            load = load_of(scenario, turns)
        every = [
            simulate(scenario, turns, one, [times * rows for times in MEMORY]) for one in PLACEMENTS
        ]
        both = compared(scenario, costs, turns, sizes[0].count, rows) if args.events else {}
    except (ValueError, OSError, RuntimeError) as error:
        print(f"not simulated: {error}")
        return 2
    peak = _print_load(load, scenario, costs)
    _print_found([one for some in every for one in some])
    found = [some[MEMORY.index(1.0)] for some in every]
    changes = _print_changes(found, load, scenario, costs, peak)
    store = _print_store(found, sizes, scenario, costs, peak)
    slots = _print_slots(costs, args.replicas, peak)
    if both:
        _print_compared(both)
    shares = [
        {name: value for name, value in vars(one).items() if name != "gaps"}
        | {name: asdict(getattr(one, name)) for name in ("memory", "store", "new")}
        for some in every
        for one in some
    ]
    save_json(
        args.json,
        {
            "costs": asdict(costs), "load": asdict(load), "peak": peak, "found": shares,
            "changes": changes, "store": store, "slots": slots,
        },
    )  # fmt: skip
    return 0
