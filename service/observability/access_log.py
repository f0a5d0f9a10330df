"""The access log: one line for each HTTP request, written when the request has ended.

A line says who asked for what, how it ended and what it cost. It never holds a prompt, an answer, a
key or the path as it was sent; the template of the route replaces the path.
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

MOST_WAITING = 65_536  # lines in the buffer; more are dropped
MOST_AT_ONCE = 2**20  # bytes in one write, unless one line is longer
GATHER_SECONDS = 0.02  # between writes; waking the thread for each line costs more than the line
CLOSE_SECONDS = 2.0  # to write the remaining lines at the end


class Exchange(msgspec.Struct, frozen=True, kw_only=True):
    """One HTTP request and its answer; these are the fields of a JSON line."""

    time: str  # when it ended, in UTC
    request_id: str
    method: str
    route: str  # the route's template, or "other"
    status: int  # 499: the client disconnected before the answer's end
    outcome: str | None  # of inference requests, as in minserve_requests_total
    seconds: float  # from the request's headers until the answer's last byte
    tokens_in: int | None  # prompt tokens given to the engine; samples share their prompt
    tokens_out: int | None  # generated tokens
    key: str | None  # the API key's name
    peer: str | None = None  # the client's address, for requests that are not valid HTTP


class AccessLog:
    """Renders requests as lines and passes them to a writer."""

    def __init__(self, format: AccessLogFormat, write: Callable[[bytes], None]) -> None:
        """`write`: takes each line, without its end."""
        self._render = {"json": msgspec.json.Encoder().encode, "text": _as_text}.get(format)
        self._write = write

    @property
    def on(self) -> bool:
        """Whether the log is on."""
        return self._render is not None

    def add(self, exchange: Exchange) -> None:
        """Write the line of one request."""
        if self._render is not None:
            self._write(self._render(exchange))


def timestamp() -> str:
    """Return the time now, in UTC with milliseconds."""
    milliseconds = time.time_ns() // 1_000_000
    return f"{_whole(milliseconds // 1000)}.{milliseconds % 1000:03d}Z"


@lru_cache(maxsize=2)
def _whole(seconds: int) -> str:
    """Return a time in UTC with whole seconds; cached, as many lines are of the same second."""
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds))


def _as_text(line: Exchange) -> bytes:
    """Return a text line: fixed fields, then name=value pairs of those that are not None.

    No value has spaces.
    """
    parts = [line.time, line.method, line.route, str(line.status), f"{line.seconds:.6f}s"]
    for name in ("outcome", "tokens_in", "tokens_out", "key", "peer", "request_id"):
        value = getattr(line, name)
        if value is not None:
            parts.append(f"{name}={value}")
    return " ".join(parts).encode()


class LineWriter:
    """Writes lines to a file descriptor on a thread of its own, which starts with the first line.

    A slow or closed reader or a full disk never delays the event loop or fails a request. Lines are
    dropped if too many are waiting or if they cannot be written. The number of dropped lines is
    logged when lines can be written again, and at the end.
    """

    def __init__(self, descriptor: int, shared: bool = False) -> None:
        """`shared`: other processes write to the descriptor, too.

        Writes then have at most PIPE_BUF bytes, which are atomic on a pipe: no line is torn.
        """
        self._descriptor = descriptor
        self._most_bytes = select.PIPE_BUF if shared else MOST_AT_ONCE
        self._lines: deque[bytes] = deque()
        self._news = threading.Event()  # wakes the thread
        self._ending = threading.Event()
        self._thread: threading.Thread | None = None
        self._refused = 0  # lines dropped by `write`, in the caller's thread
        self._lost = 0  # lines that the thread could not write

    def write(self, line: bytes) -> None:
        """Queue a line, without its end. Never waits."""
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
        """Write the remaining lines, for at most CLOSE_SECONDS."""
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
            # Cleared before the lines are taken: a line that is added later sets it again.
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
        """Log how many lines were lost beyond the `told` ones; return the number of all."""
        lost = self._lost + self._refused
        if lost > told:
            logger.warning("warning: %d log lines could not be written", lost - told)
        return lost

    def _batch(self) -> list[bytes]:
        """Take the next lines for one write: as many as fit, at least one."""
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
