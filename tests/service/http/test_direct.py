"""What goes past ASGI on the server's own connection: streams whose tokens are written without
waking a task (nothing is missing, nothing comes twice, and clients that do not read or have left
are left to the server's `send`), answers in one piece, word of clients that leave."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest

from service.http.connection import FIRST, Connection, Writer, begin, connect
from service.http.json_response import JSONResponse
from service.http.scope import CONNECTION, DISCARD_SECONDS, PROTOCOL
from service.inference.inference_request import InferenceRequest
from tests.service.harness import fake_runner, parse_events, save_byte_tokenizer
from tests.service.live import address, listening, wait_for

PROMPTS = ["a", "ka", "xyz"]


@pytest.mark.parametrize(("interval", "is_open"), [(1, True), (4, True), (1, False)])
def test_a_stream_is_what_its_plain_answer_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, interval: int, is_open: bool
) -> None:
    """Also where its client never reads quickly enough to be written to at once."""
    written = []
    write_through, writer_of = InferenceRequest.write_through, Connection.writer

    class Counting:
        """Notes what the fast path writes."""

        def __init__(self, writer: Writer) -> None:
            self._writer = writer
            self.is_open = writer.is_open

        def write(self, data: bytes) -> None:
            self._writer.write(data)
            written.append(len(data))

    def counting(inference: InferenceRequest, renders: Any, writer: Writer) -> None:
        write_through(inference, renders, cast("Writer", Counting(writer)))

    class Shut(Writer):
        def is_open(self) -> bool:
            return False

    def shut(connection: Connection) -> Writer | None:
        return writer_of(connection) and Shut(connection, connection._cycle)

    monkeypatch.setattr(InferenceRequest, "write_through", counting)
    if not is_open:
        monkeypatch.setattr(Connection, "writer", shut)
    body = {"prompts": PROMPTS, "max_tokens": 60, "temperature": 0, "stop": ["tu", "never"]}
    runner = fake_runner(save_byte_tokenizer(tmp_path), step_seconds=0.002)
    with listening(runner) as (url, _):
        plain = httpx.post(f"{url}/v1/generate", json=body).json()
        asked = {**body, "stream": True, "stream_interval": interval}
        answer = httpx.post(f"{url}/v1/generate", json=asked)
        lines = httpx.get(f"{url}/metrics").text
    *events, done = parse_events(answer.text)
    assert done == "[DONE]"
    for result in plain["results"]:
        own = [event for event in events if event["index"] == result["index"]]
        assert "".join([event["text"] for event in own]) == result["text"]
        assert [id for event in own for id in event["token_ids"]] == result["token_ids"]
        assert own[-1]["finish_reason"] == result["finish_reason"]
        # A stream that ends at a stop string does not wait for the engine to tell the rest.
        result["usage"].pop("prompt_tokens_details")
        own[-1]["usage"].pop("prompt_tokens_details", None)
        assert own[-1]["usage"] == result["usage"]
    assert (sum(written) > 0) is is_open, "what was written without waking the task"
    gaps = next(
        float(line.split()[1])
        for line in lines.splitlines()
        if line.startswith("minserve_inter_token_latency_seconds_count")
    )
    assert gaps > len(PROMPTS), "deliveries that nobody counted"


class Wire:
    """A transport that remembers what came when."""

    def __init__(self) -> None:
        self.written: list[bytes] = []
        self.closed_after: int | None = None

    def write(self, data: bytes) -> None:
        self.written.append(data)

    def close(self) -> None:
        self.closed_after = len(self.written)


def connection_on(wire: Wire, **cycle: Any) -> tuple[Connection, Any]:
    """A request's connection, and what uvicorn knows of it."""
    known = {
        "transport": wire,
        "scope": {"method": "POST"},
        "default_headers": [(b"date", b"now")],
        "access_log": False,
        "keep_alive": True,
        "response_started": False,
        "chunked_encoding": True,
        "disconnected": False,
        "response_complete": False,
        "more_body": False,
        "message_event": asyncio.Event(),
        "flow": SimpleNamespace(write_paused=False, resume_reading=lambda: None),
        "sent": [],  # by uvicorn's own `send`
        "over": [],
    }
    seen = SimpleNamespace(**(known | cycle))
    protocol = SimpleNamespace(on_lost=None, lost=False)
    seen.protocol = protocol

    seen.on_response = lambda: seen.over.append(True)

    async def send(message: Any) -> None:
        seen.sent.append(message)

    return Connection(cast("Any", protocol), seen, send), seen


