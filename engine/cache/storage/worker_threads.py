"""WorkerThreads: slow work, done by threads beside the one that steps the engine.

Each lane has one thread, which works in the order of `submit`. Work that waits for a disk does not
delay work that only computes.
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
    """Threads that run work; `collect` delivers the results.

    All methods are called by one thread, and so is every `done`.
    """

    def __init__(self) -> None:
        self.pending = 0  # work items submitted and not yet collected
        self._lanes: dict[str, queue.SimpleQueue[tuple[Work, Done]]] = {}
        self._done: queue.SimpleQueue[tuple[Done, Result]] = queue.SimpleQueue()

    def submit(self, lane: str, work: Work, done: Done) -> None:
        """Run `work` on the lane's thread.

        `done` is called with what it returns, or with the OSError or EngineError that it raises.
        Any other exception is converted to an OSError.
        """
        asked = self._lanes.get(lane)
        if asked is None:
            asked = self._lanes[lane] = queue.SimpleQueue()
            threading.Thread(target=self._run, args=(asked,), name=lane, daemon=True).start()
        self.pending += 1
        asked.put((work, done))

    def collect(self) -> None:
        """Call the callbacks of finished work."""
        while self.pending:
            try:
                done, result = self._done.get_nowait()
            except queue.Empty:
                return
            self.pending -= 1
            done(result)
            del result  # it may be large, and nobody needs it any more

    def wait(self, seconds: float) -> None:
        """Wait up to `seconds` until some work is finished; then collect."""
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
                log.exception("unexpected error while handling a state")
                result = OSError(str(error))
            self._done.put((done, result))
            del work, done, result  # or they would keep a state alive until the next work arrives
