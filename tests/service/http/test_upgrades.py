"""Who asks for another protocol is answered by HTTP/1.1, and nothing is said of it."""

from __future__ import annotations

import json
import logging
import socket
import time
from functools import partial
from pathlib import Path

import pytest

from tests.service.harness import fake_runner, save_byte_tokenizer
from tests.service.live import address, listening

BODY = json.dumps({"prompts": ["ka"], "max_tokens": 3, "ignore_eos": True}).encode()
LENGTH, CHUNKS = b"content-length: %d\r\n\r\n%b", b"transfer-encoding: chunked\r\n\r\n%b"
IN_CHUNKS = b"%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY)
ASKED = {
    "a length": LENGTH % (len(BODY), BODY),
    "chunks": CHUNKS % IN_CHUNKS,
}


def head(protocol: bytes) -> bytes:
    """As curl and Java's client ask for it."""
    return (
        b"POST /v1/generate HTTP/1.1\r\nhost: here\r\nconnection: Upgrade, HTTP2-Settings\r\n"
        b"upgrade: %b\r\nhttp2-settings: AAMAAABkAAQAoAAAAAIAAAAA\r\n" % protocol
    )


def answers(url: str, *pieces: bytes) -> list[dict[str, object]]:
    """What plain answers say to what is sent, each piece in a packet of its own."""
    last = b"GET /health HTTP/1.1\r\nhost: here\r\nconnection: close\r\n\r\n"
    with socket.create_connection(address(url), timeout=30) as client:
        for piece in pieces:
            client.sendall(piece)
            time.sleep(0.05)
        client.sendall(last)
        came = b"".join(iter(partial(client.recv, 65536), b""))
    told = came.split(b"HTTP/1.1 ")[1:]
    assert all(one.startswith(b"200 OK\r\n") for one in told), came
    return [json.loads(one.partition(b"\r\n\r\n")[2]) for one in told][:-1]


@pytest.mark.parametrize("protocol", [b"h2c", b"websocket", b"WebSocket"])
@pytest.mark.parametrize("how", ASKED)
def test_the_body_is_read_and_answered(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, protocol: bytes, how: str
) -> None:
    whole = head(protocol) + ASKED[how]
    pieces = (whole, whole * 2, whole[:40], whole[40:-9], whole[-9:], head(protocol), ASKED[how])
    with listening(fake_runner(save_byte_tokenizer(tmp_path))) as (url, _):
        told = answers(url, *pieces)
    assert len(told) == 5
    assert all(one["usage"]["completion_tokens"] == 3 for one in told)  # type: ignore[index]
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_a_request_without_a_body_is_answered(tmp_path: Path) -> None:
    asked = (
        b"GET /ready HTTP/1.1\r\nhost: here\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n"
    )
    with listening(fake_runner(save_byte_tokenizer(tmp_path))) as (url, _):
        assert answers(url, asked, asked * 500) == [{"status": "ready"}] * 501
