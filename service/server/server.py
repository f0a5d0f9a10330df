"""`serve`: a server from its socket to its exit code.

SIGTERM and SIGINT drain; a second signal does not wait (`service.server.end_signals`).

One API process is the server's only one beside the engine's; several have a host
(`service.server.api_processes`), which imports nothing of HTTP.
"""

from __future__ import annotations

import asyncio
import logging
import resource
import socket
import sys
from contextlib import ExitStack, suppress

from engine.errors import CheckpointError, ConfigError, DeviceError, EngineError
from engine.supervisor.supervisor import Supervisor
from service.inference.supervision import make_supervisor
from service.keys import load_keys
from service.server.sockets import address_of, check_tls, listening
from service.settings import PREFIX, Settings, unknown_variables

logger = logging.getLogger(__name__)


def serve(settings: Settings, engine: str | None = None) -> int:
    """Serves until a signal ends it, by an engine of this factory ("module:function") where one is
    named. Returns the exit code: 2 when the socket, the checkpoint or
    the device cannot be used, 1 when the engine died for good, else 0. Raises ConfigError."""
    logging.basicConfig(
        level=settings.log_level.upper(), format="minserve: %(message)s", stream=sys.stderr
    )
    _check_variables()
    check_tls(settings.tls_certificate, settings.tls_key)
    if settings.api_workers > 1:
        _check_for_others(settings)
    _check_socket(settings)
    supervisor = make_supervisor(settings, engine)
    with ExitStack() as stack:
        try:
            listeners = stack.enter_context(listening(settings))
        except OSError as error:
            where = f"{settings.host}:{settings.port}"
            if settings.uds is not None:
                where = f"unix:{settings.uds}"
            logger.error("error: cannot listen on %s: %s", where, error.strerror or error)
            return 2
        return _run(supervisor, settings, listeners)


def _run(supervisor: Supervisor, settings: Settings, listeners: list[socket.socket]) -> int:
    """Serves what comes to the sockets. Returns the exit code."""
    url = address_of(listeners[0], tls=settings.tls_certificate is not None)
    logger.info("listening on %s (see /docs); loading %s", url, settings.model)
    _raise_file_limit()
    if len(listeners) == 1:
        from engine.supervisor.supervisor_client import LocalSupervisorClient
        from service.server.api_server import run_application

        failure = run_application(LocalSupervisorClient(supervisor), settings, listeners[0])
    else:
        from service.server.api_processes import Host

        failure = asyncio.run(Host(supervisor, settings, listeners).run())
    return exit_code(failure)


def _check_socket(settings: Settings) -> None:
    """Raises ConfigError for a unix socket with TLS."""
    if settings.uds is None:
        return
    if settings.tls_certificate is not None:
        raise ConfigError(
            "--uds (MINSERVE_UDS) and --tls-certificate (MINSERVE_TLS_CERTIFICATE) are both given; "
            "allowed: one; over a unix socket TLS ends at the proxy"
        )
    for name in sorted({"host", "port"} & settings.model_fields_set):
        logger.info("%s is not used: the server listens at a unix socket", PREFIX + name.upper())


def _check_variables() -> None:
    """Of the environment: a slip in a name would leave a setting, which may be the keys, at its
    default. Others have reasons of their own (Kubernetes names services so). Raises ConfigError."""
    for name, meant in unknown_variables().items():
        if meant is not None:
            raise ConfigError(f"{name} is no setting; probably {meant} is meant")
        logger.warning("%s is no setting of this server: nothing reads it", name)


def _check_for_others(settings: Settings) -> None:
    """Reads what each API process is going to read, which is too late to tell of a mistake. Raises
    ConfigError."""
    load_keys(settings)
    if settings.traces == "otlp":
        from service.observability import otel

        otel.load().close()


def exit_code(failure: EngineError | None) -> int:
    """Of a server that has ended, for want of an engine where `failure` says why."""
    if failure is None:
        return 0
    return 2 if isinstance(failure, ConfigError | CheckpointError | DeviceError) else 1


def _raise_file_limit() -> None:
    """Every connection is an open file, and the soft limit is often 1,024. Processes started here
    have the same one."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
