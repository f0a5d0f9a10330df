"""serve: runs a whole server, from its sockets to its exit code.

SIGTERM and SIGINT drain; a second signal ends the server at once (`service.server.end_signals`).

With one API process, this process serves HTTP. With several, it is their parent
(`service.server.api_processes`) and imports no HTTP code. Engines run in processes of their own.
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

FORMER_MODEL = "shakespeare-mingru"  # the default before library-mingru

logger = logging.getLogger(__name__)


def serve(settings: Settings, engine: str | None = None) -> int:
    """Serve until a signal ends the server.

    `engine`: the factory of the engine ("module:function"), for tests.

    Returns the exit code: 2 if the socket, the checkpoint or the device cannot be used, 1 if the
    engine died for good, else 0. Raises ConfigError.
    """
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
    """Serve requests on the sockets; return the exit code."""
    url = address_of(listeners[0], tls=settings.tls_certificate is not None)
    logger.info("listening on %s (see /docs); loading %s", url, settings.model)
    if "model" not in settings.model_fields_set:
        logger.info(
            "%s is the default model; --model %s serves the former one, whose kept states stay",
            settings.model,
            FORMER_MODEL,
        )
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
    """Raise ConfigError for a Unix socket with TLS; log settings that a Unix socket ignores."""
    if settings.uds is None:
        return
    if settings.tls_certificate is not None:
        raise ConfigError(
            "--uds (MINSERVE_UDS) and --tls-certificate (MINSERVE_TLS_CERTIFICATE) are both given; "
            "allowed: one of them; with a Unix socket, the proxy in front ends TLS"
        )
    for name in sorted({"host", "port"} & settings.model_fields_set):
        logger.info("%s is ignored: the server listens on a Unix socket", PREFIX + name.upper())


def _check_variables() -> None:
    """Raise ConfigError for a MINSERVE_ variable whose name looks misspelled; warn of others.

    A misspelled name would leave a setting at its default, for example the API keys. Other unknown
    names may have other reasons: Kubernetes makes such variables for services.
    """
    for name, meant in unknown_variables().items():
        if meant is not None:
            raise ConfigError(f"{name} is not a setting; did you mean {meant}?")
        logger.warning("%s is not a setting of this server: nothing reads it", name)


def _check_for_others(settings: Settings) -> None:
    """Check keys and traces, which each API process will load, so that mistakes show at start.

    Raises ConfigError.
    """
    load_keys(settings)
    if settings.traces == "otlp":
        from service.observability import otel

        otel.load().close()


def exit_code(failure: EngineError | None) -> int:
    """Return the exit code of a server that has ended; `failure`: why no engine was left."""
    if failure is None:
        return 0
    return 2 if isinstance(failure, ConfigError | CheckpointError | DeviceError) else 1


def _raise_file_limit() -> None:
    """Raise the limit of open files to the hard limit, for this process and those it starts.

    Every connection is an open file, and the soft limit is often 1,024.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
