"""run_application: runs the application on its socket until it is told to end.

The first signal drains: the socket stays open, and /ready and new requests get 503, until all
requests in flight have ended or `drain_timeout` is over. A second signal ends the requests in
flight with what they have.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Generator
from contextlib import contextmanager
from types import FrameType

import uvicorn
from fastapi import FastAPI

from engine import gc_tuning
from engine.errors import EngineError
from service.app.app import create_app
from service.http.uvicorn_protocol import HttpProtocol, cut_stalled
from service.inference.engines import Engines
from service.inference.lifecycle import Lifecycle
from service.server.end_signals import EndSignals
from service.server.sockets import CIPHERS
from service.settings import Settings

logger = logging.getLogger(__name__)

# Seconds after a drain for streams that were cut to write their last events.
LAST_FRAMES = 5


class Server(uvicorn.Server):
    """uvicorn's server, which drains at the first signal and watches its connections."""

    def __init__(self, config: uvicorn.Config, lifecycle: Lifecycle, signals: bool = True) -> None:
        """`signals`: handle SIGTERM and SIGINT; else the caller calls `end`."""
        super().__init__(config)
        self._lifecycle = lifecycle
        self._signals = EndSignals() if signals else None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._drain: asyncio.Task[None] | None = None

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        settings, connections = self._lifecycle.settings, self.server_state.connections
        watch = asyncio.create_task(
            cut_stalled(
                connections,
                settings.stall_timeout,
                settings.receive_timeout,
                self._lifecycle.metrics.connection_cut,
            )
        )
        try:
            await super().serve(sockets)
        finally:
            watch.cancel()

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        if self._signals is None:
            yield
            return
        with super().capture_signals():
            yield

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Handle a signal. This runs in a signal handler, so it only calls the event loop."""
        assert self._loop is not None and self._signals is not None
        self._loop.call_soon_threadsafe(self.end, self._signals.hurries(sig))

    def stop(self) -> None:
        """End the server when the responses in progress have been written."""
        self.should_exit = True

    def end(self, hurry: bool) -> None:
        """Drain and then stop; if called again with `hurry`, end all requests at once."""
        if self._drain is None:
            logger.info("shutting down: finishing what is in flight")
            self._drain = asyncio.create_task(self._drain_and_stop())
        elif hurry:
            self._lifecycle.cut()
            self.stop()

    async def _drain_and_stop(self) -> None:
        await self._lifecycle.drain(self._lifecycle.settings.drain_timeout)
        self.stop()


def run_application(
    engines: Engines, settings: Settings, listener: socket.socket, signals: bool = True
) -> EngineError | None:
    """Serve requests on the socket until a signal or the supervisor ends the server.

    Args:
        engines: The source of engines.
        settings: The server's settings.
        listener: The listening socket.
        signals: Handle SIGTERM and SIGINT.

    Returns: the error if no engine was left, else None. Raises ConfigError.
    """
    failures: list[EngineError] = []

    def on_failure(error: EngineError) -> None:
        failures.append(error)
        server.stop()

    app = create_app(engines, settings, on_failure)
    lifecycle: Lifecycle = app.state.lifecycle
    server = Server(_uvicorn_config(app, settings), lifecycle, signals)
    lifecycle.on_stop = server.end
    gc_tuning.tune_gc()
    with listener:
        server.run([listener])
    return failures[0] if failures else None


def _uvicorn_config(app: FastAPI, settings: Settings) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http=HttpProtocol,
        log_config=None,
        log_level="warning" if settings.log_level == "info" else settings.log_level,
        access_log=settings.log_level == "debug",
        lifespan="on",
        server_header=False,
        proxy_headers=False,  # FastRouter handles them
        timeout_graceful_shutdown=LAST_FRAMES,
        timeout_keep_alive=settings.keep_alive_timeout,  # type: ignore[arg-type]  # of call_later
        ssl_certfile=settings.tls_certificate,
        ssl_keyfile=settings.tls_key,
        ssl_ciphers=CIPHERS,
    )
