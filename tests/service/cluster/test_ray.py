"""Two replicas on a real Ray: one conversation goes on through the death of either of them."""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import httpx
import pytest

from tests import redis_server
from tests.cli.conftest import ROOT, environment
from tests.redis_server import RedisServer, free_port

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="ray is not installed"),
    pytest.mark.skipif(bool(redis_server.MISSING), reason=redis_server.MISSING),
]
START_SECONDS, BACK_SECONDS = 240.0, 120.0
REPLICA = "ray::ServeReplica:minserve"
ENGINE = "engine.worker"


class Cluster:
    """`minserve cluster` with two replicas, and what it has written to its terminal."""

    def __init__(self, store: str, *options: str) -> None:
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        command = [
            "cluster", "--replicas", "2", "--cpus", "0.5", "--model", "shakespeare-mingru",
            "--device", "cpu", "--threads", "1", "--deterministic", "--port", str(port),
            "--state-store", store, *options,
        ]  # fmt: skip
        self.process = subprocess.Popen(
            [sys.executable, "-m", "service.cli", *command],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT,
            env=environment(),
        )  # fmt: skip
        self.lines: list[str] = []
        threading.Thread(target=self._read, daemon=True).start()
        until = time.monotonic() + START_SECONDS
        while not any("replicas are ready" in line for line in self.lines):
            alive = self.process.poll() is None and time.monotonic() < until
            assert alive, "".join(self.lines[-50:])
            time.sleep(0.2)

    def _read(self) -> None:
        assert self.process.stdout is not None
        self.lines.extend(self.process.stdout)

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(timeout=90)
        finally:
            self.process.kill()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    redis = RedisServer(tmp_path_factory.mktemp("redis")).start()
    running = Cluster(redis.url)
    yield running
    code = running.stop()
    redis.stop()
    assert code == 0, "".join(running.lines[-50:])


def pids(victim: str) -> set[int]:
    """The processes of the replicas, or those of their engines."""
    replicas = _pgrep("-f", f"^{REPLICA}")
    if victim == REPLICA:
        return replicas
    return {engine for one in replicas for engine in _pgrep("-f", "-P", str(one), ENGINE)}


def _pgrep(*arguments: str) -> set[int]:
    found = subprocess.run(["pgrep", *arguments], capture_output=True)
    return {int(one) for one in found.stdout.split()}


def turn(url: str, session: str, number: int, prompt: str = " and") -> dict[str, Any]:
    """A careful client: it asks again with the same number until it knows."""
    until = time.monotonic() + BACK_SECONDS
    while True:
        told = "no answer"
        with suppress(httpx.TransportError):
            response = httpx.post(
                f"{url}/v1/completions",
                headers={"x-session-id": session},
                json={
                    "prompt": prompt, "session_id": session, "turn": number, "max_tokens": 8,
                    "temperature": 0,
                },
                timeout=30,
            )  # fmt: skip
            told = response.text
            if response.status_code == 200:
                choice: dict[str, Any] = response.json()["choices"][0]
                return choice
            with suppress(ValueError):
                if response.json()["error"]["code"] == "turn_done":
                    return {}
        assert time.monotonic() < until, told
        time.sleep(0.2)


def tokens_of(url: str, session: str) -> tuple[int, int]:
    state = httpx.get(f"{url}/v1/states/session:{session}", timeout=30).json()
    return state["turns"], state["tokens"]


@pytest.mark.parametrize("victim", [REPLICA, ENGINE])
def test_a_conversation_goes_on_through_a_kill(cluster: Cluster, victim: str) -> None:
    sessions = [f"{victim[-6:]}-{number}" for number in range(4)]
    for session in sessions:
        turn(cluster.url, session, 1, "ROMEO:")
    until = time.monotonic() + BACK_SECONDS
    while len(doomed := pids(victim)) != 2:  # the one before may just have been replaced
        assert time.monotonic() < until
        time.sleep(0.5)
    os.kill(min(doomed), signal.SIGKILL)
    for number in range(2, 6):
        for session in sessions:
            turn(cluster.url, session, number)
    for session in sessions:
        assert tokens_of(cluster.url, session) == (5, 5 * 8 + 6 + 4 * 4)
    until = time.monotonic() + BACK_SECONDS
    while not (len(pids(victim)) == 2 and pids(victim) != doomed):
        assert time.monotonic() < until, "it is not replaced"
        time.sleep(0.5)
    turn(cluster.url, sessions[0], 6)


def test_a_session_stays_at_one_replica_and_streams(cluster: Cluster) -> None:
    body = {"prompt": "ROMEO:", "max_tokens": 40, "stream": True, "session_id": "streamed"}
    with httpx.stream("POST", f"{cluster.url}/v1/completions", json=body, timeout=60) as answer:
        lines = [line for line in answer.iter_lines() if line.startswith("data: ")]
    assert lines[-1] == "data: [DONE]" and len(lines) > 20

    def served() -> dict[str, float]:
        time.sleep(4.5)  # until both replicas have given their metrics to each other
        labels = r'replica="(\w+)",endpoint="completions",outcome="ok"'
        sample = r"^minserve_requests_total\{" + labels + r"\} (\S+)"
        until = time.monotonic() + BACK_SECONDS
        while True:  # one that was killed by the test before is told for some seconds more
            text = httpx.get(f"{cluster.url}/metrics", timeout=20).text
            found = {name: float(count) for name, count in re.findall(sample, text, re.M)}
            if len(found) == 2:
                return found
            assert time.monotonic() < until, found
            time.sleep(1.0)

    before = served()
    for number in range(1, 9):
        turn(cluster.url, "sticky", number)
    after = served()
    more = sorted(after[name] - before.get(name, 0) for name in after)
    assert more == [0.0, 8.0]
    for number in range(40):
        turn(cluster.url, f"other-{number}", 1)
    spread = served()
    assert all(spread[name] > after[name] for name in after), "other sessions use both"


def test_errors_are_the_servers_own(cluster: Cluster) -> None:
    missing = httpx.get(f"{cluster.url}/v1/states/none")
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "state_not_found")
    bad = httpx.post(f"{cluster.url}/v1/completions", json={"prompt": "x", "nonsense": 1})
    assert bad.status_code == 400 and "nonsense" in bad.json()["error"]["message"]
    assert httpx.get(f"{cluster.url}/version").status_code == 200
