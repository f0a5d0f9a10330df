"""Running the application: the socket, the signals and the exit code.

SIGTERM and SIGINT drain: the socket stays open, so that /ready and new requests get their 503,
until everything in flight has ended or `drain_timeout` is over. A second SIGINT does not wait; a
second SIGTERM changes nothing, for supervisors may signal a process and its group.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import resource
import signal
import socket
import sys
from contextlib import suppress
from types import FrameType

import uvicorn
from fastapi import FastAPI

from engine.client import EngineClient
from engine.errors import CheckpointError, ConfigError, DeviceError, EngineError
from service.app import create_app
from service.runtime import Runtime
from service.settings import Settings
from service.stalled import MeteredProtocol, cut_stalled
from service.tls import CIPHERS, check_tls

logger = logging.getLogger(__name__)

BACKLOG = 2048
# After a drain, streams that were cut write their last frames; seconds.
LAST_FRAMES = 5


class Server(uvicorn.Server):
    """uvicorn's server, whose first signal drains."""

    def __init__(self, config: uvicorn.Config, runtime: Runtime) -> None:
        super().__init__(config)
        self._runtime = runtime
        self._loop: asyncio.AbstractEventLoop | None = None
        self._drain: asyncio.Task[None] | None = None

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        settings, connections = self._runtime.settings, self.server_state.connections
        watch = asyncio.create_task(
            cut_stalled(
                connections,
                settings.stall_timeout,
                settings.receive_timeout,
                self._runtime.metrics.connection_cut,
            )
        )
        try:
            await super().serve(sockets)
        finally:
            watch.cancel()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Runs in a signal handler, so it only leaves a note for the event loop."""
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._on_signal, sig)

    def stop(self) -> None:
        """Ends when the responses under way are written."""
        self.should_exit = True

    def _on_signal(self, sig: int) -> None:
        if self._drain is None:
            logger.info("shutting down: finishing what is in flight")
            self._drain = asyncio.create_task(self._drain_and_stop())
        elif sig == signal.SIGINT:
            self._runtime.cut()
            self.stop()

    async def _drain_and_stop(self) -> None:
        await self._runtime.drain(self._runtime.settings.drain_timeout)
        self.stop()


def serve(settings: Settings) -> int:
    """Serves until a signal ends it. Returns the exit code: 2 when the socket, the checkpoint or
    the device cannot be used, 1 when the engine died, else 0. Raises ConfigError."""
    logging.basicConfig(
        level=settings.log_level.upper(), format="minserve: %(message)s", stream=sys.stderr
    )
    check_tls(settings.tls_certificate, settings.tls_key)
    failures: list[EngineError] = []

    def on_failure(error: EngineError) -> None:
        failures.append(error)
        server.stop()

    app = create_app(EngineClient.spawn(settings.engine_config()), settings, on_failure)
    try:
        listener = listen(settings.host, settings.port)
    except OSError as error:
        reason = error.strerror or error
        logger.error("error: cannot listen on %s:%d: %s", settings.host, settings.port, reason)
        return 2
    server = Server(_uvicorn_config(app, settings), app.state.runtime)
    host, port = listener.getsockname()[:2]
    address = f"[{host}]" if ":" in host else host
    scheme = "https" if settings.tls_certificate else "http"
    url = f"{scheme}://{address}:{port}"
    logger.info("listening on %s (see /docs); loading %s", url, settings.model)
    _calm_collector()
    _raise_file_limit()
    with listener:
        server.run([listener])
    if not failures:
        return 0
    return 2 if isinstance(failures[0], ConfigError | CheckpointError | DeviceError) else 1


def _calm_collector() -> None:
    """The garbage collector leaves alone what lives as long as the process, which it would look
    through again and again: up to a third of a busy server's time. It still runs often: refusals
    leave cycles behind, and to free 50,000 objects at once takes a third of a second."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(1_000, 20, 50)


def _raise_file_limit() -> None:
    """Every connection is an open file, and the soft limit is often 1,024."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def listen(host: str, port: int) -> socket.socket:
    """A listening socket. Raises OSError: the port is in use, the host is not ours."""
    family, _, _, _, address = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    return socket.create_server(address[:2], family=family, backlog=BACKLOG)


def _uvicorn_config(app: FastAPI, settings: Settings) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http=MeteredProtocol,
        log_config=None,
        log_level="warning" if settings.log_level == "info" else settings.log_level,
        access_log=settings.log_level == "debug",
        lifespan="on",
        server_header=False,
        timeout_graceful_shutdown=LAST_FRAMES,
        ssl_certfile=settings.tls_certificate,
        ssl_keyfile=settings.tls_key,
        ssl_ciphers=CIPHERS,
    )
