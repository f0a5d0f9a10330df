"""Host: the process of a server with several API processes. It keeps them and the engine running
and tells them when to end; requests and tokens do not pass through it.

Signals mean what they mean in a server of one process (`service.server.end_signals`).
"""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
from collections.abc import Sequence
from contextlib import suppress

from engine.errors import EngineDead, EngineError
from engine.supervisor.api_process_pool import ApiProcessPool, Command
from engine.supervisor.supervisor import Supervisor
from service.server.end_signals import EndSignals
from service.settings import Settings

logger = logging.getLogger(__name__)

# Beyond `drain_timeout`, for what an API process does after its drain; seconds.
LAST_WORDS = 15


class Host:
    """`run` is the life of a server."""

    def __init__(
        self, supervisor: Supervisor, settings: Settings, listeners: Sequence[socket.socket]
    ) -> None:
        """One API process for each socket."""
        self._settings = settings
        self._supervisor = supervisor
        self._listeners = listeners
        given = settings.to_json()
        commands = [
            Command(
                "service.server.api_processes",
                ("--number", str(number), "--listen", str(listener.fileno())),
                given,
                (listener.fileno(),),
            )
            for number, listener in enumerate(listeners, start=1)
        ]
        self._processes = ApiProcessPool(self._supervisor, commands, settings.hang_timeout)
        self._signals = EndSignals()
        self._ending = asyncio.Event()

    async def run(self) -> EngineError | None:
        """Returns when all has ended; where that was for want of an engine, why."""
        loop = asyncio.get_running_loop()
        for sig in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(sig, self._on_signal, sig)
        ruling = asyncio.create_task(self._supervisor.run())
        keeping = asyncio.create_task(self._processes.keep())
        ending = asyncio.create_task(self._ending.wait())
        await asyncio.wait({ruling, keeping, ending}, return_when=asyncio.FIRST_COMPLETED)
        failure: EngineError | None = None
        if keeping.done():
            failure = EngineDead("an API process cannot be kept running")
        self._supervisor.hold()
        for listener in self._listeners:  # who has drained leaves new connections to the others
            listener.close()
        await self._processes.finish(self._settings.drain_timeout + LAST_WORDS)
        if ruling.done():
            failure = failure or ruling.result()
        for task in (ruling, keeping, ending):
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
        await self._supervisor.close()
        if failure is not None:
            logger.error("error: %s", failure.message)
        return failure

    def _on_signal(self, sig: int) -> None:
        if self._signals.hurries(sig):
            self._processes.cut()
        elif not self._ending.is_set():
            logger.info("shutting down: finishing what is in flight")
            self._ending.set()