@pytest.mark.parametrize("what", ["paused", "left", "over"])
def test_nothing_is_written_where_that_would_have_to_wait_or_is_pointless(what: str) -> None:
    wire = Wire()
    connection, seen = connection_on(wire)
    writer = connection.writer()
    assert writer is not None and writer.is_open()
    writer.write(b"")  # an empty chunk would end the answer
    writer.write(b"ten bytes!")
    assert b"".join(wire.written) == b"a\r\nten bytes!\r\n" and not seen.over
    match what:
        case "paused":
            seen.flow.write_paused = True
        case "left":
            seen.disconnected = True
        case "over":
            seen.response_complete = True
    assert not writer.is_open()


def test_the_last_part_ends_the_answer() -> None:
    wire = Wire()
    connection, seen = connection_on(wire, keep_alive=False)
    writer = connection.writer()
    assert writer is not None
    writer.end(b"last")
    assert (wire.written, wire.closed_after) == ([b"4\r\nlast\r\n0\r\n\r\n"], 1)
    assert seen.response_complete and seen.over == [True] and not writer.is_open()


def test_only_a_chunked_answer_is_written_directly() -> None:
    connection, _ = connection_on(Wire(), chunked_encoding=False)
    assert connection.writer() is None


JSON = [(b"content-type", b"application/json"), (b"content-length", b"4")]


async def test_an_answer_leaves_in_one_piece_before_its_connection_is_closed() -> None:
    wire = Wire()
    connection, seen = connection_on(wire, keep_alive=False)
    scope = {FIRST: True}
    await begin(scope, connection.send, 200, JSON, b"body")
    assert wire.written == [
        b"HTTP/1.1 200 OK\r\ndate: now\r\ncontent-type: application/json\r\n"
        b"content-length: 4\r\nconnection: close\r\n\r\nbody"
    ]
    assert wire.closed_after == 1
    assert seen.response_complete and seen.message_event.is_set() and seen.over == [True]


async def test_a_stream_begins_in_one_piece() -> None:
    wire = Wire()
    connection, seen = connection_on(wire)
    await begin({FIRST: True}, connection.send, 200, [], b"first", more=True)
    assert wire.written == [
        b"HTTP/1.1 200 OK\r\ndate: now\r\ntransfer-encoding: chunked\r\n\r\n5\r\nfirst\r\n"
    ]
    assert seen.response_started and not seen.response_complete and not seen.over
    assert connection.writer() is not None
    await connection.send({"type": "http.response.body", "body": b"next"})
    assert seen.sent == [{"type": "http.response.body", "body": b"next"}]


@pytest.mark.parametrize(
    "known",
    [{"access_log": True}, {"scope": {"method": "HEAD"}}, {"response_started": True}],
)
async def test_what_uvicorn_has_to_know_goes_by_it(known: dict[str, Any]) -> None:
    wire = Wire()
    connection, seen = connection_on(wire, **known)
    await begin({FIRST: True}, connection.send, 200, JSON, b"body")
    head, body = seen.sent
    assert head == {"type": "http.response.start", "status": 200, "headers": JSON}
    assert body == {"type": "http.response.body", "body": b"body", "more_body": False}
    assert not wire.written


