"""Runtime: what every endpoint of one application shares, and the state of its life.

loading -> ready -> draining        (and from each of them: failed)
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from fastapi import Request

from engine.client import EngineClient
from engine.errors import Draining, EngineDead, EngineError, EngineLoading
from engine.messages import ModelInfo
from service.chat_template import ChatTemplate
from service.flight import Flight
from service.metrics import Metrics
from service.places import Places
from service.settings import Settings
from service.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


class Runtime:
    """`on_failure` is called once when the model cannot be loaded or the engine has died."""

    def __init__(
        self,
        client: EngineClient,
        settings: Settings,
        on_failure: Callable[[EngineError], None] | None = None,
    ) -> None:
        self.client = client
        self.settings = settings
        self.metrics = Metrics(client)
        self.metrics.set_limits(settings.max_waiting, settings.max_waiting_tokens)
        self.tokenizer: Tokenizer | None = None
        self.chat = ChatTemplate(None)
        self.failure: EngineError | None = None
        self.draining = False
        self.loaded_at = 0  # seconds since 1970
        self.flights: set[Flight] = set()
        self.places = Places(
            client, lambda: self.info.slots, settings.max_waiting, settings.max_waiting_tokens
        )
        self._info: ModelInfo | None = None
        self._on_failure = on_failure

    @property
    def state(self) -> Literal["loading", "ready", "draining", "failed"]:
        if self.failure is not None or self.client.state == "dead":
            return "failed"
        if self.draining:
            return "draining"
        return "loading" if self._info is None else "ready"

    def check_ready(self) -> None:
        """Raises the error that says why no request can be taken now."""
        match self.state:
            case "failed":
                reason = self.failure.message if self.failure else "the engine has ended"
                raise EngineDead(reason)
            case "draining":
                raise Draining("the server is shutting down and takes no new requests")
            case "loading":
                raise EngineLoading("the model is still loading")

    @property
    def info(self) -> ModelInfo:
        """The loaded model. Raises EngineLoading."""
        if self._info is None:
            raise EngineLoading("the model is still loading")
        return self._info

    @property
    def model_name(self) -> str:
        """What clients call the model."""
        return self.settings.model_name or self.info.name

    def flight(self, arrived: float, owner: str, least_priority: int) -> Flight:
        """One HTTP request that arrived then, by time.perf_counter (a context manager); `owner` is
        the name of its key, which may ask for priorities from `least_priority` on."""
        return Flight(
            self.client, self.metrics, self.places, self.flights, arrived, owner, least_priority
        )

    async def live(self) -> None:
        """Waits for the model, then watches over the engine until it ends or this is cancelled."""
        if self.failure is not None:
            return
        try:
            info = await self.client.ready(self.settings.load_timeout)
            folder = Path(info.folder)
            self.tokenizer = await asyncio.to_thread(Tokenizer.load, folder, info.vocab_size)
            self.chat = await asyncio.to_thread(ChatTemplate.load, folder, self.tokenizer)
            self.metrics.model_loaded(self.settings.model_name or info.name, info)
            self.client.on_step(self.metrics.on_step)
            self.loaded_at = int(time.time())
            self._info = info
            logger.info(
                "ready: %s (%s parameters) on %s, %s%s%s",
                self.model_name,
                f"{info.parameters:,}",
                info.device_name,
                info.dtype,
                f", {info.quantization} weights" if info.quantization else "",
                ", deterministic" if info.deterministic else "",
            )
            await self.client.wait_dead()
            raise EngineDead("the engine has ended")
        except EngineLoading:
            seconds = self.settings.load_timeout
            self.fail(EngineDead(f"the model did not load within {seconds:g} s (load_timeout)"))
        except EngineError as error:
            self.fail(error)
        except Exception as error:
            logger.exception("unexpected error while loading")
            self.fail(EngineDead(f"unexpected error while loading: {error}"))

    def fail(self, error: EngineError) -> None:
        """There is no engine, for this reason."""
        self.failure = error
        logger.error("error: %s", error.message)
        if self._on_failure is not None:
            self._on_failure(error)

    async def drain(self, timeout: float) -> None:
        """Takes nothing new and returns when everything in flight has ended, which after `timeout`
        seconds is made to end with what it has. A request is in flight from its arrival on."""
        self.draining = True
        deadline = asyncio.get_running_loop().time() + timeout
        while self.flights and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(0.02)
        self.cut()

    def cut(self) -> None:
        """Ends everything in flight with what it has."""
        for flight in list(self.flights):
            flight.cut()


def get_runtime(request: Request) -> Runtime:
    """The application's runtime, as a FastAPI dependency."""
    runtime: Runtime = request.app.state.runtime
    return runtime
