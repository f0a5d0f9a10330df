"""WorkerThreads: work that takes a while, done by threads beside the one that steps the engine.

A lane has one thread, which does one thing after the other in the order of `submit`, so what waits
for a disk holds up nothing that only has to be computed.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from contextlib import suppress

from engine.errors import EngineError

log = logging.getLogger(__name__)

Result = bytes | OSError | EngineError
Work = Callable[[], bytes]
Done = Callable[[Result], None]


class WorkerThreads:
    """`collect` hands out what has been done since it was last called. All methods are called by
    one thread, and so is every `done`."""

    def __init__(self) -> None:
        self.pending = 0  # things asked for and not yet collected
        self._lanes: dict[str, queue.SimpleQueue[tuple[Work, Done]]] = {}
        self._done: queue.SimpleQueue[tuple[Done, Result]] = queue.SimpleQueue()

    def submit(self, lane: str, work: Work, done: Done) -> None:
        """`done` is called with what `work` returns, or with the OSError or EngineError that it
        raises; what else it raises becomes an OSError."""
        asked = self._lanes.get(lane)
        if asked is None:
            asked = self._lanes[lane] = queue.SimpleQueue()
            threading.Thread(target=self._run, args=(asked,), name=lane, daemon=True).start()
        self.pending += 1
        asked.put((work, done))

    def collect(self) -> None:
        """Calls what waits to be called."""
        while self.pending:
            try:
                done, result = self._done.get_nowait()
            except queue.Empty:
                return
            self.pending -= 1
            done(result)
            del result  # which may be large, and is nobody's any more

    def wait(self, seconds: float) -> None:
        """Waits until something is done, or the time is over; then collects."""
        with suppress(queue.Empty):
            done, result = self._done.get(timeout=seconds)
            self.pending -= 1
            done(result)
            del result
        self.collect()

    def _run(self, asked: queue.SimpleQueue[tuple[Work, Done]]) -> None:
        while True:
            work, done = asked.get()
            result: Result
            try:
                result = work()
            except (OSError, EngineError) as error:
                result = error
            except Exception as error:
                log.exception("unexpected error with a state")
                result = OSError(str(error))
            self._done.put((done, result))
            del work, done, result  # they hold a state until the next one comes
