"""When requests arrive: seconds from the start, whatever the server does."""

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
    """Arrival times, in order, of `count` requests or of all that arrive within `seconds`.

    `rate` requests a second on average: at random and independent of each other (poisson), evenly
    (constant), `burst` at once evenly (burst), or at a random Poisson pace that grows evenly from
    `rate` to `rate_to` over `seconds` (ramp). Raises ValueError for what makes no schedule.
    """
    if not (rate > 0 and math.isfinite(rate)):
        raise ValueError(f"a rate of {rate} requests a second: it must be above 0")
    if (count is None) == (seconds is None):
        raise ValueError("give the number of requests or the seconds, one of them")
    if kind == "ramp":
        if seconds is None or rate_to is None or rate_to < 0:
            raise ValueError("a ramp needs the seconds and the rate at its end")
        return _ramp(rate, rate_to, seconds, random.Random(seed))
    if kind == "closed":
        raise ValueError("a closed loop has no schedule")
    if burst < 1:
        raise ValueError(f"bursts of {burst} requests: at least 1")
    choice = random.Random(seed)
    size = burst if kind == "burst" else 1
    times: list[float] = []
    now = 0.0
    while len(times) < count if count is not None else now < (seconds or 0.0):
        times += [now] * size
        now += choice.expovariate(rate) if kind == "poisson" else size / rate
    return times[:count]


def _ramp(first: float, last: float, seconds: float, choice: random.Random) -> list[float]:
    """A Poisson process of the highest rate, thinned."""
    highest = max(first, last)
    times: list[float] = []
    now = choice.expovariate(highest)
    while now < seconds:
        if choice.random() * highest < first + (last - first) * now / seconds:
            times.append(now)
        now += choice.expovariate(highest)
    return times
