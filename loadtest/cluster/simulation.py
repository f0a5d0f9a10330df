"""One simulation: what turns find, from a sample of sessions, with its error."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from loadtest.cluster.memory import ages, kept_for, moments_of, until_used_again
from loadtest.cluster.replicas import Failures, Placement, Replicas, place
from loadtest.cluster.workload import DAY, Floats, Turns, Workload, draw_turns

GROUPS = 20  # of sessions, by which errors are estimated
HOURS = 24
LEAST_AT_A_TIME = 100  # sessions of the sample, whose memory is that of all


@dataclass(frozen=True)
class Scenario:
    """What is simulated; times in seconds."""

    workload: Workload
    replicas: Replicas
    sessions: float  # whose state is in the store, on average
    ttl: float  # after its last use, until the store removes a state
    turn: float  # that a turn takes
    sample: int  # sessions to draw
    period: float  # the circle of time; whole days, if the load has a daily course
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.sessions > 0:
            raise ValueError(f"sessions is {self.sessions}; allowed: more than 0")
        if not 0 < self.ttl < self.period:
            raise ValueError(
                f"ttl is {self.ttl:g} s; allowed: more than 0, and less than the "
                f"{self.period:g} s that are simulated"
            )
        if self.sample < 10 * GROUPS:
            raise ValueError(f"the sample has {self.sample} sessions; allowed: {10 * GROUPS} on")
        if self.workload.daily and self.period % DAY:
            raise ValueError("a load with a daily course is simulated for whole days")


@dataclass(frozen=True)
class Estimate:
    """A figure, and the standard error that comes from the sample."""

    value: float
    error: float


@dataclass(frozen=True)
class Load:
    """What does not depend on the placement."""

    sampled: int  # turns
    turns: Estimate  # per second, the mean
    peak: float  # turns of the busiest hour of a day over the mean
    begun: float  # sessions per second
    turns_of_session: float
    life: float  # seconds for which the store has a session's state


@dataclass(frozen=True)
class Found:
    """The places where turns find their state: shares of all turns, which add up to 1."""

    placement: Placement
    rows: float  # states in the memory of a replica
    memory: Estimate  # the replica has it
    store: Estimate  # it is read from the store
    new: Estimate  # there is none: a first turn, or the lifetime was over
    kept: float  # seconds after its last use until a replica drops a state, median of the day
    refused: float  # turns that a dead replica was sent first, share
    gaps: Floats  # seconds before turns that were found in memory

    def read_again(self, moved: float, turns: float, seconds: float) -> float:
        """Return how many more states the store reads, soon after sessions have moved.

        A session reads again when its turns before and after the move would have had the state in
        memory.

        Args:
            moved: share of the sessions that move to another replica at once.
            turns: per second, of all sessions.
            seconds: after the move.
        """
        if not len(self.gaps):
            return 0.0
        mean = float(np.minimum(self.gaps, seconds).mean())
        return moved * turns * self.memory.value * mean


def draw(scenario: Scenario) -> Turns:
    """Draw the turns of a scenario's sample."""
    rng = np.random.default_rng([scenario.seed, 0])
    return draw_turns(scenario.workload, scenario.sample, scenario.period, scenario.turn, rng)


def lives(turns: Turns, ttl: float) -> Floats:
    """Return for each group of sessions how many seconds the store has their states."""
    lasted = np.where(np.isfinite(turns.gap), np.minimum(turns.gap, ttl), ttl)  # first: the end
    return np.asarray(np.bincount(turns.session % GROUPS, lasted, GROUPS), np.float64)


def age_of_sessions(turns: Turns, share: float) -> float:
    """Return for how many seconds their sessions have gone on, at a share of the turns at most."""
    since = np.where(np.isfinite(turns.gap), turns.gap, 0).cumsum()
    first = np.flatnonzero(~np.isfinite(turns.gap))
    since -= since[first][turns.session]
    return float(np.quantile(since, share))


def load_of(scenario: Scenario, turns: Turns) -> Load:
    """Return the rates of turns. Raises ValueError if the sample is too small for its time."""
    group = turns.session % GROUPS
    count = np.bincount(group, minlength=GROUPS)
    life = lives(turns, scenario.ttl)
    if life.sum() < LEAST_AT_A_TIME * scenario.period:
        raise ValueError(
            f"the store has {life.sum() / scenario.period:.0f} sessions of the sample at a time; "
            f"allowed: {LEAST_AT_A_TIME} on, so draw a larger sample or simulate fewer days"
        )
    rate = scenario.sessions * count / life
    hours = np.bincount((turns.time % DAY / DAY * HOURS).astype(np.int64) % HOURS, minlength=HOURS)
    return Load(
        sampled=len(turns.session),
        turns=Estimate(float(scenario.sessions * count.sum() / life.sum()), _error(rate)),
        peak=float(hours.max() / hours.mean()) if scenario.workload.daily else 1.0,
        begun=float(scenario.sessions * turns.sessions / life.sum()),
        turns_of_session=len(turns.session) / turns.sessions,
        life=float(life.sum() / turns.sessions),
    )


def simulate(
    scenario: Scenario, turns: Turns, placement: Placement, rows: Sequence[float]
) -> list[Found]:
    """Return what turns find, for several sizes of a replica's memory.

    Args:
        scenario: what is simulated.
        turns: from `draw`.
        placement: which replica carries out a turn.
        rows: states that fit in a replica's memory.

    Raises ValueError for a negative size.
    """
    if any(not size >= 0 for size in rows):
        raise ValueError(f"rows is {list(rows)}; allowed: 0 or more")
    rng = np.random.default_rng([scenario.seed, 1])
    failures = Failures(scenario.replicas, scenario.period, rng)
    placed = place(turns, placement, scenario.replicas, failures, rng)
    again = until_used_again(turns, placed.replica)
    # A sampled session stands for so many.
    weight = scenario.sessions * scenario.period / lives(turns, scenario.ttl).sum()
    sizes = [size * scenario.replicas.count / weight for size in rows]
    moments = moments_of(scenario.period)
    new = turns.gap > scenario.ttl
    found = []
    for size, kept in zip(rows, ages(turns, again, scenario.ttl, sizes, moments), strict=True):
        lasts = kept_for(kept, moments, turns.time, min(DAY, scenario.period))
        memory = ~new & placed.same & (turns.gap <= lasts)
        found.append(
            Found(
                placement=placement,
                rows=size,
                memory=_share(turns, memory),
                store=_share(turns, ~new & ~memory),
                new=_share(turns, new),
                kept=float(min(np.median(kept), scenario.ttl)),
                refused=placed.refused / len(turns.session),
                gaps=turns.gap[memory],
            )
        )
    return found


def _share(turns: Turns, chosen: np.ndarray) -> Estimate:
    group = turns.session % GROUPS
    count = np.bincount(group, minlength=GROUPS)
    return Estimate(float(chosen.mean()), _error(np.bincount(group, chosen, GROUPS) / count))


def _error(of_groups: Floats) -> float:
    return float(of_groups.std(ddof=1) / np.sqrt(GROUPS))
