"""Connections that await another request: for how long, and what they must not hold up."""

from __future__ import annotations

import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from pydantic import ValidationError

from service.http import uvicorn_protocol
from service.settings import Settings
from tests.service.harness import fake_runner, save_byte_tokenizer
from tests.service.live import address, listening
from tests.service.process import serving

READY = b"GET /ready HTTP/1.1\r\nhost: here\r\n\r\n"


@contextmanager
def connected(url: str) -> Iterator[socket.socket]:
    with socket.create_connection(address(url), timeout=30) as client:
        yield client


def ask(client: socket.socket) -> bytes:
    """What is answered to a request; nothing where the connection is closed."""
    client.sendall(READY)
    answer = b""
    while not answer.endswith(b"}"):
        more = client.recv(2**16)
        if not more:
            break
        answer += more
    return answer


def test_idle_connections_stay_open_longer_than_proxies_keep_them() -> None:
    assert Settings().keep_alive_timeout == 75  # nginx keeps those to upstreams for 60 s
    for wrong in (0, -1):
        with pytest.raises(ValidationError):
            Settings(keep_alive_timeout=wrong)


def test_they_are_closed_when_their_time_is_over() -> None:
    with serving(keep_alive_timeout=0.2) as process:
        process.said("ready: fake")
        with connected(process.url) as client:
            assert ask(client).startswith(b"HTTP/1.1 200")
            assert client.recv(1) == b""


@pytest.mark.parametrize("api_workers", [1, 2])
def test_they_hold_no_drain_up(api_workers: int) -> None:
    """Those that have asked, and those that have not yet."""
    with serving(keep_alive_timeout=3600, api_workers=api_workers) as process:
        process.said("ready: fake")
        with connected(process.url) as client, connected(process.url) as silent:
            assert ask(client).startswith(b"HTTP/1.1")
            process.popen.send_signal(signal.SIGTERM)
            assert client.recv(1) == silent.recv(1) == b""
            assert process.exit_code() == 0
        assert not any("Traceback" in line or "error" in line for line in process.lines)


def test_they_give_way_where_files_run_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that has been idle for the longest; those that are at work never do."""
    monkeypatch.setattr(uvicorn_protocol, "most_connections", lambda: 3)
    runner = fake_runner(save_byte_tokenizer(tmp_path))
    with (
        listening(runner, keep_alive=3600) as (url, _),
        connected(url) as first,
        connected(url) as second,
        connected(url) as third,
    ):
        third.sendall(b"POST /v1/generate HTTP/1.1\r\nhost: here\r\ncontent-length: 9\r\n\r\n")
        for client in (first, second):
            assert ask(client).startswith(b"HTTP/1.1 200")
        with connected(url) as fourth:
            assert ask(fourth).startswith(b"HTTP/1.1 200")
            assert first.recv(1) == b""
            assert ask(second).startswith(b"HTTP/1.1 200")
            third.sendall(b'{"a": "b"')
            assert third.recv(2**16).startswith(b"HTTP/1.1 400")
