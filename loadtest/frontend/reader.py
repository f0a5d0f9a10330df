"""The clients: sockets that ask, count the bytes that come, and ask again.

They must cost less than the server that they measure, so nothing is parsed.
"""

from __future__ import annotations

import json
import os
import random
import select
import socket
import time
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from typing import NamedTuple

from loadtest.frontend.board import Board
from loadtest.frontend.cases import Case
from loadtest.frontend.processes import cpu_seconds

EVENT = b'"token_ids":['  # one in each event with tokens
STREAM_END = b"\r\n0\r\n\r\n"
# Where all that comes is read to; a fresh buffer for each read would cost more than the read.
BUFFER = bytearray(1 << 18)
KEY = "0123456789abcdef-loadtest"  # the API key that is shown


class Target(NamedTuple):
    """A server: its process id, address and board."""

    pid: int
    address: tuple[str, int]
    board: Path


class Schedule(NamedTuple):
    """The times, by time.monotonic, at which clients load each of several servers in turn.

    In turn, so that changes of the cores' speed affect all servers alike.
    """

    begin: float
    warm_up: float  # before the first turn of each
    settle: float  # before the others
    seconds: float  # of a turn
    turns: int  # of each

    def slices(self, servers: int) -> Iterator[tuple[int, float, float, float]]:
        """Yield for each turn: server, begin of its load, begin of counting, end."""
        at = self.begin
        for turn in range(self.turns):
            for which in range(servers):
                counted = at + (self.settle if turn else self.warm_up)
                yield which, at, counted, counted + self.seconds
                at = counted + self.seconds


@dataclass
class Reading:
    """The figures of one process's clients, for one server in its turns."""

    tokens: int = 0
    seconds: float = 0.0
    cpu: float = 0.0  # seconds of this process within them
    server_cpu: float = 0.0  # and of the server's
    latencies: array[float] = field(default_factory=lambda: array("d"))  # of a paced load


class _Client:
    """One connection."""

    def __init__(self, address: tuple[str, int], requests: Iterator[bytes], case: Case) -> None:
        self.socket = socket.create_connection(address)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._requests = requests
        self._case = case
        self._kept = b""  # the end of what came, where a mark may begin
        self._missing = -1  # bytes of a plain answer; -1: its head has not come
        self.seen = 0  # tokens of every prompt of this answer

    def ask(self) -> None:
        self.socket.sendall(next(self._requests))
        self._kept, self._missing, self.seen = b"", -1, 0

    def read(self) -> int:
        """Read what has arrived and return its number of tokens; ask again at an answer's end.

        Raises RuntimeError for a wrong answer.
        """
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


def _requests(case: Case, seed: int) -> Iterator[bytes]:
    """Return an endless sequence of whole requests, rendered beforehand."""
    lengths = range(case.tokens - case.spread, case.tokens + case.spread + 1)
    requests = []
    for tokens in lengths:
        body = json.dumps(case.body_of(tokens)).encode()
        head = (
            f"POST /v1/generate HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {KEY}\r\n"
            f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        requests.append(head.encode() + body)
    random.Random(seed).shuffle(requests)
    return cycle(requests)


class _Clients:
    """The connections of this process to one server.

    Nothing is read between its turns, so that its streams wait.
    """

    def __init__(self, case: Case, target: Target, which: int, connections: int) -> None:
        self._board = Board(target.board)
        self._pid = target.pid
        self._which = which
        self._tokens = 0
        requests = _requests(case, which)
        self._clients: dict[int, _Client] = {}
        self._poll = select.epoll()
        for _ in range(connections):
            client = _Client(target.address, requests, case)
            self._clients[client.socket.fileno()] = client
            self._poll.register(client.socket, select.EPOLLIN)
        self.reading = Reading()

    def ask(self) -> None:
        for client in self._clients.values():
            client.ask()

    def read_until(self, end: float, latencies: array[float] | None = None) -> None:
        """Read until `end`, and ask again when an answer has ended.

        Appends to `latencies` the seconds from each token's step, of a steady pace, to its arrival.
        """
        board = self._board
        while (left := end - time.monotonic()) > 0:
            for descriptor, _ in self._poll.poll(min(left, 0.1)):
                client = self._clients[descriptor]
                seen = client.seen
                came = client.read()
                self._tokens += came
                if latencies is not None:
                    at = time.monotonic_ns()
                    latencies.extend((at - board.time_of(seen + i)) / 1e9 for i in range(came))
            board.count(self._which, self._tokens)

    def count_until(self, end: float) -> None:
        """Read until `end`, and add the figures to `reading`."""
        reading = self.reading
        tokens, started = self._tokens, time.monotonic()
        own, server = time.process_time(), cpu_seconds(self._pid)
        self.read_until(end, reading.latencies if self._board.period_ns else None)
        reading.tokens += self._tokens - tokens
        reading.seconds += time.monotonic() - started
        reading.cpu += time.process_time() - own
        reading.server_cpu += cpu_seconds(self._pid) - server

    def close(self) -> None:
        for client in self._clients.values():
            client.socket.close()


def get_ready(seconds: float) -> None:
    """Sleep, so that every process of the pool is started before the measurement."""
    time.sleep(seconds)


def read(
    case: Case,
    targets: Sequence[Target],
    which: int,
    connections: int,
    core: int | None,
    schedule: Schedule,
) -> list[Reading]:
    """Run `connections` clients of `case` for each target, and count during its turns.

    Raises RuntimeError if the clients are too late for their first turn.
    """
    if core is not None:
        os.sched_setaffinity(0, {core})
    servers = [_Clients(case, target, which, connections) for target in targets]
    late = time.monotonic() - schedule.begin
    if late > schedule.warm_up / 2:
        raise RuntimeError(f"the clients were {late:.1f} s late")
    asked = set()
    for server, begin, counted, end in schedule.slices(len(servers)):
        time.sleep(max(0.0, begin - time.monotonic()))
        if server not in asked:
            servers[server].ask()
            asked.add(server)
        servers[server].read_until(counted)
        servers[server].count_until(end)
    for one in servers:
        one.close()
    return [one.reading for one in servers]
