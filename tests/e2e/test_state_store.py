"""A conversation that changes servers at every turn and survives a kill -9."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests import redis_server
from tests.e2e.conftest import Server
from tests.redis_server import RedisServer

OPTIONS = ("--device", "cpu", "--threads", "1", "--deterministic")
TURNS = ["ROMEO:\nBut, soft!", " what light", " through yonder window", " breaks?", "\n", " It is"]


@pytest.fixture(params=["redis", "folder"])
def servers(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[list[Server]]:
    """Two servers on one store."""
    redis = None
    url = f"file://{tmp_path}/states"
    if request.param == "redis":
        if redis_server.MISSING:
            pytest.skip(redis_server.MISSING)
        redis = RedisServer(tmp_path / "redis").start()
        url = redis.url
    started = [Server(*OPTIONS, "--state-store", url) for _ in range(2)]
    yield started
    for server in started:
        with suppress(ProcessLookupError):
            server.process.kill()
    if redis is not None:
        redis.stop()


def say(url: str, prompt: str, status: int = 200, **more: Any) -> Any:
    body = {"prompt": prompt, "max_tokens": 12, "temperature": 0, "session_id": "emma", **more}
    response = httpx.post(f"{url}/v1/completions", json=body, timeout=60)
    assert response.status_code == status, response.text
    return response.json()["choices"][0] if status == 200 else response.json()["error"]


def test_a_conversation_changes_servers_and_survives_a_kill(servers: list[Server]) -> None:
    first, second = servers
    whole = ""
    for at, prompt in enumerate(TURNS[:4]):
        answer = say(servers[at % 2].url, prompt)
        assert answer["state"]["stored"]
        whole += prompt + answer["text"]
        assert answer["state"]["tokens"] == len(whole)

    def die_under_way() -> None:
        with suppress(httpx.TransportError):
            say(first.url, " a turn that never ends", max_tokens=100_000, ignore_eos=True)

    dying = threading.Thread(target=die_under_way)
    dying.start()
    while not re.search(
        r"^minserve_requests_running\S* 1", httpx.get(f"{first.url}/metrics").text, re.M
    ):
        assert dying.is_alive()
        time.sleep(0.02)
    first.process.kill()  # kill -9
    dying.join()
    for prompt in TURNS[4:]:  # waits for the dead server's lock to end, if need be
        answer = say(second.url, prompt)
        whole += prompt + answer["text"]
        assert answer["state"]["tokens"] == len(whole)

    alone = httpx.post(
        f"{second.url}/v1/completions",
        json={"prompt": whole[:-12], "max_tokens": 12, "temperature": 0},
        timeout=60,
    ).json()["choices"][0]
    assert alone["text"] == whole[-12:], "as if it had been one text at one server"
