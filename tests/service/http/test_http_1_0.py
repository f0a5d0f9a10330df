"""Clients of HTTP/1.0 know no chunks: a stream to them ends with its connection."""

from __future__ import annotations

import json
import socket
from functools import partial
from pathlib import Path
from typing import Any, cast

import httpx

from service.http.connection import OldConnection
from tests.service.harness import fake_runner, parse_events, save_byte_tokenizer
from tests.service.http.test_direct import Wire, connection_on
from tests.service.live import address, listening


def test_a_stream_without_chunks_is_what_its_plain_answer_is(tmp_path: Path) -> None:
    """Whatever the client says of keeping the connection."""
    runner = fake_runner(save_byte_tokenizer(tmp_path), step_seconds=0.002)
    asked = {"prompts": ["ka", "b"], "max_tokens": 20, "ignore_eos": True, "temperature": 0}
    with listening(runner, keep_alive=600) as (url, _):
        results = httpx.post(f"{url}/v1/generate", json=asked).json()["results"]
        texts = {result["index"]: result["text"] for result in results}
        for stream in (True, False):
            body = json.dumps({**asked, "stream": stream}).encode()
            with socket.create_connection(address(url), timeout=30) as client:
                client.sendall(
                    b"POST /v1/generate HTTP/1.0\r\nhost: here\r\nconnection: keep-alive\r\n"
                    b"content-length: %d\r\n\r\n%b" % (len(body), body)
                )
                came = b"".join(iter(partial(client.recv, 65536), b""))
            head, _, answer = came.partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200 OK\r\n") and b"connection: close" in head
            assert b"transfer-encoding" not in head and (b"content-length" in head) is not stream
            if not stream:
                told = json.loads(answer)["results"]
            else:
                *told, done = parse_events(answer.decode())
                assert done == "[DONE]"
            for index, text in texts.items():
                assert "".join(one["text"] for one in told if one["index"] == index) == text


async def test_head_and_parts_may_come_apart() -> None:
    """As from what does not know the server."""
    wire = Wire()
    _, seen = connection_on(wire, keep_alive=False)
    connection = OldConnection(cast("Any", seen.protocol), seen, cast("Any", None))
    await connection.send({"type": "http.response.start", "status": 200, "headers": []})
    assert not seen.response_complete and connection.writer() is None
    await connection.send({"type": "http.response.body", "body": b"first", "more_body": True})
    await connection.send({"type": "http.response.body", "body": b"", "more_body": False})
    head, _, body = b"".join(wire.written).partition(b"\r\n\r\n")
    assert head == b"HTTP/1.1 200 OK\r\ndate: now\r\nconnection: close" and body == b"first"
    assert seen.response_complete and wire.closed_after == len(wire.written)
