"""Several API processes on one port, in front of one engine."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from service.server.end_signals import ECHO_SECONDS
from tests.service.harness import save_byte_tokenizer
from tests.service.inference.test_restart import (
    ENDLESS,
    SHORT,
    error_of,
    restarts,
    streaming,
    until,
)
from tests.service.process import Process, children, running_module, serving
from tests.service.routes.test_reload import later, reload

FOLDER_ENGINE = "tests.engine.fake:folder_engine"
GAUGES = ("minserve_state_slots_total",)  # of a counter's name
MANY = 16  # connections, so that every process has some of them


@contextmanager
def several(
    folder: Path, workers: int = 2, **settings: Any
) -> Iterator[tuple[Process, httpx.Client]]:
    """A server of so many API processes, all of them ready."""
    save_byte_tokenizer(folder)
    options = {"model": str(folder), "api_workers": workers, **settings}
    with serving(engine=FOLDER_ENGINE, **options) as process:
        for number in range(1, workers + 1):
            process.said(rf"minserve\[{number}\]: ready: ")
        with httpx.Client(base_url=process.url, timeout=60) as client:
            yield process, client


def api_processes(process: Process) -> list[int]:
    return running_module(process.popen.pid, "service.server.api_processes")


def engine_process(process: Process) -> int:
    (pid,) = running_module(process.popen.pid, "engine.worker")
    return pid


@contextmanager
def clients(process: Process, count: int = MANY) -> Iterator[list[httpx.Client]]:
    """Each with a connection of its own."""
    with ExitStack() as stack:
        yield [
            stack.enter_context(httpx.Client(base_url=process.url, timeout=60))
            for _ in range(count)
        ]


@contextmanager
def streams(process: Process, body: Any, count: int = MANY) -> Iterator[list[Iterator[str]]]:
    """The lines of so many streams at once, the first of each taken."""
    with clients(process, count) as open_clients, ExitStack() as stack:
        yield [stack.enter_context(streaming(client, body)) for client in open_clients]


def series(client: httpx.Client) -> dict[str, float]:
    """Every sample, by its name and labels."""
    text = client.get("/metrics").text
    return {
        f"{sample.name}{sorted(sample.labels.items())}": sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_every_process_serves_and_tells_the_metrics_of_all(tmp_path: Path) -> None:
    with several(tmp_path) as (process, client), clients(process) as others:
        for one in others:
            answer = one.post("/v1/generate", json=SHORT).json()
            assert answer["results"][0]["text"] == "bcd"
        ids = {one.get("/health").headers["x-request-id"] for one in others}
        assert len(ids) == MANY
        seen = [series(one) for one in others]
        requests = "minserve_requests_total[('endpoint', 'generate'), ('outcome', 'ok')]"
        for one in seen:
            assert one[requests] == MANY
            assert one["minserve_generation_tokens_total[]"] == 3 * MANY
            assert one["minserve_e2e_request_latency_seconds_count[]"] == MANY
            assert one["minserve_e2e_request_latency_seconds_bucket[('le', '+Inf')]"] == MANY
            assert one["minserve_state_slots_total[]"] == 4
            assert one["minserve_engine_restarts_total[]"] == 0
        steps = "minserve_step_batch_size_count[]"
        assert {one[steps] for one in seen} == {seen[0][steps]}
        # A round is told to one process alone, though both had a part in it.
        with streams(process, {**ENDLESS, "max_tokens": 200}, 4) as lines:
            for one_stream in lines:
                assert list(one_stream)[-1] == "data: [DONE]"
        now = series(client)
        assert now["minserve_generation_tokens_total[]"] == 3 * MANY + 4 * 200
        sizes = now["minserve_step_batch_size_sum[]"] - seen[0]["minserve_step_batch_size_sum[]"]
        assert sizes == 4 * 200
        process.popen.send_signal(signal.SIGTERM)
        assert process.exit_code() == 0


def _sockets(pid: int) -> int:
    count = 0
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):
            count += str(link.readlink()).startswith("socket:")
    return count


def test_connections_go_to_all_of_them(tmp_path: Path) -> None:
    with several(tmp_path) as (process, _):
        before = {pid: _sockets(pid) for pid in api_processes(process)}
        with clients(process, 64) as many:
            for one in many:
                assert one.get("/health").status_code == 200
            more = [_sockets(pid) - count for pid, count in before.items()]
        assert sum(more) == 64 and min(more) >= 10, more


def test_a_killed_api_process_costs_its_own_connections_alone(tmp_path: Path) -> None:
    with several(tmp_path) as (process, client):
        first, second = api_processes(process)
        with ThreadPoolExecutor(4) as pool, streams(process, ENDLESS, 4) as lines:

            def last_line(one: Iterator[str]) -> str:
                try:
                    return [*one][-1]
                except httpx.TransportError:
                    return "cut"

            before = series(client)  # asked before: what was told must not fall
            ends = [pool.submit(last_line, one) for one in lines]
            os.kill(first, signal.SIGKILL)
            until(lambda: len(api_processes(process)) == 2 and first not in api_processes(process))
            process.said(r"API process \d has ended \(killed by SIGKILL\); starting another")
            with clients(process) as others:
                for one in others:  # also those whose process is just starting
                    until(lambda one=one: one.get("/ready").status_code == 200)
                    assert one.post("/tokenize", json={"prompt": "a"}).status_code == 200
                # What the dead one had in flight is no longer in the engine.
                left = sum(not end.done() for end in ends)
                until(lambda: series(others[0])["minserve_requests_running[]"] == left)
                for one in others:
                    now = series(one)
                    assert now["minserve_state_slots_total[]"] == 4
                    fallen = {
                        name
                        for name, value in before.items()
                        if not name.startswith(GAUGES)
                        if "_total[" in name or "_bucket[" in name or "_count[" in name
                        if now.get(name, 0) < value
                    }
                    assert not fallen
            os.kill(second, signal.SIGKILL)  # ends the streams that are left
            assert {end.result() for end in ends} == {"cut"}
            until(lambda: second not in api_processes(process))
        process.popen.send_signal(signal.SIGTERM)
        assert process.exit_code() == 0


def test_a_killed_engine_fails_the_requests_of_all_and_starts_again(tmp_path: Path) -> None:
    with several(tmp_path, max_slots=MANY) as (process, client):
        with streams(process, ENDLESS) as lines:
            os.kill(engine_process(process), signal.SIGKILL)
            for one in lines:
                *_, last = one
                assert error_of(last)["code"] == "engine_dead"
        until(lambda: restarts(client) == 1)
        with clients(process) as others:
            for one in others:
                until(lambda one=one: one.get("/ready").status_code == 200)
                assert one.post("/v1/generate", json=SHORT).status_code == 200
                assert restarts(one) == 1


@pytest.mark.slow
def test_an_engine_that_dies_for_good_ends_all_with_code_1(tmp_path: Path) -> None:
    with several(tmp_path, engine_restarts=0) as (process, _):
        processes = children(process.popen.pid)
        with streams(process, ENDLESS, 4) as lines:
            os.kill(engine_process(process), signal.SIGKILL)
            for one in lines:
                *_, last = one
                assert error_of(last)["code"] == "engine_dead"
        assert process.exit_code() == 1
        assert not [pid for pid in processes if Path(f"/proc/{pid}").exists()]
        process.said("minserve: error: .*SIGKILL")
        assert not any("Traceback" in line or "starting another" in line for line in process.lines)


@pytest.mark.parametrize("to_all", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_signal_drains_every_process(tmp_path: Path, to_all: bool) -> None:
    with several(tmp_path, max_slots=8) as (process, _):
        with streams(process, {**ENDLESS, "max_tokens": 1000}, 8) as lines:
            if to_all:
                os.killpg(process.popen.pid, signal.SIGTERM)
            else:
                process.popen.send_signal(signal.SIGTERM)
            process.said("minserve: shutting down")
            process.popen.send_signal(signal.SIGTERM)
            with clients(process, 4) as late:
                for one in late:
                    until(lambda one=one: one.get("/ready").status_code == 503)
            for one in lines:
                assert [*one][-1] == "data: [DONE]"
        assert process.exit_code() == 0
        assert not any("Traceback" in line or "error" in line for line in process.lines)


@pytest.mark.parametrize(
    "sig", [pytest.param(signal.SIGINT, marks=pytest.mark.slow), signal.SIGTERM]
)
def test_a_second_signal_does_not_wait(tmp_path: Path, sig: int) -> None:
    with several(tmp_path) as (process, _):
        with streams(process, ENDLESS, 4) as lines:
            process.popen.send_signal(sig)
            process.said(r"minserve\[1\]: shutting down")
            process.said(r"minserve\[2\]: shutting down")
            time.sleep(ECHO_SECONDS)
            process.popen.send_signal(sig)
            for one in lines:
                *_, last, done = one
                assert '"finish_reason":"abort"' in last and done == "data: [DONE]"
        assert process.exit_code() == 0


@pytest.mark.slow
def test_an_engine_that_dies_during_a_drain_is_not_started_again(tmp_path: Path) -> None:
    with several(tmp_path) as (process, _):
        with streams(process, ENDLESS, 4) as lines:
            process.popen.send_signal(signal.SIGTERM)
            process.said(r"minserve\[1\]: shutting down")
            process.said(r"minserve\[2\]: shutting down")
            os.kill(engine_process(process), signal.SIGKILL)
            for one in lines:
                *_, last = one
                assert error_of(last)["code"] == "engine_dead"
        assert process.exit_code() == 1
        assert not any("starting another" in line for line in process.lines)


@pytest.mark.slow
def test_an_api_process_that_dies_during_a_drain_is_not_started_again(tmp_path: Path) -> None:
    with several(tmp_path) as (process, _):
        with streams(process, {**ENDLESS, "max_tokens": 500}, 4) as lines:
            process.popen.send_signal(signal.SIGTERM)
            process.said(r"minserve\[1\]: shutting down")
            process.said(r"minserve\[2\]: shutting down")
            os.kill(api_processes(process)[0], signal.SIGKILL)
            ended = 0
            for one in lines:
                with suppress(httpx.TransportError):
                    ended += [*one][-1] == "data: [DONE]"
        assert process.exit_code() == 0
        assert not any("starting another" in line for line in process.lines)


def test_a_reload_reaches_every_process(tmp_path: Path) -> None:
    (tmp_path / "two").mkdir()
    save_byte_tokenizer(tmp_path / "two")
    with several(tmp_path, admin_key="k" * 32, max_slots=8) as (process, client):
        old = engine_process(process)
        with streams(process, {**ENDLESS, "max_tokens": 1000}, 8) as lines:
            assert reload(client, tmp_path / "two").status_code == 200
            with clients(process) as others:
                for one in others:
                    assert one.post("/v1/generate", json=SHORT).json()["model"] == "two"
            for one in lines:
                assert [*one][-1] == "data: [DONE]"
        until(lambda: old not in children(process.popen.pid))
        os.kill(api_processes(process)[0], signal.SIGKILL)  # the next one has the new model too
        with clients(process) as others:
            for one in others:
                until(lambda one=one: one.get("/ready").status_code == 200)
                assert one.post("/v1/generate", json=SHORT).json()["model"] == "two"
        process.popen.send_signal(signal.SIGTERM)
        assert process.exit_code() == 0


@pytest.mark.slow
def test_api_processes_that_die_during_a_reload_do_not_hold_it_up(tmp_path: Path) -> None:
    (tmp_path / "two").mkdir()
    save_byte_tokenizer(tmp_path / "two")
    with several(tmp_path, admin_key="k" * 32) as (process, client):
        (tmp_path / "two" / "slow").write_text("1.5")
        waiting = later(client, tmp_path / "two")
        until(lambda: len(running_module(process.popen.pid, "engine.worker")) == 2)
        for pid in api_processes(process):
            os.kill(pid, signal.SIGKILL)
        with pytest.raises(httpx.TransportError):
            waiting.result()
        until(lambda: len(running_module(process.popen.pid, "engine.worker")) == 1)
        with clients(process) as others:
            for one in others:
                until(lambda one=one: one.get("/ready").status_code == 200)
                assert one.post("/v1/generate", json=SHORT).json()["model"] == "two"


@pytest.mark.slow
def test_the_engines_queue_is_one_for_all(tmp_path: Path) -> None:
    """However many find it empty at the same moment."""
    with several(tmp_path, max_slots=2, max_waiting=1) as (process, client):
        over = threading.Barrier(MANY)

        def ask(one: httpx.Client) -> tuple[int, str]:
            over.wait()
            answer = one.post("/v1/generate", json={**ENDLESS, "timeout": 4})
            return answer.status_code, answer.headers.get("retry-after", "")

        with clients(process) as many, ThreadPoolExecutor(MANY) as pool:
            for one in many:
                one.get("/health")
            answers = list(pool.map(ask, many))
        taken = [status for status, _ in answers if status == 200]
        refused = [retry for status, retry in answers if status == 429]
        assert (len(taken), len(refused)) == (3, MANY - 3)
        assert all(int(retry) >= 1 for retry in refused)
        until(lambda: series(client)["minserve_requests_running[]"] == 0)


@pytest.mark.slow
def test_an_api_process_that_hangs_is_killed(tmp_path: Path) -> None:
    with several(tmp_path, hang_timeout=3) as (process, _):
        first, second = api_processes(process)
        os.kill(first, signal.SIGSTOP)
        process.said("API process did not answer for 3 s")
        until(lambda: len(api_processes(process)) == 2 and first not in api_processes(process))
        with clients(process) as others:
            for one in others:  # its connections waited for the next one
                until(lambda one=one: one.get("/ready").status_code == 200)
        assert second in api_processes(process)


def test_nobody_outlives_the_host(tmp_path: Path) -> None:
    with several(tmp_path) as (process, _):
        everybody = children(process.popen.pid)
        assert len(everybody) == 3
        process.popen.kill()
        process.popen.wait()
        until(lambda: not [pid for pid in everybody if Path(f"/proc/{pid}").exists()])


@pytest.mark.parametrize("killed", [pytest.param(False, marks=pytest.mark.slow), True])
def test_who_checks_grammars_ends_with_its_api_process(tmp_path: Path, killed: bool) -> None:
    body = {"prompts": ["a"], "structured_outputs": {"choice": ["b"]}}
    with several(tmp_path) as (process, _):
        api = api_processes(process)
        with clients(process) as connections:
            for one in connections:
                answer = one.post("/v1/generate", json=body)
                assert answer.status_code == 200, answer.text
        checks = {pid: child for pid in api for child in children(pid)}
        assert sorted(checks) == sorted(api)
        if killed:
            os.kill(api[0], signal.SIGKILL)
            until(lambda: not Path(f"/proc/{checks[api[0]]}").exists())
            until(lambda: len(api_processes(process)) == 2)
        process.popen.send_signal(signal.SIGTERM)
        assert process.exit_code() == 0
        until(lambda: not [pid for pid in checks.values() if Path(f"/proc/{pid}").exists()])


def test_a_model_that_cannot_be_loaded_is_an_error_and_code_2(tmp_path: Path) -> None:
    (tmp_path / "broken").touch()
    with serving(engine=FOLDER_ENGINE, model=str(tmp_path), api_workers=2) as process:
        assert process.exit_code() == 2
        process.said("minserve: error: .*cannot be used")
        assert not any("Traceback" in line for line in process.lines)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"api_keys_file": "/no/such/file"}, "/no/such/file cannot be read"),
        ({"traces": "otlp"}, "--traces otlp: .*max_queue_size"),
    ],
)
def test_a_mistake_in_the_settings_is_told_before_any_process_starts(
    settings: dict[str, str], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "-1")
    with serving(engine=FOLDER_ENGINE, api_workers=2, **settings) as process:
        assert process.exit_code() != 0
        process.said(f"ConfigError: {says}")
        assert not any(line.startswith("minserve") for line in process.lines)


@pytest.mark.slow
def test_a_port_in_use_is_one_line_and_code_2(tmp_path: Path) -> None:
    """Although the other one shares its port among processes of its own."""
    with several(tmp_path) as (process, _):
        port = int(process.url.rsplit(":", 1)[1])
        with serving(engine=FOLDER_ENGINE, port=port, api_workers=2) as other:
            assert other.exit_code() == 2
            (line,) = other.lines
            assert f"127.0.0.1:{port}" in line and "in use" in line
