"""ApiProcessPool: a supervisor's API processes, restarted when they end.

An API process inherits one end of a pipe. Its settings come on standard input, because other users
can read arguments and environments. It runs in its own process group, so that signals to the
server's group reach only the supervising process, which tells the API processes what to do.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

from engine.subprocesses import describe_exit, module_environment
from engine.supervisor.channel import SocketPipe
from engine.supervisor.control_messages import FromApiProcess, Shutdown, ToApiProcess
from engine.supervisor.supervisor import Supervisor

log = logging.getLogger(__name__)

LOOK_SECONDS = 5.0  # between two checks whether a process answers
STEADY_SECONDS = 10.0  # a process that ends sooner counts as a quick end
MOST_QUICK_ENDS = 5  # in a row; then give up, unless other processes are steady
LONGEST_WAIT = 30.0  # the longest wait before the next start


@dataclass(frozen=True)
class Command:
    """How to start an API process: `python -P -m MODULE *arguments --pipe N`."""

    module: str
    arguments: Sequence[str]
    given: bytes  # written to its standard input
    handles: Sequence[int]  # file descriptors that it inherits under the same numbers


class ApiProcessPool:
    """Runs one API process for each command, from `keep` until `finish`."""

    def __init__(self, supervisor: Supervisor, commands: Sequence[Command], hang: float) -> None:
        """Create the pool; kill processes that do not answer for `hang` seconds (0 = never)."""
        self._supervisor = supervisor
        self._commands = commands
        self._hang = hang
        self._finishing = asyncio.Event()
        self._processes: set[asyncio.subprocess.Process] = set()
        # start time (time.monotonic) of each running process, by number
        self._begun: dict[int, float] = {}
        self._tasks: list[asyncio.Task[None]] = []

    async def keep(self) -> None:
        """Start all processes and restart those that end; return when that is hopeless.

        It is hopeless when one process ends quickly again and again and none of the others is
        steady. The cause may be a mistake in a file that the others read before it was changed.
        """
        self._tasks = [
            asyncio.create_task(self._keep(number, command))
            for number, command in enumerate(self._commands, start=1)
        ]
        await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)

    async def finish(self, seconds: float) -> None:
        """Start no more processes, tell all to drain, and wait until they have ended.

        Processes that still run after `seconds` are killed.
        """
        self._finishing.set()
        self._supervisor.api_processes.tell(Shutdown(now=False))
        if not self._tasks:
            return
        _, late = await asyncio.wait(self._tasks, timeout=seconds)
        if late:
            log.warning("%d API processes do not end in time; killing them", len(self._processes))
            for process in self._processes:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
            await asyncio.wait(late)

    def cut(self) -> None:
        """Tell all processes to end at once."""
        self._supervisor.api_processes.tell(Shutdown(now=True))

    async def _keep(self, number: int, command: Command) -> None:
        quick = 0
        while not self._finishing.is_set():
            begun = self._begun[number] = time.monotonic()
            try:
                reason = await self._run(command)
            except Exception:
                log.exception("unexpected error with API process %d", number)
                return
            finally:
                del self._begun[number]
            if self._finishing.is_set():
                return
            quick = quick + 1 if time.monotonic() - begun < STEADY_SECONDS else 0
            steady = time.monotonic() - STEADY_SECONDS
            if quick >= MOST_QUICK_ENDS and all(one > steady for one in self._begun.values()):
                log.error(
                    "error: API process %d keeps ending right after its start (%s)", number, reason
                )
                return
            seconds = min(2.0 ** min(quick - 2, 9), LONGEST_WAIT) if quick > 1 else 0.0
            log.error("error: API process %d has ended (%s); starting another", number, reason)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._finishing.wait(), seconds)

    async def _run(self, command: Command) -> str:
        """Run one process to its end, and describe how it ended."""
        ours, theirs = socket.socketpair()
        with theirs:
            handle = theirs.fileno()
            try:
                process = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-P", "-m", command.module, *command.arguments),
                    *("--pipe", str(handle)),
                    stdin=asyncio.subprocess.PIPE,
                    env=module_environment(),
                    pass_fds=(handle, *command.handles),
                    process_group=0,
                )
            except OSError as error:
                ours.close()
                return f"it cannot be started: {sys.executable}: {error.strerror or error}"
        self._processes.add(process)
        watch: asyncio.Task[None] | None = None
        try:
            pipe: SocketPipe[FromApiProcess, ToApiProcess] = SocketPipe(ours, FromApiProcess)
            await pipe.open()
            name = self._supervisor.join(pipe)
            if self._finishing.is_set():
                pipe.send(Shutdown(now=False))
            watch = asyncio.create_task(self._watch(name, process))
            with contextlib.suppress(OSError):  # the process may end before it has read its input
                await process.communicate(command.given)
            return describe_exit(await process.wait())
        finally:
            self._processes.discard(process)
            if watch is not None:
                watch.cancel()
            if process.returncode is None:
                process.kill()

    async def _watch(self, name: str, process: asyncio.subprocess.Process) -> None:
        """Kill the process when it does not answer for too long."""
        look = min(LOOK_SECONDS, self._hang) or LOOK_SECONDS
        silent, heard = 0.0, False
        while process.returncode is None:
            begun = time.monotonic()
            if await self._supervisor.api_processes.answers(name, look):
                silent, heard = 0.0, True
            elif heard:  # a process that never answered may still be starting
                silent += look
            if self._hang and silent >= self._hang:
                log.error("error: an API process did not answer for %g s; killing it", self._hang)
                process.kill()
                return
            await asyncio.sleep(max(0.0, look - (time.monotonic() - begun)))
