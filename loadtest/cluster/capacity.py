"""What the load takes of each resource, how long turns wait, and what is used up first."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from engine.cache.shared.client import LANES
from engine.cache.shared.store import RENEW_SECONDS
from loadtest.cluster.costs import Costs
from loadtest.cluster.shard import ANSWERS, latencies, slot_wait
from loadtest.cluster.workload import Floats

SHARES = (0.5, 0.99, 0.999)
INDEX = ", with the largest index"
REWRITTEN = 2.0  # times that a state is written to a log: its rewriting at each doubling


@dataclass(frozen=True)
class Shards:
    """The store: a Redis, or a cluster of them."""

    count: int
    memory: float = 64e9  # bytes of a shard that data may take (maxmemory)
    bandwidth: float = 1.25e9  # bytes per second each way, of a shard's network
    disk: float = 200e6  # bytes per second that a shard may write to its log
    largest_owner: float = 0.01  # share of all sessions that belong to the largest owner

    def __post_init__(self) -> None:
        if self.count < 1:
            raise ValueError(f"shards is {self.count}; allowed: 1 or more")
        for name in ("memory", "bandwidth", "disk"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} of a shard is {getattr(self, name)}; allowed: above 0")
        if not 0 <= self.largest_owner <= 1:
            raise ValueError(f"the largest owner's share is {self.largest_owner}; allowed: 0 to 1")


@dataclass(frozen=True)
class Demand:
    """What the store has to do, at some moment."""

    turns: float  # per second
    reads: float  # share of the turns whose state is read
    sessions: float  # whose states are stored


@dataclass(frozen=True)
class Traffic:
    """Operations and bytes per second of all shards together, and bytes of memory."""

    operations: float
    reading: float
    writing: float
    memory: float


def traffic(costs: Costs, demand: Demand) -> Traffic:
    """Return what all shards do together."""
    return Traffic(
        operations=demand.turns * (3 + _renewals(costs)),
        reading=demand.turns * demand.reads * costs.state_bytes,
        writing=demand.turns * costs.state_bytes,
        memory=demand.sessions * (costs.stored_bytes + costs.index_bytes),
    )


def used(
    costs: Costs, shards: Shards, replicas: int, demand: Demand, waits: float = 0.0
) -> dict[str, float]:
    """Return the share of each resource that is taken, 1 being all of it.

    The load of shards is even, but for the index of the largest owner, which is on one shard.

    Args:
        costs: of a turn.
        shards: the store.
        replicas: how many.
        demand: the load.
        waits: seconds that a turn waits for the store, the mean; its replica's thread does, too.
    """
    whole = traffic(costs, demand)
    largest = shards.largest_owner
    seconds = _thread_seconds(costs, demand)
    index = demand.turns * costs.admit_seconds
    even = (seconds - index) / shards.count + (1 - largest) * index / shards.count
    entries = demand.sessions * costs.index_bytes
    memory = (whole.memory - largest * entries) / shards.count
    return {
        "slots": demand.turns * costs.turn_seconds / (replicas * costs.slots),
        "replica: threads for the store": demand.turns / replicas * waits / LANES,
        "store: thread": even,
        f"store: thread{INDEX}": even + largest * index,
        "store: network": max(whole.reading, whole.writing) / shards.count / shards.bandwidth,
        "store: log's disk": REWRITTEN * whole.writing / shards.count / shards.disk,
        "store: memory": memory / shards.memory,
        f"store: memory{INDEX}": (memory + largest * entries) / shards.memory,
    }


def first(used: dict[str, float]) -> tuple[str, float]:
    """Return the resource that is used up first, and at what multiple of the load.

    The largest owner's index is named only if it takes a tenth more than a shard without it. Where
    an overloaded shard makes replicas wait for ever, it is the shard.
    """
    name = max(used, key=lambda one: used[one] if math.isfinite(used[one]) else 0.0)
    most = used[name]
    base = name.removesuffix(INDEX)
    return base if most <= 1.1 * used[base] else name, 1 / most if most else math.inf


@dataclass(frozen=True)
class StoreWaits:
    """Seconds that the store adds to a turn: at each of SHARES, and the mean of a turn.

    Infinite if a shard is overloaded.
    """

    look_up: list[float]  # before a turn
    store: list[float]  # after it
    turn: list[float]  # both
    mean: float


def store_waits(
    costs: Costs, shards: Shards, demand: Demand, rng: np.random.Generator
) -> StoreWaits:
    """Return what the store adds to a turn."""
    largest = shards.largest_owner
    per_turn = 2 + _renewals(costs) + (1 - largest)  # of these shards together
    seconds = (_thread_seconds(costs, demand) / demand.turns) - largest * costs.admit_seconds
    rate = demand.turns * per_turn / shards.count
    shard = latencies(rate, seconds / per_turn, costs.sync_seconds, rng)
    index_rate = rate + demand.turns * largest
    index_seconds = (rate * seconds / per_turn + demand.turns * largest * costs.admit_seconds) / (
        index_rate
    )
    index = latencies(index_rate, index_seconds, costs.sync_seconds, rng)

    def drawn(sample: Floats) -> Floats:
        return sample[rng.integers(len(sample), size=ANSWERS)]

    call = costs.client_seconds + costs.network_seconds
    carried = costs.state_bytes / shards.bandwidth
    look_up = call + drawn(shard) + carried * (rng.random(ANSWERS) < demand.reads)
    store = call + drawn(shard) + carried
    if shards.count > 1:  # a cluster has the index elsewhere, and is asked for it before
        of_largest = rng.random(ANSWERS) < largest
        store = store + call + np.where(of_largest, drawn(index), drawn(shard))
    both = look_up + store

    def shares(sample: Floats) -> list[float]:
        return [float(one) for one in np.quantile(sample, SHARES, method="lower")]

    return StoreWaits(shares(look_up), shares(store), shares(both), mean=float(both.mean()))


def slot_waits(costs: Costs, replicas: int, turns: float) -> list[float]:
    """Return the seconds that a turn waits for a slot, at each of SHARES."""
    rate = turns / replicas
    return [slot_wait(int(costs.slots), rate, costs.turn_seconds, share) for share in SHARES]


def replicas_for(costs: Costs, turns: float, most_used: float = 0.7) -> int:
    """Return how many replicas leave the share 1 - `most_used` of their slots free."""
    return max(math.ceil(turns * costs.turn_seconds / (costs.slots * most_used)), 1)


def shards_for(costs: Costs, shards: Shards, demand: Demand, most_used: float = 0.7) -> int:
    """Return how many shards leave 1 - `most_used` of everything free but the largest index."""
    one = Shards(1, shards.memory, shards.bandwidth, shards.disk, largest_owner=0)
    taken = used(costs, one, 1, demand)
    store = [share for name, share in taken.items() if name.startswith("store")]
    return max(math.ceil(max(store) / most_used), 1)


def _renewals(costs: Costs) -> float:
    """Return how often a turn's lock is prolonged, on average."""
    return costs.turn_seconds / RENEW_SECONDS


def _thread_seconds(costs: Costs, demand: Demand) -> float:
    """Return the seconds of all shards' threads together, a second."""
    look_up = demand.reads * costs.read_seconds + (1 - demand.reads) * costs.open_seconds
    renewing = _renewals(costs) * costs.renew_seconds
    return demand.turns * (look_up + costs.write_seconds + costs.admit_seconds + renewing)
