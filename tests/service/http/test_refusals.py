"""What cannot be read as HTTP has an error in JSON, an id and a line in the log, like any mistake,
and takes nothing away from what was asked before it."""

from __future__ import annotations

import json
import logging
import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.service.harness import Service, fake_runner, save_byte_tokenizer
from tests.service.live import address, listening, wait_for

GET, POST = (
    b"GET /health HTTP/1.1\r\nhost: here\r\n",
    b"POST /v1/generate HTTP/1.1\r\nhost: here\r\n",
)
HEADS = {
    "a wrong length": POST + b"content-length: 1x\r\n\r\n",
    "a length and chunks": POST + b"content-length: 1\r\ntransfer-encoding: chunked\r\n\r\n",
    "no method that there is": b"FOO / HTTP/1.1\r\n\r\n",
    "a tunnel": b"CONNECT example.org:443 HTTP/1.1\r\nhost: example.org\r\n\r\n",
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(50),
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "no path": b"GET health HTTP/1.1\r\n\r\n",
    "a path that is none": b"GET http://[a HTTP/1.1\r\nhost: here\r\n\r\n",
}


@pytest.fixture
def server(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> Iterator[tuple[str, Service, Any]]:
    """Its address, the service, and what gives the lines that it has logged since."""

    def lines() -> list[dict[str, Any]]:
        return [json.loads(line) for line in capfd.readouterr().out.splitlines()]

    runner = fake_runner(save_byte_tokenizer(tmp_path), step_seconds=0.002)
    with listening(runner, access_log="json", keep_alive=600) as (url, service):
        yield url, service, lines


def said_to(url: str, *pieces: bytes) -> bytes:
    """All that comes back, until the server closes the connection."""
    with socket.create_connection(address(url), timeout=30) as client:
        for piece in pieces:
            client.sendall(piece)
            time.sleep(0.02)
        with suppress(ConnectionResetError):
            return b"".join(iter(partial(client.recv, 65536), b""))
    return b""


def split(answer: bytes) -> tuple[int, httpx.Headers, dict[str, Any]]:
    """Status, headers and JSON."""
    head, _, body = answer.partition(b"\r\n\r\n")
    first, *rest = head.split(b"\r\n")
    pairs = [line.split(b": ", 1) for line in rest]
    return int(first.split()[1]), httpx.Headers([(a, b) for a, b in pairs]), json.loads(body)


def check(answer: bytes, status: int, code: str) -> tuple[str, str]:
    """The message and the id of an error that closes its connection."""
    found, headers, body = split(answer)
    assert found == status and headers["connection"] == "close"
    assert set(body) == {"error"} and set(body["error"]) == {"message", "type", "param", "code"}
    assert (body["error"]["type"], body["error"]["code"]) == ("invalid_request_error", code)
    return body["error"]["message"], headers["x-request-id"]


@pytest.mark.parametrize("what", HEADS)
def test_a_head_that_is_none(
    server: tuple[str, Service, Any], caplog: pytest.LogCaptureFixture, what: str
) -> None:
    url, _, lines = server
    message, id = check(said_to(url, HEADS[what]), 400, "invalid_http")
    assert message.startswith("the request is not valid HTTP/1.1: ")
    told: list[dict[str, Any]] = []
    wait_for(lambda: told.extend(lines()) or told)
    (line,) = told
    assert (line["request_id"], line["status"], line["peer"]) == (id, 400, "127.0.0.1")
    assert (line["method"], line["route"], line["outcome"]) == ("other", "other", None)
    assert 'minserve_http_requests_total{method="other",path="other",status="400"} 1.0' in (
        httpx.get(f"{url}/metrics").text
    )
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize(
    "pieces",
    [
        (GET + b"x-request-id: mine\r\nx: %b\r\n\r\n" % (b"x" * 2**16),),
        (GET + b"x-request-id: mine\r\n", *[b"x: %b\r\n" % (b"x" * 10_000)] * 7, b"\r\n"),
    ],
)
def test_a_head_that_is_too_large(server: tuple[str, Service, Any], pieces: Any) -> None:
    url, _, lines = server
    _, id = check(said_to(url, *pieces), 431, "head_too_large")
    assert id == "mine"
    told: list[dict[str, Any]] = []
    wait_for(lambda: told.extend(lines()) or told)
    assert [(line["request_id"], line["status"]) for line in told] == [("mine", 431)]


def test_lines_before_a_head_are_bounded_too(server: tuple[str, Service, Any]) -> None:
    url, _, _ = server
    check(said_to(url, *[b"\r\n" * 20_000] * 3), 431, "head_too_large")


@pytest.mark.parametrize("apart", [False, True])
def test_a_body_that_is_none(server: tuple[str, Service, Any], apart: bool) -> None:
    """It is its request's error: of its id, route and count."""
    url, _, lines = server
    head = POST + b"x-request-id: mine\r\ntransfer-encoding: chunked\r\n\r\n"
    body = b'5\r\n{"pro\r\nxyz\r\n'
    message, id = check(
        said_to(url, *((head, body) if apart else (head + body,))), 400, "invalid_http"
    )
    assert "chunk size" in message and id == "mine"
    told: list[dict[str, Any]] = []
    wait_for(lambda: told.extend(lines()) or told)
    (line,) = told
    assert (line["request_id"], line["route"], line["peer"]) == (
        "mine",
        "/v1/generate",
        "127.0.0.1",
    )
    assert (line["status"], line["outcome"]) == (400, "invalid")
    assert 'minserve_request_errors_total{code="invalid_http"} 1.0' in (
        httpx.get(f"{url}/metrics").text
    )


def test_a_text_that_breaks_off_makes_no_state(server: tuple[str, Service, Any]) -> None:
    """Though it is read piece by piece while it comes."""
    url, _, _ = server
    head = b"POST /v1/states/text?id=x HTTP/1.1\r\nhost: here\r\ntransfer-encoding: chunked\r\n\r\n"
    check(said_to(url, head + b"5\r\nabcde\r\n", b"zz\r\n"), 400, "invalid_http")
    assert httpx.get(f"{url}/v1/states/x").status_code == 404


def test_who_reads_no_body_answers_and_closes(server: tuple[str, Service, Any]) -> None:
    url, _, _ = server
    status, headers, _ = split(said_to(url, GET + b"transfer-encoding: chunked\r\n\r\nzz\r\n"))
    assert status == 200 and headers["connection"] == "close"


@pytest.mark.parametrize("what", HEADS)
@pytest.mark.parametrize("apart", [False, True])
def test_answers_under_way_are_finished_first(
    server: tuple[str, Service, Any], what: str, apart: bool
) -> None:
    url, service, _ = server
    body = json.dumps({"prompts": ["a"], "max_tokens": 50, "ignore_eos": True}).encode()
    asked = (POST + b"content-length: %d\r\n\r\n%b" % (len(body), body)) * 2
    pieces = (asked, HEADS[what]) if apart else (asked + HEADS[what],)
    came = said_to(url, *pieces)
    _, first, second, last = came.split(b"HTTP/1.1 ")
    for answer in (first, second):
        status, _, told = split(b"HTTP/1.1 " + answer)
        assert status == 200 and told["usage"]["completion_tokens"] == 50
    check(b"HTTP/1.1 " + last, 400, "invalid_http")
    assert not service.lifecycle.runtime.requests
