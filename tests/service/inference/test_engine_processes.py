"""Several engines in processes of their own: what their deaths, a reload and the end cost."""

from __future__ import annotations

import os
import re
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.service.inference.test_restart import ENDLESS, SHORT, error_of, restarts, starting, until
from tests.service.process import Process, running_module
from tests.service.routes.test_reload import KEY, reload
from tests.service.server.test_api_workers import MANY, several, streams

LONG = {**ENDLESS, "max_tokens": 1500}


@contextmanager
def two_engines(
    folder: Path, workers: int = 1, **settings: Any
) -> Iterator[tuple[Process, httpx.Client]]:
    if workers == 1:
        with starting(folder, engines=2, **settings) as served:
            yield served
    else:
        with several(folder, workers, engines=2, **settings) as served:
            yield served


def engine_processes(process: Process) -> list[int]:
    return running_module(process.popen.pid, "engine.worker")


def serving(client: httpx.Client) -> int:
    (value,) = re.findall(r"^minserve_engines_serving (\d+)", client.get("/metrics").text, re.M)
    return int(value)


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_one_that_is_killed_costs_its_own_requests_alone(tmp_path: Path, workers: int) -> None:
    with two_engines(tmp_path, workers) as (process, client):
        engines = engine_processes(process)
        assert len(engines) == 2
        with streams(process, LONG, 8) as lines:
            os.kill(engines[0], signal.SIGKILL)
            ends = [list(one)[-1] for one in lines]
        lost = [end for end in ends if end != "data: [DONE]"]
        assert 0 < len(lost) < 8
        assert {error_of(end)["code"] for end in lost} == {"engine_dead"}
        assert client.get("/health").json() == {"status": "ready"}
        for _ in range(MANY):
            assert client.post("/v1/generate", json=SHORT).status_code == 200
        until(lambda: serving(client) == 2 and restarts(client) == 1)
        assert engines[1] in engine_processes(process)
        ids = [f"id-{number}" for number in range(8)]
        for id in ids:
            answer = client.post("/v1/states", json={"prompt": "abc", "id": id})
            assert (answer.status_code, answer.json()["id"]) == (200, id)
        listed = client.get("/v1/states").json()["data"]
        assert [state["id"] for state in listed] == ids
        last = engine_processes(process)
        process.popen.send_signal(signal.SIGTERM)
        assert process.exit_code() == 0
        assert not any("Traceback" in line for line in process.lines)
        until(lambda: not any(Path(f"/proc/{engine}").exists() for engine in last))


def test_the_last_one_is_the_end(tmp_path: Path) -> None:
    """What may not be started again is missed, until a reload."""
    with two_engines(tmp_path, engine_restarts=0, admin_key=KEY) as (process, client):
        first, second = engine_processes(process)
        os.kill(first, signal.SIGKILL)
        process.said("error: engine . of 2: .*SIGKILL.*; the others go on without it")
        until(lambda: serving(client) == 1)
        for _ in range(MANY):
            assert client.post("/v1/generate", json=SHORT).status_code == 200
        assert reload(client).status_code == 200
        until(lambda: serving(client) == 2)
        until(lambda: second not in engine_processes(process))
        for engine in engine_processes(process):
            os.kill(engine, signal.SIGKILL)
        assert process.exit_code() == 1


def test_a_reload_drops_no_request(tmp_path: Path) -> None:
    with two_engines(tmp_path, admin_key=KEY) as (process, client):
        engines = engine_processes(process)
        ending, statuses = threading.Event(), []

        def ask() -> None:
            with httpx.Client(base_url=process.url, timeout=60) as mine:
                while not ending.is_set():
                    statuses.append(mine.post("/v1/generate", json=SHORT).status_code)

        threads = [threading.Thread(target=ask) for _ in range(4)]
        for thread in threads:
            thread.start()
        with streams(process, LONG, 4) as lines:
            assert reload(client).status_code == 200
            assert [list(one)[-1] for one in lines] == ["data: [DONE]"] * 4
        until(lambda: not set(engines) & set(engine_processes(process)))
        ending.set()
        for thread in threads:
            thread.join()
        assert set(statuses) == {200} and len(statuses) > 8
        assert serving(client) == 2 and len(engine_processes(process)) == 2
