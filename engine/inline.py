"""InlineTransport: an engine stepped on a thread of this process, for tests and commands."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import threading
from collections import deque
from collections.abc import Callable, Hashable, Iterable

from engine.client.socket_transport import GREETING, STOP_SECONDS
from engine.errors import EngineDead
from engine.loop import EngineLoop, SteppedEngine
from engine.protocol.events import FromEngine
from engine.protocol.requests import Shutdown, ToEngine

log = logging.getLogger(__name__)


class InlineTransport:
    """Runs an engine on a thread of this process, for tests and one-off commands."""

    def __init__(self, engine: SteppedEngine) -> None:
        self._engine = engine
        self._inbox: queue.SimpleQueue[ToEngine] = queue.SimpleQueue()
        self._outbox: deque[FromEngine] = deque()
        self._news = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._ended = False

    async def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()
        self.send(GREETING)

    def send(self, message: ToEngine) -> None:
        if self._ended or self._thread is None:
            raise EngineDead("the in-line engine has ended")
        self._inbox.put(message)

    async def receive(self) -> FromEngine:
        while not self._outbox:
            if self._ended:
                raise EngineDead("the in-line engine has ended")
            self._news.clear()
            await self._news.wait()
        return self._outbox.popleft()

    async def close(self) -> None:
        if self._thread is None:
            return
        self._inbox.put(Shutdown())
        await asyncio.to_thread(self._thread.join, STOP_SECONDS)
        if self._thread.is_alive():
            log.warning("the in-line engine does not end; abandoning its thread")
        self._end()

    def _run(self) -> None:
        try:
            EngineLoop(self._engine, _QueueMailbox(self._inbox, self._hand_over)).run()
        except Exception:
            log.exception("the in-line engine has died")
        self._on_loop(self._end)

    def _hand_over(self, message: FromEngine) -> None:
        self._on_loop(lambda: self._put(message))

    def _on_loop(self, callback: Callable[[], None]) -> None:
        assert self._loop is not None
        with contextlib.suppress(RuntimeError):  # the event loop is closed, so nobody is listening
            self._loop.call_soon_threadsafe(callback)

    def _put(self, message: FromEngine) -> None:
        self._outbox.append(message)
        self._news.set()

    def _end(self) -> None:
        self._ended = True
        self._news.set()


class _QueueMailbox:
    """The mailbox of an in-line engine, which has exactly one client."""

    def __init__(
        self, inbox: queue.SimpleQueue[ToEngine], deliver: Callable[[FromEngine], None]
    ) -> None:
        self._inbox = inbox
        self._deliver = deliver

    def receive(self, timeout: float) -> Iterable[tuple[Hashable, ToEngine]]:
        try:
            yield None, self._inbox.get(block=timeout > 0, timeout=timeout)
            while True:
                yield None, self._inbox.get_nowait()
        except queue.Empty:
            return

    def send(self, client: Hashable, message: FromEngine) -> None:
        self._deliver(message)
