"""`serve` in a process of its own, the fake engine in a worker: socket, signals, exit codes."""

from __future__ import annotations

import os
import signal
import socket
import time
from contextlib import suppress
from pathlib import Path

import httpx
import pytest

from service.server.end_signals import ECHO_SECONDS, EndSignals
from tests.service.process import Process, children, serving


def test_it_serves_and_sigterm_finishes_what_is_in_flight() -> None:
    with serving() as process:
        process.said("ready: fake")
        with httpx.Client(base_url=process.url, timeout=60) as client:
            assert client.get("/ready").status_code == 200
            body = {"prompts": [[97]], "max_tokens": 5000, "ignore_eos": True, "stream": True}
            with client.stream("POST", "/v1/generate", json=body) as response:
                lines = response.iter_lines()
                assert next(lines).startswith("data: ")
                process.popen.send_signal(signal.SIGTERM)
                process.said("shutting down")
                process.popen.send_signal(signal.SIGTERM)  # at once: an echo
                # The socket stays open while it drains, for an honest 503.
                with httpx.Client(base_url=process.url, timeout=60) as other:
                    answers = [other.get("/ready"), other.post("/v1/generate", json=body)]
                    large = {**body, "prompts": ["a" * 2**23]}
                    late = other.post("/v1/generate", json=large)
                rest = [line for line in lines if line]
            for answer in answers:
                assert answer.status_code == 503
                assert answer.headers["connection"] == "close"  # the next one goes elsewhere
            assert late.status_code == 503  # and is not lost with the connection
            assert (len(rest), rest[-1]) == (5000, "data: [DONE]")
        assert process.exit_code() == 0
        assert not any("Traceback" in line for line in process.lines)


@pytest.mark.parametrize(
    "signal_", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)]
)
def test_a_signal_to_the_whole_process_group_finishes_what_is_in_flight(signal_: int) -> None:
    """As a supervisor or Ctrl-C sends it: the engine's process has it too, and must live on."""
    with serving() as process:
        process.said("ready: fake")
        with httpx.Client(base_url=process.url, timeout=60) as client:
            body = {"prompts": [[97]], "max_tokens": 5000, "ignore_eos": True, "stream": True}
            with client.stream("POST", "/v1/generate", json=body) as response:
                lines = response.iter_lines()
                next(lines)
                os.killpg(process.popen.pid, signal_)
                rest = [line for line in lines if line]
            assert (len(rest), rest[-1]) == (5000, "data: [DONE]")
        assert process.exit_code() == 0
        assert not any("Traceback" in line or "error" in line for line in process.lines)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        pytest.param(signal.SIGINT, signal.SIGINT, marks=pytest.mark.slow),
        pytest.param(signal.SIGTERM, signal.SIGTERM, marks=pytest.mark.slow),
        (signal.SIGTERM, signal.SIGINT),
    ],
)
def test_a_second_signal_does_not_wait(first: int, second: int) -> None:
    with serving() as process:
        process.said("ready: fake")
        with httpx.Client(base_url=process.url, timeout=60) as client:
            body = {"prompts": [[97]], "max_tokens": 10**6, "ignore_eos": True, "stream": True}
            with client.stream("POST", "/v1/generate", json=body) as response:
                lines = response.iter_lines()
                next(lines)
                process.popen.send_signal(first)
                process.said("shutting down")
                if second == signal.SIGTERM:
                    time.sleep(ECHO_SECONDS)
                process.popen.send_signal(second)
                *_, last, done = [line for line in lines if line]
        assert '"finish_reason":"abort"' in last
        assert done == "data: [DONE]"
        assert process.exit_code() == 0
        assert not any("Traceback" in line for line in process.lines)


def test_which_signals_hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("service.server.end_signals.time.monotonic", lambda: now)
    term, interrupt = EndSignals(), EndSignals()
    assert not term.hurries(signal.SIGTERM) and not interrupt.hurries(signal.SIGINT)
    assert not term.hurries(signal.SIGTERM), "GNU timeout sends it twice"
    assert interrupt.hurries(signal.SIGINT)
    now += ECHO_SECONDS
    assert term.hurries(signal.SIGTERM) and interrupt.hurries(signal.SIGTERM)


