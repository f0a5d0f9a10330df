"""Texts that are read while they come: who leaves in the middle, what they take of others."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from service.text.tokenizer import Tokenizer
from tests.service.app.test_access import ALICE, BOB, KEYS, bearer
from tests.service.harness import (
    Service,
    error_message,
    fake_runner,
    running,
    save_byte_tokenizer,
    until,
)
from tests.service.live import address, listening, wait_for

PATH = "/v1/states/text"
LINE = b"abcdefghijklmno\n"
MEGABYTE = 2**20
PIECE = 2**17  # bytes; no piece of such a text is larger
HEAD = b"POST %s HTTP/1.1\r\nhost: here\r\ncontent-length: %d\r\n\r\n"


def slow_runner(folder: Path, **options: Any) -> Any:
    """Reads a piece in a second or more, so that megabytes take a minute."""
    return fake_runner(save_byte_tokenizer(folder), host_rows=8, step_seconds=0.005, **options)


def read_by(service: Service) -> int:
    """Tokens of prompts that the engine has read."""
    text = service.lifecycle.metrics.snapshot().render([]).decode()
    (line,) = (one for one in text.splitlines() if one.startswith("minserve_prompt_tokens_total "))
    return int(float(line.split()[1]))


def begin(url: str, size: int, path: bytes = PATH.encode()) -> socket.socket:
    """A client that sends as much of such a text as is taken at once, and more as it is taken, for
    a second."""
    client = socket.create_connection(address(url))
    client.settimeout(1)
    with suppress(TimeoutError):
        client.sendall(HEAD % (path, size) + LINE * (size // len(LINE)))
    return client


def leave(client: socket.socket, how: str) -> None:
    if how == "reset":
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.close()


@pytest.mark.parametrize("how", ["close", "reset"])
def test_nothing_is_read_for_a_client_that_has_left(tmp_path: Path, how: str) -> None:
    """Though all that it sent is here, or on its way."""
    with listening(slow_runner(tmp_path)) as (url, service):
        client = begin(url, 3 * MEGABYTE)
        wait_for(lambda: read_by(service) > 0)
        leave(client, how)
        before = read_by(service)
        wait_for(lambda: not service.lifecycle.requests)
        assert read_by(service) - before <= PIECE
        wait_for(lambda: not service.lifecycle.load().running)


@pytest.mark.parametrize("how", ["close", "reset"])
def test_nor_where_no_more_of_it_is_read_ahead(tmp_path: Path, how: str) -> None:
    """Its end is in the kernel alone, behind a part of the text."""
    with listening(slow_runner(tmp_path), max_body_bytes=2 * PIECE) as (url, service):
        client = begin(url, 3 * PIECE)
        wait_for(lambda: read_by(service) > 0)
        leave(client, how)
        before = read_by(service)
        wait_for(lambda: not service.lifecycle.requests)
        assert read_by(service) - before <= PIECE


def test_nor_where_another_request_came_behind_the_text(tmp_path: Path) -> None:
    """Whose end the server takes the client's to be."""
    with listening(slow_runner(tmp_path)) as (url, service):
        text = LINE * (4 * PIECE // len(LINE))
        client = socket.create_connection(address(url))
        client.sendall(HEAD % (PATH.encode(), len(text)) + text)
        client.sendall(b"GET /health HTTP/1.1\r\nhost: here\r\n\r\n")
        wait_for(lambda: read_by(service) > 0)
        client.close()
        before = read_by(service)
        wait_for(lambda: not service.lifecycle.requests)
        assert read_by(service) - before <= PIECE


def test_who_ends_what_it_sends_has_left(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As with any request; the server has nothing to say to that."""
    with listening(slow_runner(tmp_path), max_body_bytes=2 * PIECE) as (url, service):
        client = begin(url, 8 * PIECE)
        wait_for(lambda: read_by(service) > 0)
        client.shutdown(socket.SHUT_WR)
        wait_for(lambda: not service.lifecycle.requests)
        client.settimeout(60)
        with suppress(ConnectionResetError):
            assert client.recv(100) == b""
        client.close()
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


def test_it_is_counted_as_cancelled_and_leaves_no_state(tmp_path: Path) -> None:
    with listening(slow_runner(tmp_path)) as (url, service):
        leave(begin(url, 3 * MEGABYTE, b"/v1/states/text?id=x"), "close")
        wait_for(lambda: not service.lifecycle.requests)
        told = 'minserve_requests_total{endpoint="states/text",outcome="cancelled"} 1.0'
        wait_for(lambda: told in httpx.get(f"{url}/metrics").text)
        wait_for(lambda: not httpx.get(f"{url}/v1/states").json()["data"])


def test_a_text_larger_than_what_is_read_ahead(tmp_path: Path) -> None:
    runner = fake_runner(save_byte_tokenizer(tmp_path), host_rows=8)
    with listening(runner, max_body_bytes=1000) as (url, _):
        response = httpx.post(f"{url}{PATH}", content=LINE * 2**15, timeout=60)
        assert response.status_code == 200, response.text
        assert response.json()["tokens"] == len(LINE) * 2**15


def test_a_text_in_very_small_parts(tmp_path: Path) -> None:
    runner = fake_runner(save_byte_tokenizer(tmp_path), host_rows=8)
    with listening(runner, max_body_bytes=1000) as (url, _):
        response = httpx.post(f"{url}{PATH}", content=(b"a" for _ in range(5000)), timeout=60)
        assert response.json()["tokens"] == 5000


class Sent:
    """A text whose parts come when they are told to."""

    def __init__(self, service: Service, **headers: str) -> None:
        self._parts: asyncio.Queue[bytes] = asyncio.Queue()
        sending = service.http.post(PATH, content=self._content(), headers=headers)
        self.answer = asyncio.create_task(sending)

    async def _content(self) -> AsyncIterator[bytes]:
        while part := await self._parts.get():
            yield part

    def send(self, part: bytes) -> None:
        self._parts.put_nowait(part)

    async def end(self) -> httpx.Response:
        self.send(b"")
        return await self.answer


async def test_uploads_count_to_their_keys_share(byte_folder: Path) -> None:
    """Also while nothing of them comes."""
    runner = fake_runner(byte_folder, host_rows=16, slots=1, max_waiting=4)
    async with running(runner, api_keys=KEYS) as service:
        own = [Sent(service, **bearer(ALICE)) for _ in range(4)]  # one runs, three may wait
        await until(lambda: len(service.lifecycle.requests) == 4)
        refused = await service.http.post(PATH, content=b"abc", headers=bearer(ALICE))
        assert refused.status_code == 429, refused.text
        assert refused.json()["error"]["code"] == "share_full"
        assert "waiting already" in error_message(refused.json(), None)
        other = await service.http.post(PATH, content=b"abc", headers=bearer(BOB))
        assert other.status_code == 200, other.text
        for one in own:
            one.send(b"abc")
            assert (await one.end()).status_code == 200
        again = await service.http.post(PATH, content=b"abc", headers=bearer(ALICE))
        assert again.status_code == 200, "their places are free again"


async def test_who_was_let_in_keeps_its_place(byte_folder: Path) -> None:
    """A text of which a part has been read is not refused for others that came later."""
    runner = fake_runner(byte_folder, host_rows=16, slots=1, max_waiting=1, step_seconds=0.002)
    async with running(runner) as service:
        text = Sent(service)
        text.send(LINE * 2**13)
        await until(lambda: service.lifecycle.load().states == 1)  # its first piece has been read
        long = {"prompts": ["a"], "max_tokens": 300, "ignore_eos": True}
        runs = asyncio.create_task(service.http.post("/v1/generate", json=long))
        await until(lambda: service.lifecycle.load().running == 1)
        other = await service.http.post("/v1/generate", json=long)
        assert other.status_code == 429, "the place in the queue is the text's"
        text.send(LINE * 2**13)
        response = await text.end()
        assert response.status_code == 200, response.text
        assert response.json()["tokens"] == len(LINE) * 2**14
        assert (await runs).status_code == 200


@pytest.mark.parametrize(("path", "field"), [("/v1/score", "texts"), ("/v1/generate", "prompts")])
def test_nothing_is_tokenised_for_a_client_that_has_left(
    tmp_path: Path, path: str, field: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoded = []

    async def slowly(self: Tokenizer, text: str, **how: bool) -> Any:
        encoded.append(text)
        await asyncio.sleep(0.2)
        return self.encode(text, **how)

    monkeypatch.setattr(Tokenizer, "encode_async", slowly)
    body = json.dumps({field: [f"{i:02}" * 2000 for i in range(60)]}).encode()
    with listening(fake_runner(save_byte_tokenizer(tmp_path))) as (url, service):
        client = socket.create_connection(address(url))
        client.sendall(HEAD % (path.encode(), len(body)) + body)
        wait_for(lambda: encoded)
        client.close()
        wait_for(lambda: not service.lifecycle.requests)
        assert len(encoded) < 60
        told = 'outcome="cancelled"} 1.0'
        wait_for(lambda: told in httpx.get(f"{url}/metrics").text)
