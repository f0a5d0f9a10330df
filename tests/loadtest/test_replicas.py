"""loadtest.replicas: its careful client, against a server that is no replica; its figures."""

from __future__ import annotations

import asyncio
import math
import os
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from loadtest.replicas import faults, pinning, proxies
from loadtest.replicas.faults import Refused, Seen, carry_out, texts_of
from loadtest.replicas.proxies import measure, read
from loadtest.subject import Subject

TURNS = 3


def test_what_one_server_does_is_right_and_anything_else_is_reported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(faults, "TEXTS", 2)
    with Subject(deterministic=True) as server:
        asyncio.run(server.started())
        expected = texts_of(server.url, TURNS)
        assert len(expected) == 2 and all(len(one) == TURNS for one in expected)
        seen = Seen()
        carry_out(server.url, [0, 1, 2], TURNS, expected, seen)
        assert (seen.turns, seen.wrong, dict(seen.retries)) == (9, [], {})
        again = Seen()
        carry_out(server.url, [1], TURNS, expected, again)
        assert (again.turns, again.done_before) == (3, 3), "each had been carried out"
        bad = Seen()
        carry_out(server.url, [4], TURNS, [["other"] * TURNS] * 2, bad)
        assert len(bad.wrong) == TURNS
        with (
            httpx.Client(base_url=server.url) as client,
            pytest.raises(Refused, match="turn_ahead"),
        ):
            faults._ask(client, "unknown", 0, 7)


def test_figures_are_read_from_the_load_tests_json() -> None:
    summary = {
        "requests_per_second": 5.0,
        "tokens_per_second": 7.0,
        "latency_ms": {"ttft": {"p50": 3.0}},
        "outcomes": {"ok": 10, "503": 2},
    }
    assert read(summary) == {
        "requests_per_second": 5.0, "tokens_per_second": 7.0, "ttft_p50_ms": 3.0, "errors": 2,
    }  # fmt: skip
    assert math.isnan(read({**summary, "latency_ms": {}})["ttft_p50_ms"])


def test_several_clients_rates_are_summed() -> None:
    with Subject() as one, Subject() as other:
        for server in (one, other):
            asyncio.run(server.started())
        cores = os.sched_getaffinity(0)
        found = measure([one.url, other.url], 1.0, users=4, clients=1, cores=cores)
        answered = [asyncio.run(server.held()) for server in (one, other)]
    assert found["errors"] == 0 and found["requests_per_second"] > 0
    assert found["tokens_per_second"] > 0 and found["ttft_p50_ms"] > 0
    assert all(held["requests_running"] == 0 for held in answered)


def test_every_thread_of_a_process_is_pinned() -> None:
    code = (
        "import threading,time;threading.Thread(target=time.sleep,args=(60,),daemon=True).start()"
    )
    core = min(os.sched_getaffinity(0))
    with subprocess.Popen(
        [sys.executable, "-c", f"{code};print(flush=True);time.sleep(60)"], stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        pinning.pin([process.pid, 2**30], {core})  # the second has ended
        threads = os.listdir(f"/proc/{process.pid}/task")
        assert len(threads) == 2
        assert all(os.sched_getaffinity(int(thread)) == {core} for thread in threads)
        process.kill()


def test_parts_are_apart_or_the_number_of_cores_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))
    cores = pinning.apart()
    parts = [set(part) for part in (cores.servers, cores.proxies, cores.clients)]
    assert [len(part) for part in parts] == [8, 2, 6] and len(set.union(*parts)) == 16
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(4)))
    with pytest.raises(RuntimeError, match="needs 8 cores or more, and there are 4"):
        pinning.apart()


def test_a_router_that_cannot_run_says_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    with pytest.raises(RuntimeError, match="not installed"), proxies.router(["http://127.0.0.1:1"]):
        pass
    broken = tmp_path / proxies.ROUTER
    broken.write_text("#!/bin/sh\nexit 1\n")
    broken.chmod(0o755)
    with pytest.raises(RuntimeError, match="not become"), proxies.router(["http://127.0.0.1:1"]):
        pass