def test_an_answer_closes_a_connection_whose_client_asks_for_it(tmp_path: Path) -> None:
    with listening(fake_runner(save_byte_tokenizer(tmp_path)), keep_alive=600) as (url, _):
        for stream in (False, True):
            body = json.dumps({"prompts": ["a"], "max_tokens": 2, "stream": stream}).encode()
            with socket.create_connection(address(url), timeout=30) as client:
                client.sendall(
                    b"POST /v1/generate HTTP/1.1\r\nhost: here\r\nconnection: close\r\n"
                    b"content-length: %d\r\n\r\n%b" % (len(body), body)
                )
                came = b"".join(iter(partial(client.recv, 65536), b""))
            assert came.startswith(b"HTTP/1.1 200 OK\r\n") and b"connection: close" in came


def test_what_waits_for_a_body_of_its_own_gets_one(tmp_path: Path) -> None:
    """FastAPI's own telemetry does, on its way."""
    seen: list[Any] = []

    async def watched(scope: Any, receive: Any, send: Any) -> None:
        async def note(message: Any) -> None:
            seen.append(message["type"])
            await send(message)

        await JSONResponse({})(scope, receive, note)

    with listening(fake_runner(save_byte_tokenizer(tmp_path))) as (url, service):
        service.app.mount("/watched", watched)
        assert httpx.get(f"{url}/watched/").status_code == 200
    assert seen == ["http.response.start", "http.response.body"]


async def test_another_server_gets_head_and_body() -> None:
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    await begin({}, send, 503, JSON, b"body")
    assert [message["type"] for message in sent] == ["http.response.start", "http.response.body"]
    assert sent[0]["status"] == 503 and sent[1]["body"] == b"body"


@pytest.mark.parametrize(
    ("headers", "reason"),
    [
        ([(b"x-request-id", b"a\r\nset-cookie: b")], "line break"),
        ([(b"content-length", b"3")], "content-length"),
        ([(b"content-length", b"5")], "content-length"),
    ],
)
async def test_a_head_that_is_none_is_not_written(
    headers: list[tuple[bytes, bytes]], reason: str
) -> None:
    wire = Wire()
    connection, seen = connection_on(wire)
    with pytest.raises(ValueError, match=reason):
        await begin({FIRST: True}, connection.send, 200, headers, b"body")
    assert not wire.written and not seen.response_started


async def test_an_answer_waits_for_its_client_and_not_for_one_that_has_left() -> None:
    wire = Wire()
    connection, seen = connection_on(wire)
    seen.flow.write_paused = True
    drained = asyncio.Event()
    seen.flow.drain = drained.wait
    sending = asyncio.create_task(begin({FIRST: True}, connection.send, 200, JSON, b"body"))
    await asyncio.sleep(0)
    assert not wire.written
    drained.set()
    await sending
    assert len(wire.written) == 1
    connection, seen = connection_on(wire, disconnected=True)
    await begin({FIRST: True}, connection.send, 200, JSON, b"body")
    assert len(wire.written) == 1


async def test_who_watches_is_told_that_the_client_left() -> None:
    connection, seen = connection_on(Wire())
    told: list[str] = []
    unwatch = connection.watch(lambda: told.append("first"))
    seen.protocol.on_lost()
    assert told == ["first"]
    assert seen.disconnected, "uvicorn tells it to the latest request alone"
    # The next request of the connection begins before the first has cleaned up.
    connection.watch(lambda: told.append("next"))
    unwatch()
    seen.protocol.on_lost()
    assert told == ["first", "next"]


async def test_who_comes_late_is_told_soon() -> None:
    connection, seen = connection_on(Wire())
    seen.protocol.lost = True
    told: list[str] = []
    connection.watch(lambda: told.append("left"))
    assert not told
    await asyncio.sleep(0)
    assert told == ["left"]


def test_another_server_gives_no_connection() -> None:
    async def send(message: Any) -> None: ...

    for scope in ({}, {PROTOCOL: object()}):
        assert connect(scope, send) is send
        assert CONNECTION not in scope and PROTOCOL not in scope


