"""The access log: a line for each request, whatever became of it, and nothing that was said."""

from __future__ import annotations

import json
import os
import re
import socket
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from service.observability import access_log
from service.observability.access_log import AccessLog, Exchange, LineWriter
from tests.service.app.test_access import ALICE, KEYS, bearer
from tests.service.harness import Service, fake_runner, running, until
from tests.service.process import Process, serving

FIELDS = {
    "time", "request_id", "method", "route", "status", "outcome", "seconds", "tokens_in",
    "tokens_out", "key", "peer",
}  # fmt: skip
SECRET = "a prompt that nobody may see"


class Lines:
    """A running service with a JSON log, and what it has written."""

    def __init__(self, service: Service, capture: pytest.CaptureFixture[str]) -> None:
        self.service = service
        self._capture = capture
        self._text = ""

    async def next(self, count: int = 1) -> list[Any]:
        """As many new lines, no more, each with every field."""

        def come() -> bool:
            self._text += self._capture.readouterr().out
            return self._text.count("\n") >= count

        await until(come)
        lines = [json.loads(line) for line in self._text.splitlines()]
        self._text = ""
        assert len(lines) == count
        assert all(set(line) == FIELDS for line in lines)
        return lines


@pytest.fixture
async def log(byte_folder: Path, capfd: pytest.CaptureFixture[str]) -> Any:
    options: Any = {"access_log": "json", "api_keys": KEYS}
    async with running(fake_runner(byte_folder), **options) as service:
        yield Lines(service, capfd)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_line_tells_what_a_request_cost(log: Lines, stream: bool) -> None:
    body = {"prompts": [SECRET, [97]], "max_tokens": 3, "ignore_eos": True, "stream": stream}
    headers = {**bearer(ALICE), "x-request-id": "mine"}
    response = await log.service.http.post("/v1/generate?x=secret", json=body, headers=headers)
    assert response.status_code == 200
    (line,) = await log.next()
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", line.pop("time"))
    assert 0 < line.pop("seconds") < 60
    assert line == {
        "request_id": "mine",
        "method": "POST",
        "route": "/v1/generate",
        "status": 200,
        "outcome": "ok",
        "tokens_in": len(SECRET) + 1,
        "tokens_out": 6,
        "key": "alice",
        "peer": None,
    }


async def test_tokens_are_those_of_the_usage(log: Lines) -> None:
    http = log.service.http
    for path, body in (
        ("/v1/completions", {"prompt": ["abc", "d"], "n": 3, "max_tokens": 2}),
        ("/v1/completions", {"prompt": "abc", "max_tokens": 0, "echo": True, "logprobs": 1}),
        ("/v1/score", {"items": [{"context": "ab", "continuations": ["c", "de"]}]}),
    ):
        usage = (await http.post(path, json=body, headers=bearer(ALICE))).json()["usage"]
        (line,) = await log.next()
        assert (line["tokens_in"], line["tokens_out"]) == (
            usage["prompt_tokens"],
            usage["completion_tokens"],
        )


async def test_whatever_becomes_of_a_request_it_has_one_line(
    log: Lines, monkeypatch: pytest.MonkeyPatch
) -> None:
    http, key = log.service.http, bearer(ALICE)
    told = []
    for method, path, headers, body in (
        ("POST", "/v1/generate", key, {"prompts": [SECRET], "top_p": 7}),
        ("POST", "/v1/generate", bearer(SECRET.replace(" ", "-")), {"prompts": ["a"]}),
        ("GET", f"/{SECRET}", key, None),
        ("GET", f"/v1/models/{SECRET}", key, None),
        ("BREW", "/health", key, None),
        ("GET", "/metrics", {}, None),
    ):
        response = await http.request(method, path, headers=headers, json=body)
        (line,) = await log.next()
        assert line["request_id"] == response.headers["x-request-id"]
        assert SECRET not in str(line) and SECRET.replace(" ", "-") not in str(line)
        told.append([line[name] for name in ("method", "route", "status", "outcome", "key")])
    assert told == [
        ["POST", "/v1/generate", 400, "invalid", "alice"],
        ["POST", "/v1/generate", 401, "invalid", None],
        ["GET", "other", 404, None, "alice"],
        ["GET", "/v1/models/{model:path}", 404, None, "alice"],
        ["other", "/health", 405, None, None],
        ["GET", "/metrics", 200, None, None],
    ]

    async def fail(*_: object) -> None:
        raise RuntimeError

    monkeypatch.setattr("service.routes.generate.gather", fail)
    await http.post("/v1/generate", json={"prompts": ["a"]}, headers=key)
    (line,) = await log.next()
    assert (line["status"], line["outcome"]) == (500, "error")


