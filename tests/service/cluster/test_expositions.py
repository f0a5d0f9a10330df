"""The metrics of several replicas in one answer."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from service.cluster.expositions import Collected, merge


def exposition(count: int) -> bytes:
    registry = CollectorRegistry()
    Counter("app_requests", "Requests.", ["outcome"], registry=registry).labels("ok").inc(count)
    Gauge("app_running", "Those\nthat run.", registry=registry).set(count)
    Histogram("app_seconds", "Seconds.", buckets=(1, 2), registry=registry).observe(count)
    Info("app_model", "The model.", registry=registry).info({"name": 'a"b\\c {d}'})
    return generate_latest(registry)


def test_every_sample_says_whose_it_is() -> None:
    text = merge({"one": exposition(1), "two": exposition(3)}).decode()
    families = {one.name: one for one in text_string_to_metric_families(text)}
    assert families["app_requests"].documentation == "Requests."
    assert families["app_requests"].type == "counter"
    assert families["app_running"].documentation == "Those\nthat run."
    for family in families.values():
        assert {sample.labels["replica"] for sample in family.samples} == {"one", "two"}
    totals = {
        sample.labels["replica"]: sample.value
        for sample in families["app_requests"].samples
        if sample.name == "app_requests_total"
    }
    assert totals == {"one": 1.0, "two": 3.0}
    buckets = [one for one in families["app_seconds"].samples if one.name.endswith("_bucket")]
    assert len(buckets) == 2 * 3 and all(one.labels["le"] for one in buckets)
    assert families["app_model_info"].samples[0].labels["name"] == 'a"b\\c {d}'


def test_a_metric_stands_in_one_place() -> None:
    lines = merge({name: exposition(1) for name in "abc"}).decode().splitlines()
    heads = [line for line in lines if line.startswith("# TYPE")]
    assert len(heads) == len(set(heads))
    names = [line.split("{")[0] for line in lines if not line.startswith("#")]
    starts = [name for name, before in zip(names, ["", *names], strict=False) if name != before]
    assert len([name for name in starts if name == "app_running"]) == 1


def test_one_replica_alone() -> None:
    assert b'app_running{replica="one"} 1.0' in merge({"one": exposition(1)})
    assert merge({}) == b""


def test_a_replica_that_is_gone_is_forgotten() -> None:
    collected = Collected()
    collected.put("one", b"x")
    assert collected.all() == {"one": b"x"}
    collected._of["one"] = (collected._of["one"][0] - 60, b"x")
    collected.put("two", b"y")
    assert collected.all() == {"two": b"y"}
