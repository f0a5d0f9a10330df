"""Histograms and counts of our own say what the library's own would."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

from engine.protocol.events import Stats
from service.observability.histograms import MOST_SEEN, Counts, HistogramCollector
from service.observability.metrics import Metrics
from tests.service.observability.test_samples import values

BOUNDS = (0.00001, 0.5, 1.0, 2.0, 4194304.0)
CREATED = "import sys; from tests.service.observability.test_histograms import created; created()"


def exposition(registry: CollectorRegistry) -> str:
    """Without the times of creation, which differ; their names stay."""
    lines = generate_latest(registry).decode().splitlines()
    return "\n".join(
        line.rpartition(" ")[0] if "_created" in line and line[0] != "#" else line for line in lines
    )


@pytest.mark.parametrize(
    "seen",
    [[], [0.0], [0.5] * 3, [1.0], [1.5], [100.0, 1e9], [9.0, 0.25, 2.0, 0.5] * MOST_SEEN],
    ids=len,
)
@pytest.mark.parametrize("labels", [(), ("phase", "kind")])
def test_a_histogram_is_told_as_the_librarys_own(
    seen: list[float], labels: tuple[str, ...]
) -> None:
    """Letter by letter: names, help, buckets, labels and their order, sums and counts."""
    theirs, ours = CollectorRegistry(), CollectorRegistry()
    values = ("x", 'a "quoted" one') if labels else ()
    direct = Histogram("took_seconds", "How long.", labels, buckets=BOUNDS, registry=theirs)
    tallied = HistogramCollector("took_seconds", "How long.", BOUNDS, labels)
    ours.register(tallied)
    series, tally = direct.labels(*values) if labels else direct, tallied.of(*values)
    for _ in range(2):  # to be read counts nothing twice
        for value in seen:
            series.observe(value)
            tally.observe(value)
        for _ in range(2):
            series.observe(1.25)
        tally.observe_times(1.25, 2)
        assert exposition(ours) == exposition(theirs)
    assert tallied.of(*values) is tally


def test_labels_that_nobody_asked_for_are_not_told_of() -> None:
    theirs, ours = CollectorRegistry(), CollectorRegistry()
    Histogram("took_seconds", "How long.", ["phase"], buckets=BOUNDS, registry=theirs)
    ours.register(HistogramCollector("took_seconds", "How long.", BOUNDS, ["phase"]))
    assert exposition(ours) == exposition(theirs)


def test_a_name_that_is_taken_is_refused() -> None:
    registry = CollectorRegistry()
    registry.register(HistogramCollector("took_seconds", "How long.", BOUNDS))
    with pytest.raises(ValueError, match="took_seconds"):
        registry.register(HistogramCollector("took_seconds", "Again.", BOUNDS))


@pytest.mark.parametrize("bounds", [(2.0, 1.0), (1.0, 1.0), (1.0, float("inf")), (float("nan"),)])
def test_bounds_that_do_not_rise_are_refused(bounds: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="took_seconds"):
        HistogramCollector("took_seconds", "How long.", bounds)


def created() -> None:
    """Prints the names of all series that tell when they were made."""
    text = generate_latest(Metrics(Stats, lambda: 0).registry)
    print(sum("_created" in name for name in values(text)))


@pytest.mark.parametrize("off", [False, True])
def test_times_of_creation_can_be_turned_off(off: bool) -> None:
    """As the library has it, for its series and ours alike."""
    environment = os.environ | ({"PROMETHEUS_DISABLE_CREATED_SERIES": "True"} if off else {})
    told = subprocess.run(
        [sys.executable, "-c", CREATED], env=environment, check=True, capture_output=True, text=True
    )
    assert (int(told.stdout) == 0) is off


def test_counts_feed_their_counter() -> None:
    registry = CollectorRegistry()
    counter = Counter("counted", "x", ["kind"], registry=registry)
    counts = Counts(counter)
    for so_far in (1, 2):  # a flush counts nothing twice
        counts.of("a").value += 1
        counts.of("b").value += 2
        counts.flush()
        counts.flush()
        assert registry.get_sample_value("counted_total", {"kind": "a"}) == so_far
        assert registry.get_sample_value("counted_total", {"kind": "b"}) == 2 * so_far
