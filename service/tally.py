"""Tally: observations on their way to a histogram, added up until somebody looks.

A histogram of the library takes a lock for each observation and looks for its bucket in Python;
streams bring hundreds of thousands a second, and a request ends with five.
"""

from __future__ import annotations

from bisect import bisect_left

from prometheus_client import Histogram


class Tally:
    """Feeds `histogram`; of one thread."""

    def __init__(self, histogram: Histogram) -> None:
        self._histogram = histogram
        self._bounds = histogram._upper_bounds[:-1]  # the last one has no bound
        self._counts = [0] * len(histogram._upper_bounds)
        self._sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """One observation, or several of the same value."""
        self._counts[bisect_left(self._bounds, value)] += times
        self._sum += value * times

    def flush(self) -> None:
        """The histogram has all observations so far."""
        histogram = self._histogram
        for place, count in enumerate(self._counts):
            if count:
                histogram._buckets[place].inc(count)
                self._counts[place] = 0
        histogram._sum.inc(self._sum)
        self._sum = 0.0
