"""The clients: sockets that ask, count what comes by its bytes, and ask again.

They must cost less than the server that they measure, so nothing is parsed.
"""

from __future__ import annotations

import json
import os
import select
import socket
import time
from array import array
from dataclasses import dataclass
from pathlib import Path

from loadtest.frontend.board import Board
from loadtest.frontend.cases import Case

EVENT = b'"token_ids":['  # one in each event with tokens
STREAM_END = b"\r\n0\r\n\r\n"
# Where all that comes is read to; a fresh buffer for each read would cost more than the read.
BUFFER = bytearray(1 << 18)
KEY = "0123456789abcdef-loadtest"  # the API key that is shown


@dataclass
class Reading:
    """What the clients of one process have seen."""

    tokens: int
    seconds: float
    cpu: float  # seconds of this process within them
    latencies: array[float]  # from the engine's step until here, of a paced load


class _Client:
    """One connection."""

    def __init__(self, address: tuple[str, int], request: bytes, case: Case) -> None:
        self.socket = socket.create_connection(address)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._request = request
        self._case = case
        self._kept = b""  # the end of what came, where a mark may begin
        self._missing = -1  # bytes of a plain answer; -1: its head has not come
        self._left = 0  # tokens of this answer
        self.seen = 0  # tokens of every prompt of this answer

    def ask(self) -> None:
        self.socket.sendall(self._request)
        self._kept, self._missing, self.seen = b"", -1, 0

    def read(self) -> int:
        """Tokens in what has come; asks again at the end of an answer. Raises RuntimeError for an
        answer that is none."""
        size = self.socket.recv_into(BUFFER)
        if not size:
            raise RuntimeError("the server closed a connection")
        data = bytes(memoryview(BUFFER)[:size])
        if self._missing < 0:
            data = self._kept + data
            end = data.find(b"\r\n\r\n")
            if end < 0:
                self._kept = data
                return 0
            if not data.startswith(b"HTTP/1.1 200"):
                raise RuntimeError(data.decode(errors="replace"))
            head, data = data[:end].lower(), data[end + 2 :]  # with a mark's line end
            self._kept = b""
            length = head.partition(b"content-length: ")[2].partition(b"\r\n")[0]
            self._missing = int(length) + 2 if length else 0
        return self._stream(data) if self._case.stream else self._plain(data)

    def _stream(self, data: bytes) -> int:
        data = self._kept + data
        tokens = data.count(EVENT) * self._case.chunk
        self.seen += tokens
        if data.endswith(STREAM_END):
            self.ask()
        else:
            self._kept = data[1 - len(EVENT) :]
        return tokens

    def _plain(self, data: bytes) -> int:
        self._missing -= len(data)
        if self._missing > 0:
            return 0
        self.ask()
        return self._case.tokens * self._case.prompts


def read(
    case: Case,
    address: tuple[str, int],
    board_path: Path,
    which: int,
    connections: int,
    core: int | None,
    warm_up: float,
    seconds: float,
) -> Reading:
    """Runs `connections` clients of `case`, and counts for `seconds` after `warm_up`."""
    if core is not None:
        os.sched_setaffinity(0, {core})
    board = Board(board_path)
    body = json.dumps(case.body).encode()
    head = (
        f"POST /v1/generate HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {KEY}\r\n"
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    clients: dict[int, _Client] = {}
    poll = select.epoll()
    for _ in range(connections):
        client = _Client(address, head.encode() + body, case)
        clients[client.socket.fileno()] = client
        poll.register(client.socket, select.EPOLLIN)
    for client in clients.values():
        client.ask()
    paced = board.period_ns > 0
    latencies: array[float] = array("d")
    tokens = before = 0
    begin = time.monotonic() + warm_up
    end = begin + seconds
    started = cpu = 0.0
    now = time.monotonic()
    while now < end:
        for descriptor, _ in poll.poll(0.1):
            client = clients[descriptor]
            seen = client.seen
            came = client.read()
            tokens += came
            if paced and started:
                at = time.monotonic_ns()
                latencies.extend((at - board.time_of(seen + i)) / 1e9 for i in range(came))
        board.count(which, tokens)
        now = time.monotonic()
        if not started and now >= begin:
            started, before, cpu = now, tokens, time.process_time()
    for client in clients.values():
        client.socket.close()
    return Reading(tokens - before, now - started, time.process_time() - cpu, latencies)
