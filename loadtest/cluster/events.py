"""A simulation event by event: every session, replica, slot, lock and shard, for small numbers.

It shares no code with the fast simulation but the distributions of the workload. Placement is the
project's rendezvous hashing, a memory an ordered dictionary, and time a line: sessions begin long
before the part that counts.
"""

from __future__ import annotations

import heapq
import itertools
import zlib
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from engine.cache.shared.store import LEASE_SECONDS
from engine.protocol.placement import engines_in_order
from loadtest.cluster.costs import Costs
from loadtest.cluster.replicas import Placement
from loadtest.cluster.simulation import GROUPS, Estimate, Scenario
from loadtest.cluster.workload import draw_counts, draw_pauses, draw_starts

MOST_TURNS = 3e6
_CUT, _REFUSED = "cut", "refused"


@dataclass
class Counts:
    """What has happened in the part that counts; waits in seconds."""

    seconds: float = 0.0
    turns: int = 0
    memory: int = 0
    store: int = 0
    new: int = 0
    refused: int = 0  # sent to a dead replica that nobody knew to be dead
    cut: int = 0  # under way when their replica died
    cut_waits: list[float] = field(default_factory=list)  # from its death to the turn's repetition
    failures: int = 0
    read_after: list[float] = field(default_factory=list)  # times of reads, see `Events.scaled`
    slot_waits: list[float] = field(default_factory=list)
    store_waits: list[float] = field(default_factory=list)  # of a turn, both calls together
    state_seconds: float = 0.0  # integral of the number of states in the store, over time
    groups: list[Counter[str]] = field(default_factory=lambda: [Counter() for _ in range(GROUPS)])

    def share(self, result: str) -> Estimate:
        """Return the share of turns with this result: memory, store or new."""
        every = [one[result] / one.total() for one in self.groups if one.total()]
        error = float(np.std(every, ddof=1) / np.sqrt(len(every))) if len(every) > 1 else np.inf
        return Estimate(getattr(self, result) / max(self.turns, 1), error)


@dataclass
class _Session:
    name: str
    group: int
    left: list[float]  # pauses before the turns to come, the next one last
    generation: int = 0
    expires: float = -1.0


class _Replica:
    def __init__(self, slots: int) -> None:
        self.life = 0  # goes up with each failure
        self.dead = self.known = False
        self.memory: OrderedDict[str, tuple[int, float]] = OrderedDict()
        self.free = slots
        self.waiting: deque[Callable[[], None]] = deque()
        self.under_way: dict[int, tuple[_Session, float]] = {}


class _Shard:
    def __init__(self) -> None:
        self.busy = False
        self.arrived: list[tuple[float, Callable[[], None]]] = []  # their seconds, what is next


