"""The access log: one line for each HTTP request, written when it has ended, however it ended.

It tells who asked for what, what came of it and what it cost. It never holds a prompt, an answer,
a key, or a path as it was sent: the route's template stands for it.
"""

from __future__ import annotations

import logging
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import lru_cache

import msgspec

from service.settings import AccessLogFormat

logger = logging.getLogger(__name__)

MOST_WAITING = 65_536  # lines
MOST_AT_ONCE = 2**20  # bytes in one write, unless one line is longer
GATHER_SECONDS = 0.02  # between writes; a wake-up per line would cost the event loop more than it
CLOSE_SECONDS = 2.0  # for what is left at the end


class Exchange(msgspec.Struct, frozen=True, kw_only=True):
    """What a line tells; the JSON line has these fields."""

    time: str  # of the end, UTC
    request_id: str
    method: str
    route: str  # a template, "other" for what is none
    status: int  # 499: the client left before its answer's end
    outcome: str | None  # of work for the model, as in minserve_requests_total
    seconds: float  # from the request's headers until the answer's last byte
    tokens_in: int | None  # prompt tokens given to the engine; samples share their prompt
    tokens_out: int | None  # generated tokens that came from the engine
    key: str | None  # the name of the key
    peer: str | None = None  # the address of who sent what cannot be read as HTTP


class AccessLog:
    """Gives lines in one of the formats to `write`."""

    def __init__(self, format: AccessLogFormat, write: Callable[[bytes], None]) -> None:
        self._render = {"json": msgspec.json.Encoder().encode, "text": _as_text}.get(format)
        self._write = write

    @property
    def on(self) -> bool:
        """Whether lines are written at all."""
        return self._render is not None

    def add(self, exchange: Exchange) -> None:
        """Writes one line."""
        if self._render is not None:
            self._write(self._render(exchange))


def timestamp() -> str:
    """Now, in UTC, to the millisecond."""
    milliseconds = time.time_ns() // 1_000_000
    return f"{_whole(milliseconds // 1000)}.{milliseconds % 1000:03d}Z"


@lru_cache(maxsize=2)
def _whole(seconds: int) -> str:
    """Of which there are many lines."""
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds))


def _as_text(line: Exchange) -> bytes:
    """No value has spaces; what there is none of is left out."""
    parts = [line.time, line.method, line.route, str(line.status), f"{line.seconds:.6f}s"]
    for name in ("outcome", "tokens_in", "tokens_out", "key", "peer", "request_id"):
        value = getattr(line, name)
        if value is not None:
            parts.append(f"{name}={value}")
    return " ".join(parts).encode()


class LineWriter:
    """Writes lines to a file descriptor in a thread of its own, which begins with the first line.

    The reader of the other end may be slow, stop or leave, and a disk may be full. None of that
    delays the event loop or fails a request: lines that find too many before them are dropped, and
    so are those that cannot be written; how many were lost is logged once lines can be written
    again, and at the end.
    """

    def __init__(self, descriptor: int, shared: bool = False) -> None:
        """`shared`: other processes write there too. Then no write is longer than a pipe takes
        whole, so that no line is torn."""
        self._descriptor = descriptor
        self._most_bytes = select.PIPE_BUF if shared else MOST_AT_ONCE
        self._lines: deque[bytes] = deque()
        self._news = threading.Event()  # the thread is awake, or should be
        self._ending = threading.Event()
        self._thread: threading.Thread | None = None
        self._refused = 0  # lines that found no room; of the caller's thread
        self._lost = 0  # lines that could not be written, and refused ones told of

    def write(self, line: bytes) -> None:
        """Takes a line, without its end. Never waits."""
        if self._thread is None:
            self._ending = threading.Event()
            arguments = (self._ending,)
            self._thread = threading.Thread(
                target=self._run, args=arguments, name="lines", daemon=True
            )
            self._thread.start()
        if len(self._lines) >= MOST_WAITING:
            self._refused += 1
            return
        self._lines.append(line)
        if not self._news.is_set():
            self._news.set()

    def close(self) -> None:
        """Writes what is left, for a while at most."""
        if self._thread is not None:
            self._ending.set()
            self._news.set()
            self._thread.join(CLOSE_SECONDS)
            self._thread = None

    def _run(self, ending: threading.Event) -> None:
        told = 0
        while True:
            self._news.wait()
            ending.wait(GATHER_SECONDS)
            # Cleared before the look: a line that comes after it sets it again.
            self._news.clear()
            while self._lines:
                chosen = self._batch()
                try:
                    self._write_all(b"".join(chosen))
                except OSError:
                    self._lost += len(chosen)
                    continue
                told = self._tell(told)
            if ending.is_set():
                self._tell(told)
                return

    def _tell(self, told: int) -> int:
        """Logs what was lost beyond `told`; how many that makes."""
        lost = self._lost + self._refused
        if lost > told:
            logger.warning("warning: %d log lines could not be written", lost - told)
        return lost

    def _batch(self) -> list[bytes]:
        """The next lines, as many as one write takes; at least one."""
        chosen: list[bytes] = []
        size = 0
        while self._lines:
            size += len(self._lines[0]) + 1
            if chosen and size > self._most_bytes:
                break
            chosen.append(self._lines.popleft() + b"\n")
        return chosen

    def _write_all(self, data: bytes) -> None:
        while data:
            data = data[os.write(self._descriptor, data) :]
