"""EngineProcess: one engine process in the care of a supervisor: its load, its pulse and its
end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time

from engine.client.client import EngineClient
from engine.client.socket_transport import ProcessTransport
from engine.config import EngineConfig
from engine.errors import EngineDead, EngineError, EngineLoading, EngineUnavailable
from engine.protocol.messages import Gone, ModelInfo
from engine.supervisor.control_messages import EngineEndpoint

log = logging.getLogger(__name__)

LOOK_SECONDS = 1.0  # between looks at whether it answers


class EngineProcess:
    """`generation` tells it apart from all others that its supervisor started."""

    def __init__(self, generation: int, config: EngineConfig, engine: str | None = None) -> None:
        """`engine`: its factory, as ProcessTransport has it."""
        self.generation = generation
        self.config = config
        self.load_seconds = 0.0
        self._transport = ProcessTransport(config, engine)
        self._client = EngineClient(self._transport, quiet=True)
        self._address = ""
        self._closing = False

    @property
    def rank(self) -> int:
        """Its place among those that serve together."""
        return self.config.rank

    @property
    def serves(self) -> bool:
        """It is loaded and has not ended."""
        return self._client.state == "ready" and not self._closing

    @property
    def info(self) -> ModelInfo:
        """Of the loaded model."""
        assert self._client.info is not None
        return self._client.info

    @property
    def seat(self) -> EngineEndpoint:
        """What members are told when it is to serve."""
        return EngineEndpoint(self.generation, self._address)

    async def load(self, timeout: float) -> None:
        """Starts the process and returns when the model is loaded. Raises the EngineError that is
        in the way; EngineDead after `timeout` seconds."""
        begun = time.monotonic()
        await self._client.start()
        self._address = self._transport.address or ""
        try:
            await self._client.ready(timeout)
        except EngineLoading:
            reason = f"the model did not load within {timeout:g} s (load_timeout)"
            self._transport.kill(reason)
            raise EngineDead(reason) from None
        self.load_seconds = time.monotonic() - begun

    async def death(self, hang_timeout: float) -> EngineError:
        """Returns when the process has ended, and why. One that has not answered for
        `hang_timeout` seconds (0: however long) is killed."""
        look = min(LOOK_SECONDS, hang_timeout)
        silent = 0.0  # at most `look` a turn: time in which this process stood still is no sign
        while hang_timeout and self._client.state != "dead":
            try:
                await self._client.ping(look)
            except EngineDead:
                break
            except EngineUnavailable:
                silent += look
                if silent >= hang_timeout:
                    reason = f"the engine did not answer for {hang_timeout:g} s and was killed"
                    self._transport.kill(reason)
                    break
                continue
            silent = 0.0
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._client.wait_dead(), look)
        await self._client.wait_dead()
        assert self._client.death is not None
        return self._client.death

    def forget(self, member: str) -> None:
        """What this member had in flight is nobody's any more."""
        with contextlib.suppress(EngineDead):
            self._transport.send(Gone(member))

    async def close(self) -> None:
        """Ends the process; what is unfinished is aborted. Idempotent."""
        self._closing = True
        await self._client.close()
