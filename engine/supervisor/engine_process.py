"""EngineProcess and RestartPolicy: one engine process of a supervisor, and when to restart it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque

from engine.client.client import EngineClient
from engine.client.socket_transport import ProcessTransport
from engine.config import EngineConfig
from engine.errors import EngineDead, EngineError, EngineLoading, EngineUnavailable
from engine.protocol.events import ModelInfo
from engine.protocol.requests import Gone
from engine.supervisor.control_messages import EngineEndpoint

log = logging.getLogger(__name__)

LOOK_SECONDS = 1.0  # between two checks whether the engine answers
LONGEST_RESTART_WAIT = 30.0  # seconds


class EngineProcess:
    """One engine process, from its load to its end; `generation` identifies it."""

    def __init__(self, generation: int, config: EngineConfig, engine: str | None = None) -> None:
        """Create it without starting; `engine` names its factory, as for ProcessTransport."""
        self.generation = generation
        self.config = config
        self.load_seconds = 0.0
        self._transport = ProcessTransport(config, engine)
        self._client = EngineClient(self._transport, quiet=True)
        self._address = ""
        self._closing = False

    @property
    def rank(self) -> int:
        """The engine's number among those that serve together, from 0."""
        return self.config.rank

    @property
    def serves(self) -> bool:
        """Whether it is loaded and has not ended."""
        return self._client.state == "ready" and not self._closing

    @property
    def info(self) -> ModelInfo:
        """The loaded model's info."""
        assert self._client.info is not None
        return self._client.info

    @property
    def endpoint(self) -> EngineEndpoint:
        """What API processes need to connect to it."""
        return EngineEndpoint(self.generation, self._address)

    async def load(self, timeout: float) -> None:
        """Start the process and wait until the model is loaded.

        Raises EngineDead after `timeout` seconds or when the process ends, and otherwise the
        EngineError that says why the model cannot be loaded.
        """
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
        """Wait until the process has ended, and return the reason.

        A process that does not answer for `hang_timeout` seconds is killed; 0: never.
        """
        look = min(LOOK_SECONDS, hang_timeout)
        # grows by at most `look` per turn, so that a pause of this process is not counted
        silent = 0.0
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

    def forget(self, name: str) -> None:
        """Tell the engine to abort the requests of the API process `name`, which has ended."""
        with contextlib.suppress(EngineDead):
            self._transport.send(Gone(name))

    async def close(self) -> None:
        """End the process; unfinished requests are aborted. Idempotent."""
        self._closing = True
        await self._client.close()


class RestartPolicy:
    """Decides how often, and how soon, an engine that died is restarted.

    Allows at most `most` starts within `window` seconds: the first at once, the next after 1, 2, 4,
    ... seconds. Starts older than the window are forgotten.
    """

    def __init__(self, most: int, window: float) -> None:
        self.most = most
        self.window = window
        self.total = 0  # restarts since the beginning
        self._times: deque[float] = deque()

    @property
    def recent(self) -> int:
        """Starts within the window, as of the latest one."""
        return len(self._times)

    def room_in(self, now: float) -> float:
        """Return the seconds until `wait` may allow another start after it has refused one."""
        return max(0.0, self._times[0] + self.window - now) if self._times else self.window

    def wait(self, now: float) -> float | None:
        """Count one more start and return the seconds until it is due; None: not allowed."""
        while self._times and now - self._times[0] >= self.window:
            self._times.popleft()
        if len(self._times) >= self.most:
            return None
        seconds = min(2.0 ** (len(self._times) - 1), LONGEST_RESTART_WAIT) if self._times else 0.0
        self._times.append(now + seconds)
        self.total += 1
        return seconds
