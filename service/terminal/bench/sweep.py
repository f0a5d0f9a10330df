"""The highest rate of arrivals at which a server keeps its SLO, by bisection."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Probe:
    """One run at one rate."""

    rate: float
    share: float  # of its requests that kept the SLO
    client_limited: bool = False


def highest_rate(
    low: float, high: float, measure: Callable[[float], Probe], *, share: float, precision: float
) -> tuple[float | None, list[Probe]]:
    """The highest rate within `low` to `high` at which `share` of the requests keep the SLO, to
    `precision` of itself, and the probes on the way; None where not even `low` does. `high` itself
    says only that the rate is at least so high. A probe that
    the client itself limited counts as missed: what it measured is not the server.

    Raises ValueError for limits that are none.
    """
    if not (0 < low < high and 0 < share <= 1 and 0 < precision < 1):
        raise ValueError(f"a sweep from {low} to {high}: need 0 < low < high")
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
