"""How long a replica's memory keeps a state: LRU, for all replicas at once.

A replica's memory holds the `rows` states that were used last. Where a replica has many, this is
the same as to keep each for a time after its last use, the age of the oldest of them. The age
depends on the hour, and is found from the sample: at some moments, the states that were used last
are counted from the latest on, until they fill the memory. The replicas' memories are pooled; with
few rows this errs by about one over their square root.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from loadtest.cluster.workload import Floats, Ints, Turns

MOMENTS = 24  # of a period at most of a day each, at which ages are found


def until_used_again(turns: Turns, replica: Ints) -> Floats:
    """Return the seconds from each turn to its session's next one at the same replica."""
    # Where turns of a session are in order, a stable sort keeps them so.
    key = turns.session * (int(replica.max()) + 1) + replica
    order = np.argsort(key, kind="stable")
    since = np.where(np.isfinite(turns.gap), turns.gap, 0).cumsum()  # one axis for all sessions
    again = np.full(len(order), np.inf)
    same = key[order[1:]] == key[order[:-1]]
    again[order[:-1][same]] = (since[order[1:]] - since[order[:-1]])[same]
    return again


def ages(
    turns: Turns, again: Floats, ttl: float, rows: Sequence[float], moments: Floats
) -> list[Floats]:
    """Return how long memories keep a state, at each moment, for several sizes.

    Args:
        turns: the sample.
        again: from `until_used_again`.
        ttl: seconds after its last use until a state is removed.
        rows: sizes of all replicas' memory together, in states of the sample.
        moments: times in the circle.

    Returns for each size the ages at the moments, infinite where everything fits.
    """
    found = [np.full(len(moments), np.inf) for _ in rows]
    lasts = np.minimum(again, ttl)
    for number, moment in enumerate(moments):
        age = (moment - turns.time) % turns.period
        age = np.sort(age[age < lasts])
        for size, at in zip(rows, found, strict=True):
            if size == 0:
                at[number] = 0.0
            elif size < len(age):
                at[number] = age[int(size)]
    return found


def moments_of(period: float) -> Floats:
    """Return moments of which each is in another part of a day."""
    return (np.arange(MOMENTS) + 0.5) * period / MOMENTS % period


def kept_for(ages: Floats, moments: Floats, time: Floats, day: float) -> Floats:
    """Return for each time the age at the moment nearest in the day."""
    order = np.argsort(moments % day)
    at = (moments % day)[order]
    middle = (at[1:] + at[:-1]) / 2
    return ages[order][np.searchsorted(middle, time % day)]
