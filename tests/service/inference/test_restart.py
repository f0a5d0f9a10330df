"""An engine that dies, breaks or hangs is started again; nobody waits for ever."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from engine.supervisor.engine_process import LONGEST_RESTART_WAIT, RestartPolicy
from tests.service.harness import save_byte_tokenizer
from tests.service.process import Process, children, serving

ENDLESS = {"prompts": ["a"], "max_tokens": 10**6, "ignore_eos": True, "temperature": 0}
SHORT = {**ENDLESS, "max_tokens": 3}


@contextmanager
def starting(folder: Path, **settings: Any) -> Iterator[tuple[Process, httpx.Client]]:
    """A server of the model in `folder`, whose files say how the engine fares."""
    save_byte_tokenizer(folder)
    options = {"model": str(folder), **settings}
    with serving(engine="tests.engine.fake:folder_engine", **options) as process:
        process.said("ready: ")
        with httpx.Client(base_url=process.url, timeout=60) as client:
            yield process, client


def until(condition: Callable[[], Any], seconds: float = 30) -> Any:
    """Waits for a condition that must come true, and returns what it gave."""
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, "the condition never came true"
        time.sleep(0.05)
    return found


def is_ready(client: httpx.Client) -> bool:
    return client.get("/ready").status_code == 200


def restarts(client: httpx.Client) -> float:
    """What the metrics say of them."""
    text = client.get("/metrics").text
    (value,) = re.findall(r"^minserve_engine_restarts_total (.*)$", text, re.MULTILINE)
    return float(value)


def error_of(frame: str) -> Any:
    """The error that ends a stream."""
    assert frame.startswith("data: ")
    return json.loads(frame[6:])["error"]


@contextmanager
def streaming(client: httpx.Client, body: Any = ENDLESS) -> Iterator[Iterator[str]]:
    """The lines of a stream whose first has come."""
    with client.stream("POST", "/v1/generate", json={**body, "stream": True}) as response:
        lines = (line for line in response.iter_lines() if line)
        next(lines)
        yield lines


def test_a_killed_engine_is_started_again(tmp_path: Path) -> None:
    with starting(tmp_path) as (process, client), streaming(client) as lines:
        (worker,) = children(process.popen.pid)
        (tmp_path / "slow").write_text("60")
        os.kill(worker, signal.SIGKILL)
        *_, last = lines
        error = error_of(last)
        assert error["code"] == "engine_dead" and "SIGKILL" in error["message"]
        refused = client.get("/ready")
        assert refused.status_code == 503
        assert int(refused.headers["retry-after"]) >= 1
        assert "started again" in refused.json()["error"]["message"]
        assert client.get("/health").json() == {"status": "restarting"}
        refused = client.post("/v1/generate", json=SHORT)
        assert refused.status_code == 503 and "retry-after" in refused.headers
        assert refused.json()["error"]["code"] == "engine_loading"
        (tmp_path / "slow").unlink()
        until(lambda: is_ready(client))
        (result,) = client.post("/v1/generate", json=SHORT).json()["results"]
        assert result["text"] == "bcd"
        assert restarts(client) == 1
        assert client.get("/health").json() == {"status": "ready"}
        assert worker not in children(process.popen.pid)
        process.popen.send_signal(signal.SIGTERM)
        assert process.exit_code() == 0
        assert not any("Traceback" in line for line in process.lines)


def test_what_was_in_flight_is_told_when_to_come_again(tmp_path: Path) -> None:
    """As whoever comes then: in the time that the model took to load."""
    (tmp_path / "slow").write_text("2.2")
    with starting(tmp_path) as (process, client), ThreadPoolExecutor(1) as pool:
        with streaming(client) as lines:
            lost = pool.submit(httpx.post, f"{process.url}/v1/generate", json=ENDLESS, timeout=60)
            until(lambda: client.get("/metrics").text.count("minserve_requests_running 2.0"))
            (worker,) = children(process.popen.pid)
            os.kill(worker, signal.SIGKILL)
            assert error_of(list(lines)[-1])["code"] == "engine_dead"
        answer = lost.result()
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_dead")
        assert int(answer.headers["retry-after"]) >= 3


@pytest.mark.slow
def test_a_cuda_error_fails_every_request_and_starts_another_engine(tmp_path: Path) -> None:
    with starting(tmp_path) as (process, client), streaming(client) as lines:
        (worker,) = children(process.popen.pid)
        (tmp_path / "fatal").touch()
        *_, last = lines
        assert "CUDA error" in error_of(last)["message"]
        (tmp_path / "fatal").unlink()
        until(lambda: restarts(client) == 1 and is_ready(client))
        assert worker not in children(process.popen.pid)
        assert client.post("/v1/generate", json=SHORT).status_code == 200


def test_when_the_tries_are_over_the_process_ends_with_code_1(tmp_path: Path) -> None:
    with starting(tmp_path, engine_restarts=1) as (process, client):
        (first,) = children(process.popen.pid)
        os.kill(first, signal.SIGKILL)
        second = until(lambda: [pid for pid in children(process.popen.pid) if pid != first])[0]
        until(lambda: is_ready(client))
        os.kill(second, signal.SIGKILL)
        assert process.exit_code() == 1
        process.said("error: .*SIGKILL.*after 1 restart")


@pytest.mark.slow
def test_a_model_that_cannot_be_loaded_again_uses_tries_up(tmp_path: Path) -> None:
    with starting(tmp_path, engine_restarts=2) as (process, _):
        (tmp_path / "broken").touch()
        os.kill(children(process.popen.pid)[0], signal.SIGKILL)
        assert process.exit_code() == 1  # not 2: it has served
        process.said("error: .*cannot be used")
        assert sum("starting another" in line for line in process.lines) == 2


def test_an_engine_that_hangs_is_killed_and_started_again(tmp_path: Path) -> None:
    with (
        starting(tmp_path, hang_timeout=2, ping_timeout=0.2) as (process, client),
        streaming(client) as lines,
    ):
        (worker,) = children(process.popen.pid)
        os.kill(worker, signal.SIGSTOP)
        until(lambda: client.get("/health").status_code == 503)
        *_, last = lines
        assert "did not answer for 2 s" in error_of(last)["message"]
        until(lambda: is_ready(client))
        assert worker not in children(process.popen.pid)
        assert client.post("/v1/generate", json=SHORT).status_code == 200


@pytest.mark.slow
def test_an_engine_that_hangs_for_a_while_goes_on(tmp_path: Path) -> None:
    with starting(tmp_path, ping_timeout=0.2) as (process, client):
        (worker,) = children(process.popen.pid)
        with streaming(client, {**ENDLESS, "max_tokens": 500}) as lines:
            os.kill(worker, signal.SIGSTOP)
            until(lambda: client.get("/health").status_code == 503)
            os.kill(worker, signal.SIGCONT)
            rest = list(lines)
        assert (len(rest), rest[-1]) == (500, "data: [DONE]")
        assert client.get("/health").status_code == 200
        assert children(process.popen.pid) == [worker]


@pytest.mark.slow
def test_a_signal_while_an_engine_is_started_again_ends_at_once(tmp_path: Path) -> None:
    with starting(tmp_path) as (process, client):
        (tmp_path / "slow").write_text("60")
        os.kill(children(process.popen.pid)[0], signal.SIGKILL)
        until(lambda: client.get("/health").json().get("status") == "restarting")
        process.popen.send_signal(signal.SIGTERM)
        assert process.popen.wait(20) == 0
        assert not any("Traceback" in line for line in process.lines)


def test_an_engine_that_dies_during_a_drain_is_not_started_again(tmp_path: Path) -> None:
    with starting(tmp_path) as (process, client), streaming(client) as lines:
        process.popen.send_signal(signal.SIGTERM)
        process.said("shutting down")
        os.kill(children(process.popen.pid)[0], signal.SIGKILL)
        *_, last = lines
        assert error_of(last)["code"] == "engine_dead"
        assert process.exit_code() == 1
        assert not any("starting another" in line for line in process.lines)


@pytest.mark.slow
def test_an_engine_that_dies_in_its_first_load_is_the_end(tmp_path: Path) -> None:
    (tmp_path / "slow").write_text("60")
    options = {"engine": "tests.engine.fake:folder_engine", "model": str(tmp_path)}
    with serving(**options) as process:
        worker = until(lambda: children(process.popen.pid))[0]
        assert httpx.get(f"{process.url}/health").json() == {"status": "loading"}
        os.kill(worker, signal.SIGKILL)
        assert process.exit_code() == 1
        process.said("error: .*SIGKILL")


def test_a_load_without_end_is_the_end(tmp_path: Path) -> None:
    (tmp_path / "slow").write_text("60")
    options = {"engine": "tests.engine.fake:folder_engine", "model": str(tmp_path)}
    with serving(load_timeout=0.5, **options) as process:
        assert process.exit_code() == 1
        process.said(r"error: the model did not load within 0.5 s \(load_timeout\)")


def test_tries_are_counted_within_the_window() -> None:
    restarts = RestartPolicy(most=3, window=100)
    assert [restarts.wait(now) for now in (0, 10, 20, 30)] == [0, 1, 2, None]
    assert restarts.recent == restarts.total == 3
    assert restarts.wait(100.5) == 2  # the first has left the window
    assert restarts.wait(100.6) is None
    assert restarts.total == 4
    assert RestartPolicy(most=0, window=100).wait(0) is None


@pytest.mark.parametrize("most", [6, 40])
def test_waits_grow_up_to_a_bound(most: int) -> None:
    restarts = RestartPolicy(most, window=1e9)
    waits = [restarts.wait(0) for _ in range(most)]
    assert waits[:6] == [0, 1, 2, 4, 8, 16]
    assert max(wait for wait in waits if wait is not None) <= LONGEST_RESTART_WAIT
