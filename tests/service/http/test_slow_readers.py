"""Clients that read their streams more slowly than they are written."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import httpx

from tests.service.harness import fake_runner
from tests.service.live import address, listening, wait_for


def ask(url: str, path: str, body: dict[str, Any]) -> socket.socket:
    """A streamed request, of whose answer the kernel keeps little."""
    content = json.dumps(body | {"stream": True}).encode()
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.settimeout(30)
    client.connect(address(url))
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    client.sendall(f"{head}content-length: {len(content)}\r\n\r\n".encode() + content)
    return client


def read_stream(client: socket.socket) -> list[str]:
    """The events of a chunked answer, to its end."""
    raw = b""
    while not raw.endswith(b"\r\n0\r\n\r\n"):
        more = client.recv(2**20)
        assert more, "the connection ended before the answer did"
        raw += more
    _, _, chunked = raw.partition(b"\r\n\r\n")
    body = b""
    while chunked:
        size, _, rest = chunked.partition(b"\r\n")
        body += rest[: int(size, 16)]
        chunked = rest[int(size, 16) + 2 :]
    return [event.removeprefix("data: ") for event in body.decode().split("\n\n") if event]


def read_late(
    folder: Path, path: str, body: dict[str, Any], running: int, unread: int
) -> list[str]:
    """The events of an answer of so many sequences, which is read when all of them have ended."""
    runner = fake_runner(folder, step_seconds=0.0005)  # its thread leaves the server its turns
    with listening(runner, send_buffer=2**14, max_unread=unread) as (url, service):
        with ask(url, path, body) as client:
            client.recv(1)
            wait_for(lambda: service.lifecycle.load().running == running)
            wait_for(lambda: service.lifecycle.load().running == 0)
            events = read_stream(client)
        assert httpx.get(f"{url}/ready").status_code == 200
    return events


def test_a_stream_of_which_too_much_waits_is_ended_with_an_error(byte_folder: Path) -> None:
    """What waited comes first; the slot is free long before it has been read."""
    body = {"prompt": "a", "max_tokens": 1_000_000, "ignore_eos": True, "logprobs": 5}
    events = read_late(byte_folder, "/v1/completions", body, 1, 2_000)
    error = json.loads(events[-1])["error"]
    assert error["code"] == "reader_behind" and "up to 2000" in error["message"]
    choices = [json.loads(event)["choices"][0] for event in events[:-1]]
    # Each is a token and five alternatives.
    assert 2_000 / 6 < len(choices) < 1_000_000
    assert all(choice["finish_reason"] is None for choice in choices)


def test_a_batch_ends_as_one(byte_folder: Path) -> None:
    body = {"prompts": ["a", "b", "c"], "max_tokens": 1_000_000, "ignore_eos": True, "logprobs": 5}
    events = read_late(byte_folder, "/v1/generate", body, 3, 2_000)
    assert json.loads(events[-1])["error"]["code"] == "reader_behind"
    assert sum("error" in json.loads(event) for event in events) == 1


def test_a_slow_reader_of_what_fits_gets_all_of_it(byte_folder: Path) -> None:
    body = {"prompt": "a", "max_tokens": 2_000, "ignore_eos": True, "logprobs": 5}
    events = read_late(byte_folder, "/v1/completions", body, 1, 20_000)
    assert events[-1] == "[DONE]"
    choices = [json.loads(event)["choices"][0] for event in events[:-1]]
    assert choices[-1]["finish_reason"] == "length" and len(choices) == 2_000
