"""Requests leave nothing behind that only the garbage collector could free: it would stop the
server's only event loop, the longer the more there is."""

from __future__ import annotations

import asyncio
import gc
import socket
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from engine.client.request_stream import RequestStream
from service.http.errors import ApiError
from service.http.uvicorn_protocol import cut_stalled
from service.inference import lifecycle
from service.inference.inference_request import InferenceRequest
from tests.service.harness import fake_runner, save_byte_tokenizer
from tests.service.live import address, listening, wait_for

LONG, SHORT = {"max_tokens": 100_000, "ignore_eos": True}, {"max_tokens": 3}
ASKED: dict[str, tuple[str, dict[str, Any], int]] = {
    "answers": ("generate", {"prompts": ["ka"], **SHORT}, 200),
    "streams": ("generate", {"prompts": ["ka"], "stream": True, **SHORT}, 200),
    "completions": ("completions", {"prompt": "ka", "n": 2, **SHORT}, 200),
    "scores": ("score", {"texts": ["kakadu"]}, 200),
    "wrong values": ("generate", {"prompts": ["ka"], "max_tokens": -1}, 400),
    "wrong ids": ("generate", {"prompts": [[999]]}, 400),
    "no such state": ("generate", {"prompts": ["ka"], "state": "none", **SHORT}, 404),
    "a full queue": ("generate", {"prompts": ["ka"] * 2, **SHORT}, 429),
}


class Left:
    """What there is of requests that came since, but for what the latest on each connection
    brought. (Other tests of this process may have left something that is still in use.)"""

    def __init__(self) -> None:
        self._before = self._all()

    def requests(self) -> list[str]:
        return [type(one).__name__ for one in self._new() if not isinstance(one, ApiError)]

    def errors(self) -> int:
        return sum(isinstance(one, ApiError) for one in self._new())

    def nothing(self) -> bool:
        return not self._new()

    def _new(self) -> list[object]:
        return [one for key, one in self._all().items() if key not in self._before]

    @staticmethod
    def _all() -> dict[int, object]:
        watched = (InferenceRequest, RequestStream, ApiError)
        return {id(one): one for one in gc.get_objects() if isinstance(one, watched)}


@pytest.fixture
def left(monkeypatch: pytest.MonkeyPatch) -> Iterator[Left]:
    """While nothing is collected, and what watches over slow readers sees every request."""
    monkeypatch.setattr(lifecycle, "UNREAD_SECONDS", 0.001)
    gc.collect()
    gc.disable()
    yield Left()
    gc.enable()


@pytest.mark.parametrize("what", ASKED)
def test_what_a_request_brought_goes_with_it(tmp_path: Path, left: Left, what: str) -> None:
    path, body, status = ASKED[what]
    runner = fake_runner(save_byte_tokenizer(tmp_path), slots=4, step_seconds=0.001)
    with (
        listening(runner, max_waiting=1 if status == 429 else 8) as (url, service),
        httpx.Client(base_url=f"{url}/v1") as client,
        httpx.Client(base_url=f"{url}/v1") as other,
    ):
        if status == 429:
            held = {"prompts": ["ka"] * 4, "stream": True, **LONG}
            with other.stream("POST", "/generate", json=held):
                before = len(left.requests())
                for _ in range(5):
                    assert client.post(f"/{path}", json=body).status_code == status
                client.get("/models")  # the connection's latest request
                wait_for(lambda: (len(left.requests()), left.errors()) == (before, 0))
            return
        for _ in range(5):
            assert client.post(f"/{path}", json=body).status_code == status
        client.get("/models")  # the connection's latest request
        wait_for(left.nothing)
        assert not service.lifecycle.runtime.requests


def test_so_does_a_stream_that_fails_in_the_middle(tmp_path: Path, left: Left) -> None:
    runner = fake_runner(save_byte_tokenizer(tmp_path), slots=4, step_seconds=0.001)
    body = {"prompts": ["ka"], "stream": True, **LONG}
    with listening(runner) as (url, _), httpx.Client(base_url=f"{url}/v1") as client:
        for _ in range(3):
            with client.stream("POST", "/generate", json=body) as answer:
                lines = answer.iter_lines()
                next(lines)
                runner.failures.append(RuntimeError("boom"))
                assert "step_failed" in list(lines)[-2]
        client.get("/models")  # the connection's latest request
        wait_for(left.nothing)


@pytest.mark.parametrize("stream", [False, True])
def test_so_does_what_a_client_that_left_had_asked(
    tmp_path: Path, left: Left, stream: bool
) -> None:
    runner = fake_runner(save_byte_tokenizer(tmp_path), slots=4, step_seconds=0.001)
    with listening(runner) as (url, service):
        body = httpx.Request("POST", url, json={"prompts": ["ka"], "stream": stream, **LONG})
        for _ in range(5):
            with socket.create_connection(address(url), timeout=30) as client:
                client.sendall(b"POST /v1/generate HTTP/1.1\r\nhost: here\r\n")
                client.sendall(b"content-length: %d\r\n\r\n%b" % (len(body.content), body.content))
                wait_for(lambda: service.lifecycle.runtime.requests)
            wait_for(lambda: not service.lifecycle.runtime.requests)
        wait_for(lambda: not left.requests())


async def test_what_watches_over_connections_holds_none_of_them() -> None:
    class Connection:
        pass

    seen = {Connection()}
    (kept,) = map(weakref.ref, seen)
    watch = asyncio.create_task(cut_stalled(seen, 0.004, 0.004, lambda why: None))
    await asyncio.sleep(0.05)
    seen.clear()
    assert kept() is None
    watch.cancel()
