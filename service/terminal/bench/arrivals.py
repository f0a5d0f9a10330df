"""schedule: the arrival times of an open loop, in seconds from the start of the run."""

from __future__ import annotations

import math
import random
from typing import Literal

Kind = Literal["poisson", "constant", "burst", "ramp", "closed"]


def schedule(
    kind: Kind,
    rate: float,
    *,
    count: int | None = None,
    seconds: float | None = None,
    rate_to: float | None = None,
    burst: int = 1,
    seed: int = 0,
) -> list[float]:
    """Return the arrival times of requests, ascending, in seconds from the start.

    Args:
        kind: How requests arrive: poisson (a Poisson process), constant (evenly), burst (`burst` at
            once, evenly), or ramp (a Poisson process whose rate grows from `rate` to `rate_to`).
        rate: Mean requests per second.
        count: Number of requests; or
        seconds: How long requests arrive. A ramp needs it.
        rate_to: The rate at the end of a ramp.
        burst: Requests that arrive at once.
        seed: Seed of the random times.

    Raises ValueError for arguments that make no schedule.
    """
    if not (rate > 0 and math.isfinite(rate)):
        raise ValueError(f"the rate is {rate} requests per second; allowed: above 0")
    if (count is None) == (seconds is None):
        raise ValueError("requests and seconds are both given, or neither; allowed: one of them")
    if kind == "ramp":
        if seconds is None or rate_to is None or rate_to < 0:
            raise ValueError("a ramp needs --seconds and --rate-to, the rate at its end")
        return _ramp(rate, rate_to, seconds, random.Random(seed))
    if kind == "closed":
        raise ValueError("a closed loop has no schedule")
    if burst < 1:
        raise ValueError(f"a burst has {burst} requests; allowed: at least 1")
    choice = random.Random(seed)
    size = burst if kind == "burst" else 1
    times: list[float] = []
    now = 0.0
    while len(times) < count if count is not None else now < (seconds or 0.0):
        times += [now] * size
        now += choice.expovariate(rate) if kind == "poisson" else size / rate
    return times[:count]


def _ramp(first: float, last: float, seconds: float, choice: random.Random) -> list[float]:
    """Return the times of a Poisson process with a changing rate (by thinning)."""
    highest = max(first, last)
    times: list[float] = []
    now = choice.expovariate(highest)
    while now < seconds:
        if choice.random() * highest < first + (last - first) * now / seconds:
            times.append(now)
        now += choice.expovariate(highest)
    return times
