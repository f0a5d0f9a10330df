"""ApiProcessPool: the API processes of a supervisor, started again when they end.

An API process inherits one end of a pipe, and what it has to know comes on its standard input:
arguments and environments can be read by others. It is in a process group of its own, so that
signals to this one's group reach this process alone, which tells its API processes what to do.
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

LOOK_SECONDS = 5.0  # between looks at whether a process answers
STEADY_SECONDS = 10.0  # one that ends sooner has a quick end
MOST_QUICK_ENDS = 5  # in a row; then there is no use in another, unless others are steady
LONGEST_WAIT = 30.0  # before the next one


@dataclass(frozen=True)
class Command:
    """How an API process is started: `python -P -m MODULE *arguments --pipe N`."""

    module: str
    arguments: Sequence[str]
    given: bytes  # its standard input
    handles: Sequence[int]  # file descriptors that it inherits under their numbers


class ApiProcessPool:
    """`keep` runs them until `finish`."""

    def __init__(self, supervisor: Supervisor, commands: Sequence[Command], hang: float) -> None:
        """`hang`: seconds after which one that does not answer is killed; 0 = never."""
        self._supervisor = supervisor
        self._commands = commands
        self._hang = hang
        self._finishing = asyncio.Event()
        self._processes: set[asyncio.subprocess.Process] = set()
        self._begun: dict[int, float] = {}  # of those that run, by number and time.monotonic
        self._tasks: list[asyncio.Task[None]] = []

    async def keep(self) -> None:
        """Returns when one of them cannot be kept: it ends again and again, and none of the others
        is steady. (What is wrong may be a file that they read before it had a mistake.)"""
        self._tasks = [
            asyncio.create_task(self._keep(number, command))
            for number, command in enumerate(self._commands, start=1)
        ]
        await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)

    async def finish(self, seconds: float) -> None:
        """Starts none any more, tells all to drain, and returns when they have ended; those that
        have not after so many seconds are killed."""
        self._finishing.set()
        self._supervisor.api_processes.tell(Shutdown(now=False))
        if not self._tasks:
            return
        _, late = await asyncio.wait(self._tasks, timeout=seconds)
        if late:
            log.warning("%d API processes do not end; killing them", len(self._processes))
            for process in self._processes:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
            await asyncio.wait(late)

    def cut(self) -> None:
        """Tells all to end at once."""
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
                log.error("error: API process %d ends again and again (%s)", number, reason)
                return
            seconds = min(2.0 ** min(quick - 2, 9), LONGEST_WAIT) if quick > 1 else 0.0
            log.error("error: API process %d has ended (%s); starting another", number, reason)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._finishing.wait(), seconds)

    async def _run(self, command: Command) -> str:
        """Runs one process to its end; how it ended."""
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
            with contextlib.suppress(OSError):  # it has ended before it read
                await process.communicate(command.given)
            return describe_exit(await process.wait())
        finally:
            self._processes.discard(process)
            if watch is not None:
                watch.cancel()
            if process.returncode is None:
                process.kill()

    async def _watch(self, name: str, process: asyncio.subprocess.Process) -> None:
        """Kills a process that does not answer."""
        look = min(LOOK_SECONDS, self._hang) or LOOK_SECONDS
        silent, heard = 0.0, False
        while process.returncode is None:
            begun = time.monotonic()
            if await self._supervisor.api_processes.answers(name, look):
                silent, heard = 0.0, True
            elif heard:  # else it is still starting
                silent += look
            if self._hang and silent >= self._hang:
                log.error("error: an API process did not answer for %g s; killing it", self._hang)
                process.kill()
                return
            await asyncio.sleep(max(0.0, look - (time.monotonic() - begun)))
