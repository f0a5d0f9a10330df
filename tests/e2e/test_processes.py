"""Real models behind two API processes: one takes the other's place, and comes back when killed."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import httpx
import pytest

from tests.e2e.conftest import SMALLEST, START_SECONDS, Server
from tests.service.process import children, running_module

KEY = "an-admin-key-of-the-tests"
PROMPT: dict[str, Any] = {"prompts": ["ROMEO:"], "max_tokens": 24, "temperature": 0}


def _engine(server: Server) -> int:
    (pid,) = running_module(server.process.pid, "engine.worker")
    return pid


def _text(client: httpx.Client) -> tuple[str, str]:
    """Which model answers, and what."""
    answer = client.post("/v1/generate", json=PROMPT).json()
    return answer["model"], answer["results"][0]["text"]


def _await_status(client: httpx.Client, status: int) -> None:
    deadline = time.monotonic() + START_SECONDS
    while client.get("/ready").status_code != status:
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.slow
def test_a_reload_and_a_death(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINSERVE_ADMIN_KEY", KEY)
    server = Server("--device", "cpu", "--threads", "1", "--api-workers", "2", "--max-slots", "8")
    try:
        with httpx.Client(base_url=server.url, timeout=START_SECONDS) as client:
            _await_status(client, 200)  # of the process that this connection has come to
            name, first = _text(client)
            assert name == SMALLEST and first
            answer = client.post(
                "/admin/reload", json={"model": "shakespeare-minlstm"}, headers={"x-api-key": KEY}
            )
            assert answer.status_code == 200, answer.text
            name, second = _text(client)
            assert name == "shakespeare-minlstm" and second not in ("", first)
            deadline = time.monotonic() + START_SECONDS
            while len(children(server.process.pid)) > 3:  # the old engine ends
                assert time.monotonic() < deadline
                time.sleep(0.05)
            killed = _engine(server)
            os.kill(killed, signal.SIGKILL)
            _await_status(client, 503)  # it is noticed
            _await_status(client, 200)
            assert _text(client) == (name, second)
            assert _engine(server) != killed
            assert "\nminserve_engine_restarts_total 1.0\n" in client.get("/metrics").text
    finally:
        assert server.stop() == 0