class Events:
    """One run.

    Args:
        scenario: its `sessions` is the mean number of states in the store, as in the fast
            simulation; `period` is the part that counts. `sample` is not used.
        placement: which replica carries out a turn.
        rows: states in a replica's memory.
        costs: of turns (exponential around their mean) and of the store.
        shards: of the store.
        rate: sessions that begin per second.
        warm: seconds before the part that counts.
        scaled: (a time in the part that counts, a number of replicas from then on).

    Raises ValueError for a scenario of too many turns.
    """

    def __init__(
        self,
        scenario: Scenario,
        placement: Placement,
        rows: int,
        costs: Costs,
        shards: int,
        rate: float,
        warm: float,
        scaled: tuple[float, int] | None = None,
    ) -> None:
        self._scenario, self._placement, self._rows = scenario, placement, rows
        self._costs, self._warm = costs, warm
        self._rng = np.random.default_rng([scenario.seed, 2])
        self._now = 0.0
        self._end = warm + scenario.period
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._number = itertools.count()
        self._count = scenario.replicas.count
        most = max(self._count, scaled[1]) if scaled else self._count
        self._replicas = [_Replica(int(costs.slots)) for _ in range(most)]
        self._shards = [_Shard() for _ in range(shards)]
        self.counts = Counts(seconds=scenario.period)
        counted = scenario.period + min(1.5 * scenario.ttl, warm)
        expected = rate * counted * 2 * scenario.workload.turns
        if expected > MOST_TURNS:
            raise ValueError(
                f"some {expected:,.0f} turns are too many to simulate event by event; allowed: "
                f"{MOST_TURNS:,.0f}"
            )
        self._begin_sessions(rate)
        for replica in range(most):
            self._plan_failure(replica)
        if scaled:
            self._at(warm + scaled[0], partial(self._scale, scaled[1]))

    def run(self) -> Counts:
        """Simulate, and return what has happened."""
        while self._events and self._events[0][0] < self._end:
            self._now, _, event = heapq.heappop(self._events)
            event()
        return self.counts

    def _at(self, time: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (time, next(self._number), event))

    def _counts_now(self) -> bool:
        return self._now >= self._warm

    def _begin_sessions(self, rate: float) -> None:
        workload, rng = self._scenario.workload, self._rng
        begun = int(rng.poisson(rate * self._end))
        counts = draw_counts(workload, begun, rng)
        # whole days before the part that counts keep the course of a day where it is
        starts = draw_starts(workload, begun, self._end, rng)
        # States that were used before this are gone when the part that counts begins.
        since = self._warm - 1.5 * self._scenario.ttl
        for number, (start, turns) in enumerate(zip(starts, counts, strict=True)):
            pauses = draw_pauses(workload, int(turns) - 1, rng)
            times = start + np.concatenate([[0.0], np.cumsum(pauses + self._scenario.turn)])
            first = int(np.searchsorted(times, since))
            if first < turns:
                left = pauses[first:].tolist()[::-1]
                session = _Session(f"s{number}", number % GROUPS, left)
                self._at(float(times[first]), partial(self._ask, session))

    # Failures, and the number of replicas.

    def _plan_failure(self, number: int) -> None:
        wait = self._scenario.replicas.between_failures
        if np.isfinite(wait):
            at = self._now + self._rng.exponential(wait)
            self._at(at, lambda: self._fail(number))

    def _fail(self, number: int) -> None:
        replica, times = self._replicas[number], self._scenario.replicas
        replica.life += 1
        replica.dead = True
        replica.memory.clear()
        replica.waiting.clear()
        replica.free = int(self._costs.slots)
        if self._counts_now():
            self.counts.failures += 1
        died = self._now
        for session, begun in replica.under_way.values():
            # A lock is prolonged every so often, and the last time is some time ago.
            rest = LEASE_SECONDS - min(self._now - begun, self._rng.uniform(0, LEASE_SECONDS / 3))
            again = max(self._now + rest, died + times.detect)
            if self._counts_now():
                self.counts.cut += 1
                self.counts.cut_waits.append(again - died)
            self._at(again, partial(self._ask, session, _CUT))
        replica.under_way.clear()
        self._at(died + times.detect, lambda: self._mark(replica, known=True))
        self._at(died + times.down, lambda: self._mark(replica, known=False))
        self._at(died + times.down, lambda: self._plan_failure(number))

    def _mark(self, replica: _Replica, known: bool) -> None:
        replica.known = known
        if not known:
            replica.dead = False

    def _scale(self, count: int) -> None:
        self._count = count

    # A turn.

    def _choose(self, session: _Session) -> int:
        alive = [n for n in range(self._count) if not self._replicas[n].known]
        if self._placement == "random" or not alive:
            return int(self._rng.choice(alive or range(self._count)))
        order = engines_in_order("owner", session.name, self._count)
        return next(number for number in order if not self._replicas[number].known)

    def _ask(self, session: _Session, before: str = "") -> None:
        """Send a turn; `before` says what became of it so far."""
        replica = self._replicas[self._choose(session)]
        counted = self._counts_now() and before != _CUT
        if replica.dead:
            if counted and not before:
                self.counts.refused += 1
            self._at(
                self._now + self._scenario.replicas.detect,
                partial(self._ask, session, before or _REFUSED),
            )
            return
        asked, life, key = self._now, replica.life, next(self._number)
        replica.under_way[key] = (session, self._now)
        known = replica.memory.get(session.name)
        exists = session.expires > self._now
        if not exists:
            result = "new"
        elif known is not None and known[0] == session.generation:
            result = "memory"
        else:
            result = "store"
        if counted:
            self.counts.turns += 1
            setattr(self.counts, result, getattr(self.counts, result) + 1)
            self.counts.groups[session.group][result] += 1
            if result == "store":
                self.counts.read_after.append(self._now - self._warm)
        if result == "memory":
            replica.memory.move_to_end(session.name)
        costs = self._costs
        seconds = costs.read_seconds if result == "store" else costs.open_seconds

        def looked_up() -> None:
            if replica.life != life:
                return
            waited = self._now - asked
            arrived = self._now

            def begin() -> None:
                if self._counts_now():
                    self.counts.slot_waits.append(self._now - arrived)
                taken = self._rng.exponential(costs.turn_seconds)
                self._at(self._now + taken, lambda: over(waited))

            if replica.free:
                replica.free -= 1
                begin()
            else:
                replica.waiting.append(begin)

        def over(waited: float) -> None:
            if replica.life != life:
                return
            if replica.waiting:
                replica.waiting.popleft()()
            else:
                replica.free += 1
            ended = self._now

            def stored() -> None:
                if replica.life != life:
                    return
                if self._counts_now():
                    self.counts.store_waits.append(waited + self._now - ended)
                del replica.under_way[key]
                self._stored(session, replica)

            self._call(session, costs.write_seconds, stored)

        self._call(session, seconds, looked_up)

    def _stored(self, session: _Session, replica: _Replica) -> None:
        now, ttl = self._now, self._scenario.ttl
        session.generation += 1
        begun = max(now, self._warm)
        overlap = max(min(session.expires, self._end) - begun, 0.0)  # counted already
        session.expires = now + ttl
        self.counts.state_seconds += max(min(now + ttl, self._end) - begun, 0.0) - overlap
        memory = replica.memory
        memory[session.name] = (session.generation, now)
        memory.move_to_end(session.name)
        while memory and next(iter(memory.values()))[1] + ttl < now:
            memory.popitem(last=False)
        while len(memory) > self._rows:
            memory.popitem(last=False)
        if session.left:
            pause = session.left.pop()
            self._at(now + pause, partial(self._ask, session))

    # The store.

    def _call(self, session: _Session, seconds: float, then: Callable[[], None]) -> None:
        shard = self._shards[zlib.crc32(session.name.encode()) % len(self._shards)]
        shard.arrived.append((seconds, then))
        if not shard.busy:
            self._round(shard)

    def _round(self, shard: _Shard) -> None:
        took, shard.arrived = shard.arrived, []
        shard.busy = True
        sync = self._costs.sync_seconds * (0.5 + 0.5 * self._rng.exponential())
        end = self._now + sum(seconds for seconds, _ in took) + sync

        def answer() -> None:
            shard.busy = False
            for _, then in took:
                then()
            if shard.arrived and not shard.busy:
                self._round(shard)

        self._at(end, answer)
