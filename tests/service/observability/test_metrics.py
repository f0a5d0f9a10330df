"""Every series: its name, type and labels, its row in the operator's page, and what some count."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import NamedTuple

import pytest
from prometheus_client import generate_latest

from engine.errors import BY_CODE
from engine.protocol.events import Stats
from service.observability.metrics import SECONDS, STEP_SECONDS, Metrics
from tests.service.harness import Service, fake_runner, running, until
from tests.service.inference.test_lifecycle import LONG, Connection
from tests.service.inference.test_operation import scrape, value

ROOT = Path(__file__).resolve().parents[3]
# By name: type and labels. Counters' samples end in _total, which their names here do not.
SERIES: dict[str, tuple[str, tuple[str, ...]]] = {
    "connections_cut": ("counter", ("reason",)),
    "disconnect_release_rounds": ("histogram", ()),
    "disconnect_release_seconds": ("histogram", ()),
    "e2e_request_latency_seconds": ("histogram", ()),
    "engine_restarts": ("counter", ()),
    "engine_step_seconds": ("histogram", ("phase",)),
    "engine_requests": ("gauge", ("engine",)),
    "engines": ("gauge", ()),
    "engines_serving": ("gauge", ()),
    "generation_tokens": ("counter", ()),
    "grammar_compile_seconds": ("histogram", ()),
    "http_requests": ("counter", ("method", "path", "status")),
    "inter_token_latency_seconds": ("histogram", ()),
    "model": ("info", ()),
    "prefix_cache_hits": ("counter", ()),
    "prefix_cache_hits_tokens": ("counter", ()),
    "prefix_cache_misses": ("counter", ("reason",)),
    "prefix_cache_queries_tokens": ("counter", ()),
    "prompt_tokens": ("counter", ()),
    "request_decode_time_seconds": ("histogram", ()),
    "request_errors": ("counter", ("code",)),
    "request_generation_tokens": ("histogram", ()),
    "request_prefill_time_seconds": ("histogram", ()),
    "request_prompt_tokens": ("histogram", ()),
    "request_queue_time_seconds": ("histogram", ()),
    "request_success": ("counter", ("finish_reason",)),
    "requests": ("counter", ("endpoint", "outcome")),
    "requests_running": ("gauge", ()),
    "requests_waiting": ("gauge", ()),
    "requests_waiting_limit": ("gauge", ()),
    "score_latency_seconds": ("histogram", ()),
    "state_bytes": ("gauge", ("tier",)),
    "state_evictions": ("counter", ("tier",)),
    "state_fetch_seconds": ("histogram", ("result",)),
    "state_fetches": ("counter", ("result",)),
    "state_store_errors": ("counter", ()),
    "state_store_write_seconds": ("histogram", ()),
    "state_slots_total": ("gauge", ()),
    "state_slots_used": ("gauge", ()),
    "state_usage_ratio": ("gauge", ()),
    "states": ("gauge", ()),
    "step_batch_size": ("histogram", ()),
    "time_to_first_token_seconds": ("histogram", ()),
    "waiting_prompt_tokens": ("gauge", ()),
    "waiting_prompt_tokens_limit": ("gauge", ()),
}


def metrics() -> Metrics:
    return Metrics(Stats, lambda: 0)


class Series(NamedTuple):
    name: str
    type: str
    labels: tuple[str, ...]
    text: str


def described() -> list[Series]:
    """What the registry holds, by its own word, once every series with labels has a sample."""
    told, found = metrics(), []
    told.http_request("GET", "/health", 200, None, 0.0)
    told.snapshot()  # it has reached the registry
    for family in told.registry.collect():
        labels = dict.fromkeys(label for sample in family.samples for label in sample.labels)
        labels.pop("le", None)  # of a histogram's buckets
        found.append(Series(family.name, family.type, tuple(labels), family.documentation))
    return found


def test_every_series_has_its_type_and_labels() -> None:
    found = {one.name: (one.type, one.labels) for one in described()}
    assert found == {f"minserve_{name}": kind for name, kind in SERIES.items()}
    assert all(one.text.endswith(".") for one in described())


def section(title: str) -> str:
    """Of docker/README.md, without its heading."""
    page = (ROOT / "docker" / "README.md").read_text(encoding="utf-8")
    return page.split(f"\n## {title}\n")[1].split("\n## ")[0]


def row(one: Series) -> str:
    """Of a table in Markdown."""
    suffix = {"counter": "_total", "info": "_info"}.get(one.type, "")
    labels = f"{{{','.join(one.labels)}}}" if one.labels else ""
    return f"| `{one.name}{suffix}{labels}` | {one.type} | {one.text} |"


def test_the_operators_page_describes_every_series() -> None:
    """Word for word: name, labels, type and what it tells."""
    rows = [line for line in section("Metrics").splitlines() if line.startswith("| `minserve_")]
    assert sorted(rows) == sorted(map(row, described()))


def test_the_operators_page_explains_every_label() -> None:
    rows = re.findall(r"^\| (`.+?) \| (`.+?) \|", section("Metrics"), re.MULTILINE)
    told = {
        (label, series)
        for labels, names in rows
        for label in re.findall(r"`(\w+)`", labels)
        for series in re.findall(r"`minserve_(\w+?)(?:_total)?`", names)
    }
    assert told >= {(label, name) for name, (_, labels) in SERIES.items() for label in labels}
    assert {series for _, series in told} <= {*SERIES, "model_info"}


def test_buckets_begin_where_small_models_are() -> None:
    assert STEP_SECONDS[0] == 1e-5 and SECONDS[0] == 1e-4
    assert list(STEP_SECONDS) == sorted(STEP_SECONDS)
    text = generate_latest(metrics().registry).decode()
    assert 'minserve_engine_step_seconds_bucket{le="1e-05",phase="decode"} 0.0' in text
    assert 'minserve_inter_token_latency_seconds_bucket{le="1e-05"} 0.0' in text


def test_labels_that_are_known_count_from_the_start() -> None:
    text = generate_latest(metrics().registry).decode()
    for line in (
        'minserve_requests_total{endpoint="chat/completions",outcome="refused"} 0.0',
        'minserve_requests_total{endpoint="score",outcome="timeout"} 0.0',
        'minserve_request_success_total{finish_reason="timeout"} 0.0',
        'minserve_connections_cut_total{reason="stalled"} 0.0',
    ):
        assert line in text


async def test_errors_are_counted_by_their_code(byte_folder: Path) -> None:
    runner = fake_runner(byte_folder, slots=1, max_waiting=0, step_seconds=0.005)
    async with running(runner) as service:
        held = asyncio.create_task(
            service.http.post("/v1/generate", json={"prompts": ["a"], **LONG})
        )
        await until(lambda: service.client.stats.running == 1)
        await service.post("/v1/generate", {"prompts": ["b"]}, 429)
        held.cancel()
        await asyncio.gather(held, return_exceptions=True)
        await until(lambda: service.client.stats.running == 0)
        await service.post("/v1/generate", {}, 400)
        await service.post("/v1/generate", {"prompts": ["a"], "model": "x" * 999}, 404)
        await service.http.post("/v1/generate", content=b"{")
        await service.http.post("/no/such/path", content=b"{")
        runner.failures.append(RuntimeError("a step goes wrong"))
        await service.post("/v1/generate", {"prompts": ["b"]}, 500)
        families = await scrape(service)
    samples = families["minserve_request_errors"].samples
    counts = {
        one.labels["code"]: one.value
        for one in samples
        if one.name.endswith("_total") and one.value
    }
    assert counts == {
        "queue_full": 1,
        "invalid_value": 1,
        "model_not_found": 1,
        "invalid_json": 1,
        "step_failed": 1,
    }
    assert {"queue_full", "step_failed"} <= BY_CODE.keys()


async def test_an_unexpected_error_counts_too(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(*_: object) -> None:
        raise RuntimeError("secret detail")

    monkeypatch.setattr("service.routes.generate.gather", fail)
    await service.post("/v1/generate", {"prompts": ["a"]}, 500)
    families = await scrape(service)
    assert value(families, "minserve_requests_total", endpoint="generate", outcome="error") == 1
    assert value(families, "minserve_request_errors_total", code="server_error") == 1


async def test_an_error_in_a_stream_counts_too(byte_folder: Path) -> None:
    runner = fake_runner(byte_folder, step_seconds=0.005)
    async with running(runner) as service:
        held = asyncio.create_task(
            service.http.post("/v1/generate", json={"prompts": ["a"], **LONG, "stream": True})
        )
        await until(lambda: runner.steps > 5)
        runner.failures.append(RuntimeError("a step goes wrong"))
        assert (await held).status_code == 200
        families = await scrape(service)
        assert value(families, "minserve_request_errors_total", code="step_failed") == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_frees_its_slot_within_two_messages(
    byte_folder: Path, stream: bool
) -> None:
    runner = fake_runner(byte_folder, step_seconds=0.005, most_steps=8, overlaps=True)
    async with running(runner) as service:
        body = {"prompts": ["a", "b"], **LONG, "stream": stream}
        connection = Connection("/v1/generate", body)
        held = asyncio.create_task(
            service.app(connection.scope, connection.receive, connection.send)
        )
        await until(lambda: service.client.stats.running == 2)
        families = await scrape(service)
        assert value(families, "minserve_disconnect_release_seconds_count") == 0
        connection.gone.set()
        await held
        await until(lambda: service.client.stats.slots_used == 0)
        families = await scrape(service)
        assert value(families, "minserve_disconnect_release_seconds_count") == 2
        bucket = "minserve_disconnect_release_rounds_bucket"
        assert value(families, bucket, le="2.0") == 2
        assert value(families, "minserve_requests_total", endpoint="generate", outcome="cancelled")


async def test_requests_that_end_are_no_disconnects(service: Service) -> None:
    await service.post("/v1/generate", {"prompts": ["abc"], "max_tokens": 2, "stop": ["e"]})
    families = await scrape(service)
    assert value(families, "minserve_disconnect_release_rounds_count") == 0


async def test_the_queue_tells_its_limits(byte_folder: Path) -> None:
    async with running(fake_runner(byte_folder), max_waiting=7, max_waiting_tokens=99) as service:
        families = await scrape(service)
        assert value(families, "minserve_requests_waiting_limit") == 7
        assert value(families, "minserve_waiting_prompt_tokens_limit") == 99
        assert value(families, "minserve_waiting_prompt_tokens") == 0


async def test_where_a_shared_store_found_states(byte_folder: Path, tmp_path: Path) -> None:
    runner = fake_runner(byte_folder, state_store=f"file://{tmp_path}/store")
    async with running(runner) as service:
        for _ in range(3):
            body = {"prompt": "abc", "max_tokens": 2, "session_id": "s"}
            await service.post("/v1/completions", body)
        families = await scrape(service)
        for result, count in {"new": 1, "memory": 2, "store": 0, "unavailable": 0}.items():
            assert value(families, "minserve_state_fetches_total", result=result) == count
            name = "minserve_state_fetch_seconds_count"
            assert value(families, name, result=result) == count
        assert value(families, "minserve_state_store_write_seconds_count") == 3