def test_a_port_in_use_is_one_line_and_code_2() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with serving(port=port) as process:
            assert process.exit_code() == 2
            (line,) = process.lines
            assert f"127.0.0.1:{port}" in line and "in use" in line


def test_the_engines_death_ends_streams_with_an_error_and_the_process_with_code_1() -> None:
    with serving(engine_restarts=0) as process:
        process.said("ready: fake")
        (worker,) = children(process.popen.pid)
        with httpx.Client(base_url=process.url, timeout=60) as client:
            body = {"prompts": [[97]], "max_tokens": 10**6, "ignore_eos": True, "stream": True}
            with client.stream("POST", "/v1/generate", json=body) as response:
                lines = response.iter_lines()
                next(lines)
                os.kill(worker, signal.SIGKILL)
                last = [line for line in lines if line][-1]
        assert last.startswith('data: {"error":') and "engine_dead" in last
        assert process.exit_code() == 1
        assert not any("Traceback" in line for line in process.lines)


def test_a_model_that_cannot_be_loaded_is_an_error_and_code_2() -> None:
    with serving(engine="tests.service.server.test_server:no_such_checkpoint") as process:
        assert process.exit_code() == 2
        # The worker's own log has it too.
        assert process.lines.count("minserve: error: no such checkpoint") == 1, process.lines
        assert not any("Traceback" in line for line in process.lines)


def test_an_engine_that_cannot_be_started_is_an_error_and_code_1() -> None:
    with serving(python="/no/such/python") as process:
        assert process.exit_code() == 1
        *_, line = process.lines  # the others say where it listens and which model it serves
        assert sum("error:" in one for one in process.lines) == 1
        assert line.startswith("minserve: error: the engine process cannot be started: ")
        assert "/no/such/python" in line


def no_such_checkpoint(_: object) -> None:
    """An engine factory, for the worker."""
    from engine.errors import CheckpointError

    raise CheckpointError("no such checkpoint")


def test_an_idle_server_stops_at_once() -> None:
    with serving() as process:
        process.said("ready: fake")
        process.popen.send_signal(signal.SIGINT)
        assert process.exit_code() == 0


@pytest.mark.parametrize("chunked", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_client_that_sends_too_much_gets_its_413(chunked: bool) -> None:
    """Though it reads nothing before it has sent all of its body."""
    size, count = 2**20, 40
    head = b"POST /v1/generate HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    length = b"transfer-encoding: chunked" if chunked else b"content-length: %d" % (size * count)
    piece = b"x" * size
    if chunked:
        piece = b"%x\r\n%b\r\n" % (size, piece)
    with serving() as process:
        process.said("ready: fake")
        host, port = process.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=60) as client:
            client.sendall(head + length + b"\r\n\r\n")
            for _ in range(count):
                client.sendall(piece)
            if chunked:
                client.sendall(b"0\r\n\r\n")
            answer = b""
            while data := client.recv(2**16):
                answer += data
        assert answer.startswith(b"HTTP/1.1 413 ")
        assert b"body_too_large" in answer


def _address(process: Process) -> tuple[str, int]:
    host, port = process.url.removeprefix("http://").split(":")
    return host, int(port)


def _raw(process: Process, *pieces: bytes) -> bytes:
    """All that comes back for what is sent, until the server closes the connection."""
    answer = b""
    with socket.create_connection(_address(process), timeout=60) as client:
        with suppress(ConnectionError):  # while it is being sent
            for piece in pieces:
                client.sendall(piece)
        with suppress(ConnectionError):
            while data := client.recv(2**16):
                answer += data
    return answer


