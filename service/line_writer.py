"""LineWriter: lines for a file descriptor, written by a thread of its own.

Whoever reads the other end may be slow, stop or leave, and a disk may be full. None of that holds
up the event loop or fails a request: lines that find too many before them are dropped, and so are
those that cannot be written; how many were lost is logged once lines can be written again.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import deque

logger = logging.getLogger(__name__)

MOST_WAITING = 65_536  # lines
MOST_AT_ONCE = 1024  # lines in one write
GATHER_SECONDS = 0.02  # between writes; a wake-up per line would cost the event loop more than it
CLOSE_SECONDS = 2.0  # for what is left at the end


class LineWriter:
    """Begins its thread with the first line."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._lines: deque[bytes] = deque()
        self._news = threading.Event()  # the thread is awake, or should be
        self._ending = threading.Event()
        self._thread: threading.Thread | None = None
        self._refused = 0  # lines that found no room; of the caller's thread
        self._lost = 0  # lines that could not be written, and refused ones told of

    def write(self, line: bytes) -> None:
        """Takes a line, without its end. Never waits."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="lines", daemon=True)
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
            self._ending.clear()

    def _run(self) -> None:
        told = 0
        while True:
            self._news.wait()
            self._ending.wait(GATHER_SECONDS)
            # Cleared before the look: a line that comes after it sets it again.
            self._news.clear()
            while self._lines:
                count = min(len(self._lines), MOST_AT_ONCE)
                chosen = [self._lines.popleft() + b"\n" for _ in range(count)]
                try:
                    self._write_all(b"".join(chosen))
                except OSError:
                    self._lost += len(chosen)
                    continue
                lost = self._lost + self._refused
                if lost > told:
                    logger.warning("warning: %d log lines could not be written", lost - told)
                    told = lost
            if self._ending.is_set():
                return

    def _write_all(self, data: bytes) -> None:
        while data:
            data = data[os.write(self._descriptor, data) :]
