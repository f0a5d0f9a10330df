"""Merges the metrics of several API processes into one exposition.

prometheus_client's own multiprocess mode supports neither info metrics nor collectors, and needs
files. Here each process sends its samples as plain data. Counters and histograms are summed. All
other metrics are taken from the process that is scraped: gauges, which describe the engines that
all processes share, infos, and what the supervisor counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import msgspec
from prometheus_client import CollectorRegistry, Metric, generate_latest
from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

SUMMED = ("counter", "histogram")
RESTARTS = "minserve_engine_restarts"  # a counter of the supervisor, equal in all processes

Labels = tuple[tuple[str, str], ...]
# Values by family, then by a sample's name and labels.
Sums = dict[str, dict[tuple[str, Labels], float]]


class Family(msgspec.Struct, frozen=True, array_like=True):
    """The samples of one metric that is summed over processes."""

    name: str
    samples: list[tuple[str, list[tuple[str, str]], float]]


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(list[Family]).decode


class RestartsCollector(Collector):
    """The counter of engine restarts."""

    def __init__(self, count: Callable[[], int]) -> None:
        self._count = count

    def collect(self) -> Iterator[Metric]:
        yield CounterMetricFamily(
            RESTARTS, "Engines started in place of one that died.", value=self._count()
        )


def fold(packed: Sequence[bytes]) -> bytes:
    """Return the packed samples of several processes, summed, as those of one process."""
    sums = _add(packed)
    return _encode(
        [
            Family(name, [(sample, list(labels), value) for (sample, labels), value in of.items()])
            for name, of in sums.items()
        ]
    )


def _is_summed(metric: Metric) -> bool:
    return metric.type in SUMMED and metric.name != RESTARTS


def _add(packed: Iterable[bytes]) -> Sums:
    sums: Sums = {}
    for one in packed:
        for family in _decode(one):
            of = sums.setdefault(family.name, {})
            for sample, labels, value in family.samples:
                key = sample, tuple(labels)
                of[key] = _join(sample, of.get(key), value)
    return sums


def _join(sample: str, one: float | None, other: float) -> float:
    """Return the sum of two samples; of creation times, the earlier one."""
    if one is None:
        return other
    return min(one, other) if sample.endswith("_created") else one + other


class Snapshot:
    """The metrics of a registry at one moment, to send to other processes or to render."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._metrics = list(registry.collect())

    def pack(self) -> bytes:
        """Return the samples that are summed over processes, as bytes."""
        families = [
            Family(
                metric.name,
                [(one.name, sorted(one.labels.items()), one.value) for one in metric.samples],
            )
            for metric in self._metrics
            if _is_summed(metric)
        ]
        return _encode(families)

    def render(self, others: Sequence[bytes] = ()) -> bytes:
        """Return Prometheus' text exposition, with the packed samples of `others` added."""
        return generate_latest(_Sum(self._metrics, _add(others)))


class _Sum:
    """The sum of metrics and other processes' samples, with a registry's `collect`."""

    def __init__(self, metrics: Sequence[Metric], others: Sums) -> None:
        self._metrics = metrics
        self._others = others

    def collect(self) -> Iterator[Metric]:
        for metric in self._metrics:
            yield self._with_others(metric) if _is_summed(metric) else metric

    def _with_others(self, metric: Metric) -> Metric:
        of = dict(self._others.get(metric.name, {}))
        whole = Metric(metric.name, metric.documentation, metric.type)
        for sample in metric.samples:
            other = of.pop((sample.name, tuple(sorted(sample.labels.items()))), None)
            value = _join(sample.name, other, sample.value)
            whole.add_sample(sample.name, sample.labels, value)
        for (name, labels), value in of.items():  # label values that this process has not used
            whole.add_sample(name, dict(labels), value)
        return whole
