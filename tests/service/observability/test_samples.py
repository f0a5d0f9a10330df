"""What several processes count, summed into one exposition; settings on their way to them."""

from __future__ import annotations

import os
import threading
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families
from pydantic import SecretStr

from engine.protocol.events import Finished, ModelInfo, Stats, StepEvents
from service.observability.access_log import LineWriter
from service.observability.merge import fold
from service.observability.metrics import Metrics
from service.settings import Settings
from tests.engine.fake import FakeRunner


def make(path: str, requests: int, seconds: float, load: Stats | None = None) -> Metrics:
    """The metrics of a process that has answered so many requests on a path."""
    metrics = Metrics(lambda: load or Stats(), lambda: 2)
    for _ in range(requests):
        metrics.http_request("POST", path, 200, "ok", seconds)
        finished = Finished(1, "length", prompt_tokens=5, cached_tokens=0, completion_tokens=3)
        metrics.on_step(StepEvents(finished=[finished], stats=Stats(decode_tokens=3)))
    return metrics


def values(text: bytes) -> dict[str, float]:
    """Every sample, by its name and labels."""
    return {
        f"{sample.name}{sorted(sample.labels.items())}": sample.value
        for family in text_string_to_metric_families(text.decode())
        for sample in family.samples
    }


def test_counters_and_histograms_are_summed_and_gauges_are_not() -> None:
    info: ModelInfo = FakeRunner().info
    one = make("/v1/generate", 3, 0.02, Stats(running=4, slots_total=8))
    one.model_loaded("fake", info)
    others = [make("/v1/generate", 2, 0.2, Stats(running=4, slots_total=8)) for _ in range(2)]
    others.append(make("/v1/score", 1, 0.2))
    seen = values(one.snapshot().render([other.snapshot().pack() for other in others]))
    generate = "('endpoint', 'generate')"
    assert seen[f"minserve_requests_total[{generate}, ('outcome', 'ok')]"] == 3 + 2 + 2
    # Labels that the process which is asked has never seen.
    assert seen["minserve_requests_total[('endpoint', 'score'), ('outcome', 'ok')]"] == 1
    assert seen["minserve_generation_tokens_total[]"] == 3 * 8
    name = "minserve_e2e_request_latency_seconds"
    buckets = [seen[f"{name}_bucket[('le', '{le}')]"] for le in ("0.01", "0.025", "0.25", "+Inf")]
    assert buckets == [0, 3, 7, 7]
    assert round(seen[f"{name}_sum[]"], 9) == round(3 * 0.02 + 4 * 0.2, 9)
    assert seen["minserve_requests_running[]"] == 4 and seen["minserve_state_slots_total[]"] == 8
    assert seen["minserve_engine_restarts_total[]"] == 2
    assert sum(sample.startswith("minserve_model_info") for sample in seen) == 1


def test_the_sum_is_the_exposition_of_one_process_that_did_it_all() -> None:
    one, other, whole = (make("/v1/generate", count, 0.02) for count in (3, 2, 5))
    summed, alone = (
        values(one.snapshot().render([other.snapshot().pack()])),
        values(whole.snapshot().render()),
    )
    assert summed.keys() == alone.keys()
    differing = {
        name
        for name, value in alone.items()
        if "_created" not in name and round(summed[name], 9) != round(value, 9)
    }
    assert not differing
    created = "minserve_generation_tokens_created[]"
    times = [values(metrics.snapshot().render())[created] for metrics in (one, other)]
    assert summed[created] == min(times)


def test_samples_can_be_summed_in_any_order() -> None:
    parts = [make("/v1/generate", count, 0.02).snapshot().pack() for count in (1, 2, 3)]
    parts.append(make("/v1/score", 1, 0.2).snapshot().pack())
    asked = make("/v1/generate", 4, 0.02)
    at_once = values(asked.snapshot().render(parts))
    folded = values(asked.snapshot().render([fold([fold(parts[:2]), *parts[2:]])]))
    assert {name: round(value, 9) for name, value in at_once.items()} == {
        name: round(value, 9) for name, value in folded.items()
    }


def test_settings_reach_another_process_whole() -> None:
    settings = Settings(
        api_keys=SecretStr("alice:" + "k" * 32),
        admin_key=SecretStr("a" * 32),
        tls_key=Path("/some/key.pem"),
        cors_origin=("https://page.example",),
        max_slots=7,
    )
    again = Settings.from_json(settings.to_json())
    assert again == settings
    assert again.admin_key is not None and again.admin_key.get_secret_value() == "a" * 32


def test_lines_of_processes_that_share_a_pipe_are_not_torn() -> None:
    end, shared = os.pipe()
    lines = {b"%d:%b" % (number, b"x" * (number % 700)) for number in range(4000)}
    writers = [LineWriter(shared, shared=True) for _ in range(2)]
    for line in lines:
        for writer in writers:
            writer.write(line)

    def close() -> None:
        for writer in writers:
            writer.close()
        os.close(shared)

    closing = threading.Thread(target=close)
    closing.start()
    with open(end, "rb") as file:
        read = file.read().splitlines()
    closing.join()
    assert sorted(read) == sorted([*lines, *lines])
