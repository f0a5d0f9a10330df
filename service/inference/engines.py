"""Engines: the source of an application's engines.

That is a supervisor, in this process or in another one, or a single client made by the caller.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from engine.client.client import EngineClient
from engine.client.router import EngineRouter
from engine.errors import EngineDead, EngineError, EngineLoading, Refused
from engine.protocol.events import ModelInfo
from engine.supervisor.supervisor_client import Event, NoEngine, Serving


class Engines(Protocol):
    """Interface of engine.supervisor.supervisor_client.SupervisorClient, which documents it.

    All methods are called on one event loop.
    """

    async def start(self, collect: Callable[[], bytes]) -> None: ...
    async def next(self) -> Event: ...
    def use(self, generation: int) -> None: ...
    async def leave(self, generation: int) -> None: ...
    async def reload(self, model: str | None) -> ModelInfo: ...
    async def gather(self, own: bytes) -> list[bytes]: ...
    def hold(self) -> None: ...
    async def close(self) -> None: ...


class OneEngine:
    """Engines with a single client, for tests and measurements; the engine is never restarted."""

    def __init__(self, client: EngineClient, load_timeout: float) -> None:
        self._client = client
        self._load_timeout = load_timeout
        self._serving = False

    async def start(self, collect: Callable[[], bytes]) -> None:
        await self._client.start()

    async def next(self) -> Event:
        if self._serving:
            await self._client.wait_dead()
            return NoEngine(EngineDead("the engine has ended"))
        self._serving = True
        try:
            await self._client.ready(self._load_timeout)
        except EngineLoading:
            seconds = self._load_timeout
            error = EngineDead(f"the model did not load within {seconds:g} s (load_timeout)")
            return NoEngine(error)
        except EngineError as error:
            return NoEngine(error)
        return Serving(EngineRouter([self._client]), generations=(1,))

    def use(self, generation: int) -> None:
        """Do nothing: there is one engine."""

    async def leave(self, generation: int) -> None:
        """Do nothing: there is no other engine to leave it for."""

    async def reload(self, model: str | None) -> ModelInfo:
        raise Refused("this server cannot load another model")

    async def gather(self, own: bytes) -> list[bytes]:
        return []

    def hold(self) -> None:
        """Do nothing: no engine is ever restarted."""

    async def close(self) -> None:
        await self._client.close()
