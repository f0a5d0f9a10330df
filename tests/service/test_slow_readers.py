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


def test_a_stream_of_which_too_much_waits_is_ended_with_an_error(byte_folder: Path) -> None:
    """What waited comes first; the slot is free long before it has been read."""
    body = {"prompt": "a", "max_tokens": 1_000_000, "ignore_eos": True, "logprobs": 5}
    with listening(fake_runner(byte_folder), max_unread=2_000) as (url, service):
        with ask(url, "/v1/completions", body) as client:
            client.recv(1)
            wait_for(lambda: service.lifecycle.load().running == 1)
            wait_for(lambda: service.lifecycle.load().running == 0)
            events = read_stream(client)
        assert httpx.get(f"{url}/ready").status_code == 200
    error = json.loads(events[-1])["error"]
    assert error["code"] == "reader_behind" and "at most 2000" in error["message"]
    choices = [json.loads(event)["choices"][0] for event in events[:-1]]
    # A token, its own log-probability and five others each.
    assert 2_000 / 6 < len(choices) < 1_000_000
    assert all(choice["finish_reason"] is None for choice in choices)


def test_a_batch_ends_as_one(byte_folder: Path) -> None:
    body = {"prompts": ["a", "b", "c"], "max_tokens": 1_000_000, "ignore_eos": True, "logprobs": 5}
    with (
        listening(fake_runner(byte_folder), max_unread=2_000) as (url, service),
        ask(url, "/v1/generate", body) as client,
    ):
        client.recv(1)
        wait_for(lambda: service.lifecycle.load().running == 3)
        wait_for(lambda: service.lifecycle.load().running == 0)
        events = read_stream(client)
    assert json.loads(events[-1])["error"]["code"] == "reader_behind"
    assert sum("error" in json.loads(event) for event in events) == 1


def test_a_slow_reader_of_what_fits_gets_all_of_it(byte_folder: Path) -> None:
    body = {"prompt": "a", "max_tokens": 20_000, "ignore_eos": True}
    with (
        listening(fake_runner(byte_folder), max_unread=20_000) as (url, service),
        ask(url, "/v1/completions", body) as client,
    ):
        client.recv(1)
        wait_for(lambda: service.lifecycle.load().running == 1)
        wait_for(lambda: service.lifecycle.load().running == 0)
        events = read_stream(client)
    assert events[-1] == "[DONE]"
    choices = [json.loads(event)["choices"][0] for event in events[:-1]]
    assert choices[-1]["finish_reason"] == "length" and len(choices) == 20_000