def test_a_head_without_end_is_refused() -> None:
    with serving() as process:
        process.said("ready: fake")
        fits = b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\nx: %b\r\n\r\n"
        assert _raw(process, fits % (b"x" * 60_000)).startswith(b"HTTP/1.1 200 ")
        body = b"GET /health HTTP/1.1\r\ncontent-length: 2\r\nx: %b\r\n\r\n{}" + fits % b""
        for size in (2**16, 100_000):  # more than one read takes at once, or less: all the same
            for head in (fits, body):
                assert _raw(process, head % (b"x" * size)).startswith(b"HTTP/1.1 431 ")
        one_header = b"GET /health HTTP/1.1\r\nx: ", *[b"x" * 10_000] * 10_000
        many = b"GET /health HTTP/1.1\r\n", *[b"x: %b\r\n" % (b"y" * 10_000)] * 10_000
        for pieces in (one_header, many):
            answer = _raw(process, *pieces)
            assert not answer or answer.startswith(b"HTTP/1.1 431 ")  # a reset may take it away
        head = b"GET /health HTTP/1.1\r\nhost: x\r\nx: "
        assert httpx.get(f"{process.url}/ready").status_code == 200
        with socket.create_connection(_address(process), timeout=60) as client:
            for piece in (head, *[b"x" * 10_000] * 8):  # slowly, so that each is a read
                client.sendall(piece)
                time.sleep(0.05)
            assert client.recv(2**16).startswith(b"HTTP/1.1 431 ")


def test_a_request_that_does_not_end_loses_its_connection() -> None:
    head = b"POST /v1/generate HTTP/1.1\r\nhost: x\r\ncontent-length: 99\r\n\r\n{"
    with serving(receive_timeout=0.5) as process:
        process.said("ready: fake")
        for sent in (b"", b"GET / HT", head[:-10]):
            assert _raw(process, sent) == b""
        answer = _raw(process, head)
        assert answer.startswith(b"HTTP/1.1 408 ") and b"body_too_slow" in answer
        told = httpx.get(f"{process.url}/metrics").text
        assert 'minserve_connections_cut_total{reason="late_head"} 3.0\n' in told
        assert 'minserve_request_errors_total{code="body_too_slow"} 1.0\n' in told
        with httpx.Client(base_url=process.url, timeout=60) as client:  # one that works stays
            body = {"prompts": [[97]], "max_tokens": 2000, "ignore_eos": True}
            begun = time.monotonic()
            while time.monotonic() < begun + 1:
                assert client.post("/v1/generate", json=body).status_code == 200


def _sockets(pid: int) -> int:
    folder = Path(f"/proc/{pid}/fd")
    if not folder.exists():
        pytest.skip("needs /proc")
    links = []
    for link in folder.iterdir():
        with suppress(FileNotFoundError):  # closed meanwhile
            links.append(str(link.readlink()))
    return sum(link.startswith("socket:") for link in links)


@pytest.mark.parametrize("stream", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_client_that_reads_nothing_loses_its_connection(stream: bool) -> None:
    """Though its buffers are full: what waits to be written must not keep the socket open."""
    body = b'{"prompts": [[97]], "max_tokens": 1000000, "ignore_eos": true, "stream": true}'
    head = b"POST /v1/generate HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    request = head + b"content-length: %d\r\n\r\n%b" % (len(body), body)
    if not stream:  # many plain answers, asked for at once
        request = b"GET /openapi.json HTTP/1.1\r\nhost: x\r\n\r\n" * 1000
    with serving(stall_timeout=1) as process:
        process.said("ready: fake")
        address = process.url.removeprefix("http://").split(":")
        before = _sockets(process.popen.pid)
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.connect((address[0], int(address[1])))
            client.sendall(request)
            deadline = time.monotonic() + 60
            connected = False
            while not (connected and _sockets(process.popen.pid) == before):
                connected = connected or _sockets(process.popen.pid) > before
                assert time.monotonic() < deadline, "the connection was never closed"
                time.sleep(0.02)
            assert httpx.get(f"{process.url}/ready").status_code == 200
            with pytest.raises(ConnectionResetError):
                while client.recv(2**20):
                    pass
        told = httpx.get(f"{process.url}/metrics").text
        assert "\nminserve_requests_running 0.0\n" in told
        assert 'minserve_connections_cut_total{reason="stalled"} 1.0\n' in told
