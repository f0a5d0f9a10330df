"""Tallies: observations and counts on their way to the library's series, added up until somebody
looks.

A histogram of the library takes locks for each observation and looks for its bucket in Python, and
a counter takes a lock; streams bring hundreds of thousands a second, and a request ends with ten.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable
from functools import cache

from prometheus_client import Counter, Histogram

MOST_SEEN = 256  # observations that are not sorted yet


class Tally:
    """Feeds `histogram`; of one thread."""

    def __init__(self, histogram: Histogram) -> None:
        self._histogram = histogram
        self._bounds = histogram._upper_bounds[:-1]  # the last one has no bound
        self._counts = [0] * len(histogram._upper_bounds)
        self._sum = 0.0
        self._seen: list[float] = []

    def observe(self, value: float) -> None:
        """One observation."""
        self._seen.append(value)
        if len(self._seen) >= MOST_SEEN:
            self._sort()

    def observe_times(self, value: float, times: int) -> None:
        """Several observations of the same value."""
        self._counts[bisect_left(self._bounds, value)] += times
        self._sum += value * times

    def _sort(self) -> None:
        """Into buckets: a look at each bound costs less than one at each value."""
        seen = self._seen
        seen.sort()
        below = 0
        for place, bound in enumerate(self._bounds):
            up_to = bisect_right(seen, bound, below)
            self._counts[place] += up_to - below
            below = up_to
        self._counts[-1] += len(seen) - below
        self._sum += sum(seen)
        seen.clear()

    def flush(self) -> None:
        """The histogram has all observations so far."""
        self._sort()
        histogram = self._histogram
        for place, count in enumerate(self._counts):
            if count:
                histogram._buckets[place].inc(count)
                self._counts[place] = 0
        histogram._sum.inc(self._sum)
        self._sum = 0.0


class Count:
    """Feeds a series of `counter`; of one thread."""

    __slots__ = ("_counter", "value")

    def __init__(self, counter: Counter) -> None:
        self._counter = counter
        self.value = 0  # that the counter does not have yet

    def flush(self) -> None:
        """The counter has it all."""
        if self.value:
            self._counter.inc(self.value)
            self.value = 0


class Counts:
    """The series of a counter with labels."""

    def __init__(self, counter: Counter) -> None:
        self._made: list[Count] = []

        def make(*labels: str) -> Count:
            self._made.append(Count(counter.labels(*labels)))
            return self._made[-1]

        # Labels are looked up in a table that costs a tenth of the library's; they are few.
        self.of: Callable[..., Count] = cache(make)

    def flush(self) -> None:
        """The counter has it all."""
        for count in self._made:
            count.flush()
