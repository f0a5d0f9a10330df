"""Several API processes of one server: their parent (`Host`) and each of them (`main`).

The parent starts each API process as `python -m service.server.api_processes`.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import signal
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress

from engine.errors import ConfigError, EngineDead, EngineError
from engine.supervisor.api_process_pool import ApiProcessPool, Command
from engine.supervisor.supervisor import Supervisor
from engine.supervisor.supervisor_client import remote_supervisor
from service.server.end_signals import EndSignals
from service.settings import Settings

logger = logging.getLogger(__name__)

MODULE = "service.server.api_processes"
# Seconds beyond `drain_timeout` that an API process may take to end after its drain.
LAST_WORDS = 15


class Host:
    """The parent of a server's API processes; it keeps them and the engines running.

    Requests and tokens do not pass through it, and it imports no HTTP code. Signals have the same
    effect as in a server with one API process (`service.server.end_signals`).
    """

    def __init__(
        self, supervisor: Supervisor, settings: Settings, listeners: Sequence[socket.socket]
    ) -> None:
        """Prepare one API process for each listening socket; `run` starts them."""
        self._settings = settings
        self._supervisor = supervisor
        self._listeners = listeners
        given = settings.to_json()
        commands = [
            Command(
                MODULE,
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
        """Run the server until it has ended; return the error if it failed, else None."""
        loop = asyncio.get_running_loop()
        for sig in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(sig, self._on_signal, sig)
        ruling = asyncio.create_task(self._supervisor.run())
        keeping = asyncio.create_task(self._processes.keep())
        ending = asyncio.create_task(self._ending.wait())
        await asyncio.wait({ruling, keeping, ending}, return_when=asyncio.FIRST_COMPLETED)
        failure: EngineError | None = None
        if keeping.done():
            failure = EngineDead("an API process keeps failing and is not restarted any more")
        self._supervisor.hold()
        for listener in self._listeners:  # drained processes leave new connections to the others
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


def main(arguments: list[str]) -> int:
    """Run one API process until its parent ends it; return the exit code.

    `arguments`: the command line. The process reads its settings from standard input and the
    supervisor's messages from the pipe. It ignores signals; the parent handles them.
    """
    from service.server.api_server import run_application  # HTTP, which the parent does without

    parser = argparse.ArgumentParser(
        prog=MODULE, description="Run one API process. Started by `minserve serve` only."
    )
    parser.add_argument("--number", type=int, required=True, help="its number in log lines")
    parser.add_argument(
        "--listen", type=int, required=True, help="file descriptor of the listening socket"
    )
    parser.add_argument(
        "--pipe", type=int, required=True, help="file descriptor of the parent's pipe"
    )
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    settings = Settings.from_json(sys.stdin.buffer.read())
    logging.basicConfig(
        level=settings.log_level.upper(),
        format=f"minserve[{options.number}]: %(message)s",
        stream=sys.stderr,
    )
    listener = socket.socket(fileno=options.listen)
    engines = remote_supervisor(options.pipe)
    try:
        failure = run_application(engines, settings, listener, signals=False)
    except ConfigError as error:  # a file has changed since the parent checked it
        logger.error("error: %s", error.message)
        return 2
    return 1 if failure else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
