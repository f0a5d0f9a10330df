"""Histograms and counts of their own, which the library's registry reads when somebody looks.

A histogram of the library takes locks for each observation and looks for its bucket in Python, and
a counter takes a lock; streams bring hundreds of thousands a second, and a request ends with ten.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import accumulate

from prometheus_client import Counter, Metric
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

MOST_SEEN = 256  # observations that are not sorted yet


class HistogramSeries:
    """The observations of one series; of one thread."""

    def __init__(self, bounds: Sequence[float]) -> None:
        """`bounds` are the upper ones of the buckets, in order, without the infinite one."""
        self._bounds = list(bounds)
        self._counts = [0] * (len(bounds) + 1)  # of each bucket alone
        self._sum = 0.0
        self._seen: list[float] = []
        self._created = time.time()

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

    def read(self) -> tuple[list[int], float, float]:
        """How many observations were at most each bound, infinity being the last; the sum of all
        of them; and when the series was made, in seconds since 1970."""
        self._sort()
        return list(accumulate(self._counts)), self._sum, self._created


class HistogramCollector(Collector):
    """A histogram of several series, one for each combination of labels that was asked for."""

    def __init__(
        self, name: str, documentation: str, bounds: Sequence[float], labels: Sequence[str] = ()
    ) -> None:
        """`bounds` as of a HistogramSeries; `labels` are names.

        Raises ValueError for bounds that are out of order or not finite.
        """
        if sorted(set(bounds)) != list(bounds) or not all(map(math.isfinite, bounds)):
            raise ValueError(f"{name}: the bounds are not finite or do not rise: {bounds}")
        self._name = name
        self._documentation = documentation
        self._bounds = bounds
        to_text: Callable[[float], str] = floatToGoString  # which carries no types
        self._texts = [to_text(bound) for bound in (*bounds, math.inf)]
        self._labels = tuple(labels)
        self._series: dict[tuple[str, ...], HistogramSeries] = {}
        self._tells_created = _tells_created()

    def of(self, *labels: str) -> HistogramSeries:
        """The series of these values of the labels, which is exposed from now on."""
        assert len(labels) == len(self._labels), f"{self._name} has the labels {self._labels}"
        return self._series.setdefault(labels, HistogramSeries(self._bounds))

    def describe(self) -> Iterator[Metric]:
        """The family without its series: the registry asks for names."""
        yield self._family()

    def collect(self) -> Iterator[Metric]:
        """The family as it is just now; in the thread that observes."""
        family = self._family()
        for labels, series in self._series.items():
            counts, total, created = series.read()
            family.add_metric(
                labels, list(zip(self._texts, map(float, counts), strict=True)), total
            )
            if self._tells_created:
                named = dict(zip(self._labels, labels, strict=True))
                family.add_sample(f"{self._name}_created", named, created)
        yield family

    def _family(self) -> HistogramMetricFamily:
        return HistogramMetricFamily(self._name, self._documentation, labels=self._labels)


@cache
def _tells_created() -> bool:
    """Whether the library's own series tell when they were made, which its users can turn off."""
    (family,) = Counter("one", "One.", registry=None).collect()
    return any(sample.name.endswith("_created") for sample in family.samples)


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