def test_what_is_too_large_is_refused_before_it_is_sent(tmp_path: Path) -> None:
    """A client that waits for leave to go on gets the answer instead."""
    with listening(fake_runner(save_byte_tokenizer(tmp_path)), max_body_bytes=100) as (url, _):
        waits = b"content-length: 1000\r\nexpect: 100-continue"
        goes_on = b"transfer-encoding: chunked"
        for head in (waits, goes_on):
            with socket.create_connection(address(url), timeout=DISCARD_SECONDS / 2) as client:
                client.sendall(b"POST /tokenize HTTP/1.1\r\nhost: here\r\n%b\r\n\r\n" % head)
                if head is goes_on:
                    client.sendall(b"80\r\n%b\r\n" % bytes(128))  # and more, some time
                assert client.recv(65536).startswith(b"HTTP/1.1 413 ")


def test_clients_that_leave_with_requests_behind_end_the_first_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    runner = fake_runner(save_byte_tokenizer(tmp_path), step_seconds=0.002)
    body = json.dumps({"prompts": ["ka"], "max_tokens": 100_000, "ignore_eos": True}).encode()
    asked = b"POST /v1/generate HTTP/1.1\r\nhost: here\r\ncontent-length: %d\r\n\r\n%b"
    with listening(runner) as (url, service):
        requests = service.lifecycle.runtime.requests
        with socket.create_connection(address(url), timeout=30) as client:
            client.sendall(asked % (len(body), body) * 2)
            wait_for(lambda: requests)
        wait_for(lambda: not requests)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_pipelined_requests_are_answered_in_their_order(tmp_path: Path) -> None:
    """Each has a watch of its own on the one connection."""
    runner = fake_runner(save_byte_tokenizer(tmp_path), step_seconds=0.002)
    asked = {"max_tokens": 9, "ignore_eos": True}
    bodies = [json.dumps({"prompts": [prompt], **asked}).encode() for prompt in PROMPTS]
    with (
        listening(runner) as (url, _),
        socket.create_connection(address(url), timeout=30) as client,
    ):
        for i, body in enumerate(bodies):
            last = b"connection: close\r\n" if i == len(bodies) - 1 else b""
            client.sendall(
                b"POST /v1/generate HTTP/1.1\r\nhost: here\r\n%bcontent-length: %d\r\n\r\n%b"
                % (last, len(body), body)
            )
        came = b"".join(iter(partial(client.recv, 65536), b""))
    answers = came.split(b"HTTP/1.1 200 OK\r\n")[1:]
    usages = [json.loads(answer.partition(b"\r\n\r\n")[2])["usage"] for answer in answers]
    assert [usage["prompt_tokens"] for usage in usages] == [len(prompt) for prompt in PROMPTS]
    assert [usage["completion_tokens"] for usage in usages] == [9] * len(PROMPTS)


@pytest.mark.parametrize("stream", [False, True])
def test_what_wraps_an_answer_adds_to_a_head_that_brings_its_body(
    tmp_path: Path, stream: bool
) -> None:
    runner = fake_runner(save_byte_tokenizer(tmp_path))
    with listening(runner, cors_origin=["https://page"]) as (url, _):
        body = {"prompts": ["a"], "max_tokens": 3, "stream": stream}
        headers = {"origin": "https://page", "x-request-id": "mine"}
        answer = httpx.post(f"{url}/v1/generate", json=body, headers=headers)
    assert answer.status_code == 200 and "gen-mine" in answer.text
    assert answer.headers["access-control-allow-origin"] == "https://page"
    assert answer.headers["x-request-id"] == "mine" and "date" in answer.headers
    assert ("content-length" in answer.headers) is not stream


def test_a_proxy_tells_redirects_the_scheme(tmp_path: Path) -> None:
    with listening(fake_runner(save_byte_tokenizer(tmp_path))) as (url, _):
        for headers, scheme in (({}, "http"), ({"x-forwarded-proto": "https"}, "https")):
            answer = httpx.post(f"{url}/v1/generate/", headers=headers)
            assert answer.status_code == 307
            assert answer.headers["location"].startswith(f"{scheme}://")
