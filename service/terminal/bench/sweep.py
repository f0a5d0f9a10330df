"""highest_rate: finds the highest rate of arrivals at which a server keeps an SLO, by bisection."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Probe:
    """The result of a run at one rate."""

    rate: float
    share: float  # of its requests that kept the SLO
    client_limited: bool = False  # whether the client was the bottleneck


def highest_rate(
    low: float, high: float, measure: Callable[[float], Probe], *, share: float, precision: float
) -> tuple[float | None, list[Probe]]:
    """Find the highest rate from `low` to `high` at which requests keep the SLO.

    Args:
        low: The lowest rate to try.
        high: The highest rate to try.
        measure: Does a run at a rate.
        share: Share of the requests that must keep the SLO.
        precision: Relative precision of the rate.

    Returns: the rate, and all probes. The rate is None if `low` does not keep the SLO; if it is
    `high`, the highest rate may be higher. A probe that was limited by the client counts as failed,
    because it did not measure the server.

    Raises ValueError for arguments that are out of range.
    """
    if not (0 < low < high and 0 < share <= 1 and 0 < precision < 1):
        raise ValueError(
            f"a sweep from {low} to {high}; allowed: 0 < LOW < HIGH, a share above 0 and up to 1, "
            "and a precision between 0 and 1"
        )
    probes = [measure(low)]

    def good(probe: Probe) -> bool:
        return probe.share >= share and not probe.client_limited

    if not good(probes[0]):
        return None, probes
    probes.append(measure(high))
    if good(probes[1]):
        return high, probes
    while high / low > 1 + precision:
        middle = (low * high) ** 0.5
        probes.append(measure(middle))
        if good(probes[-1]):
            low = middle
        else:
            high = middle
    return low, probes