async def test_text_and_off(byte_folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    async with running(fake_runner(byte_folder), access_log="text", api_keys=KEYS) as service:
        headers = {**bearer(ALICE), "x-request-id": "mine"}
        body = {"prompts": [SECRET], "max_tokens": 1, "temperature": 0}
        await service.http.post("/v1/generate", json=body, headers=headers)
        await service.http.get("/health", headers={"x-request-id": "other"})
    first, second = capfd.readouterr().out.splitlines()
    words = f"POST /v1/generate 200 S outcome=ok tokens_in={len(SECRET)} tokens_out=1 key=alice"
    assert re.sub(r"\d+\.\d{6}s", "S", first).split(" ", 1)[1] == f"{words} request_id=mine"
    assert (
        re.sub(r"\d+\.\d{6}s", "S", second).split(" ", 1)[1] == "GET /health 200 S request_id=other"
    )
    async with running(fake_runner(byte_folder)) as service:
        await service.http.post("/v1/generate", json=body)
    assert capfd.readouterr().out == ""


def _exchange(server: Process, content: bytes) -> socket.socket:
    host, port = server.url.removeprefix("http://").split(":")
    client = socket.create_connection((host, int(port)), timeout=60)
    client.sendall(content)
    return client


@pytest.mark.parametrize("when", ["before the body", "before the answer", "in the stream"])
def test_a_client_that_leaves_has_its_line(when: str) -> None:
    stream = b"true" if when == "in the stream" else b"false"
    body = b'{"prompts": [[97]], "max_tokens": 1000000, "ignore_eos": true, "stream": %b}' % stream
    head = (
        b"POST /v1/generate HTTP/1.1\r\nhost: x\r\nx-request-id: gone\r\n"
        b"content-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body)
    )
    with serving(access_log="json") as process:
        process.said("ready: fake")
        with _exchange(process, head + (body[:9] if when == "before the body" else body)) as client:
            if when == "in the stream":
                assert client.recv(100)
            elif when == "before the answer":
                running = "minserve_requests_running 1.0"
                deadline = time.monotonic() + 60
                while running not in httpx.get(f"{process.url}/metrics").text:
                    assert time.monotonic() < deadline
            else:
                time.sleep(0.2)  # the request has been begun
        process.printed('"request_id":"gone"')
        httpx.get(f"{process.url}/health", headers={"x-request-id": "last"})
        process.printed('"request_id":"last"')
        lines = [json.loads(line) for line in process.output]
        (line,) = [line for line in lines if line["request_id"] == "gone"]
        assert (line["status"], line["outcome"]) == (499, "cancelled")
        assert line["route"] == "/v1/generate"
        if when == "before the body":
            assert line["tokens_in"] == 0
        else:
            assert line["tokens_in"] == 1
        if when == "in the stream":
            assert line["tokens_out"] > 0


LINE = Exchange(
    time="t",
    request_id="r",
    method="GET",
    route="/health",
    status=200,
    outcome=None,
    seconds=0.5,
    tokens_in=None,
    tokens_out=None,
    key=None,
)


def test_lines_that_cannot_be_written_are_counted_and_hold_nothing_up(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """As on a disk that is full for a while."""
    full = True
    write = os.write

    def failing(descriptor: int, data: bytes) -> int:
        if full:
            raise OSError(28, "No space left on device")
        return write(descriptor, data[:5])  # and no more at once

    monkeypatch.setattr(access_log.os, "write", failing)
    path = tmp_path / "log"
    with path.open("wb") as file:
        lines = LineWriter(file.fileno())
        log = AccessLog("json", lines.write)
        for _ in range(3):
            log.add(LINE)
        deadline = time.monotonic() + 10
        while lines._lost < 3:
            assert time.monotonic() < deadline
            time.sleep(0.001)
        full = False
        log.add(LINE)
        deadline = time.monotonic() + 10
        while not path.read_bytes().endswith(b"\n"):
            assert time.monotonic() < deadline
            time.sleep(0.001)
        full = True
        log.add(LINE)
        lines.close()
    assert [json.loads(line)["request_id"] for line in path.read_text().splitlines()] == ["r"]
    assert "3 log lines could not be written" in caplog.text
    assert "1 log lines could not be written" in caplog.text  # told at the end, if not before


def test_a_log_that_nobody_reads_holds_nothing_up(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(access_log, "MOST_WAITING", 100)
    reading, writing = os.pipe()
    lines = LineWriter(writing)
    for number in range(2000):  # far more than the pipe holds
        lines.write(b"%0200d" % number)
    read: list[int] = []
    with os.fdopen(reading, "rb") as file:
        reader = threading.Thread(target=lambda: read.extend(int(line) for line in file))
        reader.start()
        lines.close()
        os.close(writing)
        reader.join(10)
    told = re.search(r"(\d+) log lines could not be written", caplog.text)
    assert told is not None
    assert len(read) + int(told[1]) == 2000
    assert read == sorted(read)
