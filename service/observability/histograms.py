"""Fast histograms and counters, which prometheus_client's registry reads when it is scraped.

The library's histograms take locks and search the bucket in Python for each observation, and its
counters take a lock. Streams make hundreds of thousands of observations a second, and each request
makes ten at its end.
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

MOST_SEEN = 256  # observations that are collected before they are sorted into buckets


class HistogramSeries:
    """The observations of one series; for use by one thread."""

    def __init__(self, bounds: Sequence[float]) -> None:
        """`bounds`: upper bounds of the buckets, ascending, without infinity."""
        self._bounds = list(bounds)
        self._counts = [0] * (len(bounds) + 1)  # of each bucket, not cumulative
        self._sum = 0.0
        self._seen: list[float] = []
        self._created = time.time()

    def observe(self, value: float) -> None:
        """Add one observation."""
        self._seen.append(value)
        if len(self._seen) >= MOST_SEEN:
            self._sort()

    def observe_times(self, value: float, times: int) -> None:
        """Add `times` observations of the same value."""
        self._counts[bisect_left(self._bounds, value)] += times
        self._sum += value * times

    def _sort(self) -> None:
        """Sort the collected observations into buckets: one search per bound, not per value."""
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
        """Return the cumulative counts, the sum of all observations, and the time of creation.

        The counts are of the observations up to each bound; the last bound is infinity. The time is
        in seconds since 1970.
        """
        self._sort()
        return list(accumulate(self._counts)), self._sum, self._created


class HistogramCollector(Collector):
    """A histogram with one series for each combination of label values that is used."""

    def __init__(
        self, name: str, documentation: str, bounds: Sequence[float], labels: Sequence[str] = ()
    ) -> None:
        """Describe the histogram.

        Args:
            name: The metric's name.
            documentation: Its help text.
            bounds: Upper bounds of the buckets, ascending, without infinity.
            labels: Names of its labels.

        Raises ValueError for bounds that are not ascending or not finite.
        """
        if sorted(set(bounds)) != list(bounds) or not all(map(math.isfinite, bounds)):
            raise ValueError(f"{name}: the bounds are not finite or do not rise: {bounds}")
        self._name = name
        self._documentation = documentation
        self._bounds = bounds
        to_text: Callable[[float], str] = floatToGoString  # it has no type annotations
        self._texts = [to_text(bound) for bound in (*bounds, math.inf)]
        self._labels = tuple(labels)
        self._series: dict[tuple[str, ...], HistogramSeries] = {}
        self._tells_created = _tells_created()

    def of(self, *labels: str) -> HistogramSeries:
        """Return the series of these label values, which is exposed from now on."""
        assert len(labels) == len(self._labels), f"{self._name} has the labels {self._labels}"
        return self._series.setdefault(labels, HistogramSeries(self._bounds))

    def describe(self) -> Iterator[Metric]:
        """Yield the family without series; the registry asks for its name."""
        yield self._family()

    def collect(self) -> Iterator[Metric]:
        """Yield the family with its series. Must be called in the thread that observes."""
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
    """Whether the library exposes creation times (`_created`), which can be turned off."""
    (family,) = Counter("one", "One.", registry=None).collect()
    return any(sample.name.endswith("_created") for sample in family.samples)


class Count:
    """Collects increments of one series of a Counter; for use by one thread."""

    __slots__ = ("_counter", "value")

    def __init__(self, counter: Counter) -> None:
        self._counter = counter
        self.value = 0  # increments that the counter does not have yet

    def flush(self) -> None:
        """Add the collected increments to the counter."""
        if self.value:
            self._counter.inc(self.value)
            self.value = 0


class Counts:
    """The series of a Counter with labels, as `Count`s."""

    def __init__(self, counter: Counter) -> None:
        self._made: list[Count] = []

        def make(*labels: str) -> Count:
            self._made.append(Count(counter.labels(*labels)))
            return self._made[-1]

        # This cache of the few label combinations costs a tenth of the library's lookup.
        self.of: Callable[..., Count] = cache(make)

    def flush(self) -> None:
        """Add the collected increments of all series to the counter."""
        for count in self._made:
            count.flush()
