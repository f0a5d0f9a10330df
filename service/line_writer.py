"""LineWriter: lines for a file descriptor, written by a thread of its own.

Whoever reads the other end may be slow, stop or leave, and a disk may be full. None of that holds
up the event loop or fails a request: lines that find too many before them are dropped, and so are
those that cannot be written; how many were lost is logged once lines can be written again.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from queue import Empty, SimpleQueue

logger = logging.getLogger(__name__)

MOST_WAITING = 65_536  # lines
MOST_AT_ONCE = 1024  # lines in one write
GATHER_SECONDS = 0.02  # from the first line of a write until the write
CLOSE_SECONDS = 2.0  # for what is left at the end


class LineWriter:
    """Begins its thread with the first line."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._lines: SimpleQueue[bytes | None] = SimpleQueue()  # None = the end
        self._thread: threading.Thread | None = None
        self._refused = 0  # lines that found no room; of the caller's thread
        self._lost = 0  # lines that could not be written, and refused ones told of

    def write(self, line: bytes) -> None:
        """Takes a line, without its end. Never waits."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="lines", daemon=True)
            self._thread.start()
        if self._lines.qsize() >= MOST_WAITING:
            self._refused += 1
        else:
            self._lines.put(line)

    def close(self) -> None:
        """Writes what is left, for a while at most."""
        if self._thread is not None:
            self._lines.put(None)
            self._thread.join(CLOSE_SECONDS)
            self._thread = None

    def _run(self) -> None:
        told = 0
        ended = False
        while not ended:
            lines = [self._lines.get()]
            if lines[0] is not None:
                # Others follow soon, and every turn of this thread is taken from the event loop's.
                time.sleep(GATHER_SECONDS)
            try:
                while len(lines) < MOST_AT_ONCE:
                    lines.append(self._lines.get_nowait())
            except Empty:
                pass
            ended = None in lines
            chosen = [line + b"\n" for line in lines if line is not None]
            try:
                self._write_all(b"".join(chosen))
            except OSError:
                self._lost += len(chosen)
                continue
            lost = self._lost + self._refused
            if lost > told:
                logger.warning("warning: %d log lines could not be written", lost - told)
                told = lost

    def _write_all(self, data: bytes) -> None:
        while data:
            data = data[os.write(self._descriptor, data) :]
