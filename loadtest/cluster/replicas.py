"""Replicas that fail and come back, and which of them carries out a turn."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from loadtest.cluster.workload import Floats, Ints, Turns

Placement = Literal["random", "affinity"]
PLACEMENTS: tuple[Placement, ...] = ("random", "affinity")
TRIES = 8  # replicas that are asked for a turn while others are down


@dataclass(frozen=True)
class Replicas:
    """The replicas; times in seconds."""

    count: int
    between_failures: float = 30 * 86_400.0  # mean time of one replica; infinite: none fails
    down: float = 120.0  # from a failure until it serves again, with an empty memory
    detect: float = 5.0  # from a failure until no turn is sent to it

    def __post_init__(self) -> None:
        if self.count < 1:
            raise ValueError(f"replicas is {self.count}; allowed: 1 or more")
        if not self.between_failures >= self.down:
            raise ValueError(
                f"a replica fails every {self.between_failures:g} s; allowed: at least the "
                f"{self.down:g} s for which it is down"
            )
        if not 0 <= self.detect <= self.down:
            raise ValueError(
                f"a failure is noticed after {self.detect} s and lasts {self.down} s; allowed: "
                "noticed after 0 s or more, and before it is over"
            )


class Failures:
    """When replicas fail, in a circle of time."""

    def __init__(self, replicas: Replicas, period: float, rng: np.random.Generator) -> None:
        mean = replicas.count * period / replicas.between_failures
        self.count = int(rng.poisson(mean))
        at = np.sort(
            rng.integers(replicas.count, size=self.count) + rng.random(self.count)
        )  # replica + time / period
        self._at, self._replicas, self._period = at, replicas, period
        self._first = np.searchsorted(at, np.arange(replicas.count + 1))

    def before(self, replica: Ints, time: Floats) -> Ints:
        """Return how many failures of the replicas before these are before this time."""
        return np.searchsorted(self._at, replica + time / self._period, side="right")

    def since_last(self, replica: Ints, time: Floats) -> Floats:
        """Return the seconds since the replica's last failure, infinite if there was none."""
        if not self.count:
            return np.full(len(time), np.inf)
        number = self.before(replica, time) - 1
        found = number >= self._first[replica]
        # before its first failure of the circle comes its last
        last = self._first[replica + 1] - 1
        index = np.where(found, number, last)
        some = self._first[replica + 1] > self._first[replica]
        at = (self._at[np.where(some, index, 0)] - replica) * self._period
        return np.where(some, (time - at) % self._period, np.inf)


@dataclass(frozen=True)
class Placed:
    """The replica of each turn, and what that means for its state."""

    replica: Ints
    refused: int  # turns that were sent to a dead replica first
    same: np.ndarray  # whether the turn before was there, and the replica has not failed since


def place(
    turns: Turns,
    placement: Placement,
    replicas: Replicas,
    failures: Failures,
    rng: np.random.Generator,
) -> Placed:
    """Place the turns, as rendezvous hashing does for "affinity".

    A hash orders the replicas for each session, all orders being as likely: the first one that is
    not known to be down carries out the turn. Only the first ones of an order are drawn.
    """
    size = len(turns.session)
    replica = np.empty(size, np.int64)
    left = np.arange(size)
    refused = np.zeros(size, bool)
    for _ in range(TRIES):
        if placement == "affinity":
            drawn = rng.integers(replicas.count, size=turns.sessions)[turns.session[left]]
        else:
            drawn = rng.integers(replicas.count, size=len(left))
        replica[left] = drawn
        since = failures.since_last(drawn, turns.time[left])
        refused[left[since < replicas.detect]] = True
        left = left[since < replicas.down]
        if not len(left):
            break
    before = np.empty_like(replica)
    before[0] = -1
    before[1:] = replica[:-1]
    same = (before == replica) & np.isfinite(turns.gap)
    same &= failures.since_last(replica, turns.time) > turns.gap
    return Placed(replica, int(refused.sum()), same)
