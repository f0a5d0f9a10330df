"""Sessions and the times of their turns, drawn at random."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

DAY = 86_400.0


@dataclass(frozen=True)
class Workload:
    """What the users do; times in seconds.

    Sessions begin at random (a Poisson process), more by day than by night. The number of turns
    has a Lomax distribution (a Pareto distribution from 0), rounded up. The time from one turn's
    answer to the next turn is lognormal: most are pauses of one sitting, some are breaks between
    sittings.
    """

    tail: float = 1.5  # index of the number of turns; below 2 its variance is infinite
    turns: float = 4.5  # its scale; the mean is about twice as large
    most_turns: int = 1000
    pause: float = 30.0  # the median
    pause_sigma: float = 1.0
    breaks: float = 0.1  # share of breaks
    break_: float = 6 * 3600.0  # the median
    break_sigma: float = 1.0
    daily: float = 0.5  # sessions begin at (1 + daily cos) times the mean rate; 0: evenly

    def __post_init__(self) -> None:
        positive = ("tail", "turns", "most_turns", "pause", "break_")
        for name, value in vars(self).items():
            if not math.isfinite(value):
                raise ValueError(f"{name} is {value}; allowed: a finite number")
        for name in positive:
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} is {getattr(self, name)}; allowed: more than 0")
        for name in ("breaks", "daily"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} is {getattr(self, name)}; allowed: 0 to 1")
        for name in ("pause_sigma", "break_sigma"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} is {getattr(self, name)}; allowed: 0 or more")


@dataclass(frozen=True)
class Turns:
    """The turns of sampled sessions, session by session, each session's in order.

    Time is a circle of `period` seconds: a session that reaches its end goes on at its beginning.
    So every moment sees sessions of every age, without a time to warm up.
    """

    session: Ints
    time: Floats  # in the circle
    gap: Floats  # since the session's turn before; infinite for the first
    sessions: int
    period: float


def draw_counts(workload: Workload, count: int, rng: np.random.Generator) -> Ints:
    """Return the numbers of turns of `count` sessions."""
    drawn = np.ceil(workload.turns * rng.pareto(workload.tail, count))
    return np.clip(drawn, 1, workload.most_turns).astype(np.int64)


def draw_pauses(workload: Workload, count: int, rng: np.random.Generator) -> Floats:
    """Return `count` times between an answer and the next turn."""
    is_break = rng.random(count) < workload.breaks
    median = np.where(is_break, workload.break_, workload.pause)
    sigma = np.where(is_break, workload.break_sigma, workload.pause_sigma)
    return np.asarray(median * np.exp(sigma * rng.standard_normal(count)), np.float64)


def draw_starts(workload: Workload, count: int, period: float, rng: np.random.Generator) -> Floats:
    """Return when `count` sessions begin; the busiest moment of a day is its middle."""
    starts = np.empty(0)
    while len(starts) < count:
        tried = rng.random(2 * count) * period
        rate = 1 - workload.daily * np.cos(2 * np.pi * tried / DAY)
        starts = np.concatenate(
            [starts, tried[rng.random(2 * count) * (1 + workload.daily) < rate]]
        )
    return starts[:count]


def draw_turns(
    workload: Workload, sessions: int, period: float, turn: float, rng: np.random.Generator
) -> Turns:
    """Draw the turns of `sessions` sessions.

    Args:
        workload: the distributions.
        sessions: how many.
        period: seconds of the circle of time.
        turn: seconds that a turn takes, which come between the starts of two turns.
        rng: where random numbers come from.
    """
    counts = draw_counts(workload, sessions, rng)
    session = np.repeat(np.arange(sessions), counts)
    first = np.cumsum(counts) - counts
    gap = draw_pauses(workload, len(session), rng) + turn
    gap[first] = 0
    since = np.cumsum(gap)
    since -= np.repeat(since[first], counts)
    starts = draw_starts(workload, sessions, period, rng)
    time = (np.repeat(starts, counts) + since) % period
    gap[first] = np.inf
    return Turns(session, time, gap, sessions, period)
