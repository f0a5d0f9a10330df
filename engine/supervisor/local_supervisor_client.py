"""LocalSupervisorClient: the end of a supervisor that runs in the same process, as with one API
process."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

from engine.errors import EngineError
from engine.supervisor.channel import memory_pipe
from engine.supervisor.supervisor import Supervisor
from engine.supervisor.supervisor_client import SupervisorClient


class LocalSupervisorClient(SupervisorClient):
    """The one member of a supervisor in the same process, which it runs from its start to its
    end."""

    def __init__(self, supervisor: Supervisor) -> None:
        self._supervisor = supervisor
        self._ruling: asyncio.Task[EngineError] | None = None
        mine, theirs = memory_pipe()
        super().__init__(mine)
        self._theirs = theirs

    async def start(self, collect: Callable[[], bytes] = bytes) -> None:
        await super().start(collect)
        self._supervisor.join(self._theirs)
        self._ruling = asyncio.create_task(self._supervisor.run())

    async def gather(self, own: bytes) -> list[bytes]:
        """There are no others."""
        return []

    def hold(self) -> None:
        self._supervisor.hold()

    async def close(self) -> None:
        if self._ruling is not None:
            self._ruling.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._ruling
        await super().close()
        await self._supervisor.close()
