"""`minserve cluster`: replicas of a server on Ray Serve, on this machine or in a Ray cluster."""

from __future__ import annotations

import signal
import sys
import threading
from typing import Any

from engine.errors import ConfigError
from service.terminal import options as options

EVERY_ADDRESS = "0.0.0.0"


def cluster(
    replicas: options.Replicas = 2,
    max_replicas: options.MostReplicas = None,
    address: options.RayAddress = None,
    cpus: options.ReplicaCpus = 1.0,
    gpus: options.ReplicaGpus = 0.0,
    python_proxy: options.PythonProxy = False,
    host: options.Host = None,
    port: options.Port = None,
    model: options.ServedModel = None,
    device: options.ServedDevice = None,
    threads: options.Threads = None,
    max_slots: options.MaxSlots = None,
    deterministic: options.ServedDeterministic = None,
    state_store: options.StateStore = None,
    state_store_file: options.StateStoreFile = None,
    drain_timeout: options.DrainTimeout = None,
) -> None:
    """Serve a model with replicas on Ray Serve.

    Ray places the replicas, checks their health, starts another one where one fails, and scales
    them. With --state-store a session goes on at any of them. All other settings of `minserve
    serve` are variables here (MINSERVE_QUANTIZE for --quantize). Without --address the command
    starts Ray on this machine and runs until SIGTERM or Ctrl-C. With --address the default host is
    0.0.0.0, because the proxies of several machines ask each other's replicas.
    """
    given = {
        name: value
        for name, value in {
            "host": host, "port": port, "model": model, "device": device, "threads": threads,
            "max_slots": max_slots, "deterministic": deterministic, "state_store": state_store,
            "state_store_file": state_store_file, "drain_timeout": drain_timeout,
        }.items()
        if value is not None
    }  # fmt: skip
    from pydantic import ValidationError

    from service.cluster.deployment import (
        SESSION_HEADER,
        Scale,
        make_application,
        proxy_variables,
    )
    from service.settings import Settings, export

    try:
        settings = Settings(**given)  # type: ignore[arg-type]
    except ValidationError as error:
        raise ConfigError(options.describe(error.errors()[0], given)) from error
    if address is not None and "host" not in settings.model_fields_set:
        # A node's proxy also sends requests to the replicas of other nodes, by their addresses.
        settings = settings.model_copy(update={"host": EVERY_ADDRESS})
    scale = Scale(
        replicas=replicas, most=max_replicas, cpus=cpus, gpus=gpus, python_proxy=python_proxy
    )
    if address is None and not python_proxy:
        # before Ray is imported, which reads them then
        export(proxy_variables(settings.session_header or SESSION_HEADER))
    application = make_application(settings, scale)
    _run(application, settings, address)


def _run(application: Any, settings: Any, address: str | None) -> None:
    """Deploy the application; in a Ray of its own, wait for a signal and take it down again."""
    import ray
    from ray import serve

    from service.cluster.deployment import NAME

    try:
        # "local": not one that runs here already, or has left its address behind
        ray.init(address=address or "local", include_dashboard=False, log_to_driver=True)
        serve.start(http_options={"host": settings.host, "port": settings.port})
        serve.run(application, name=NAME, route_prefix="/")
    except ConnectionError as error:
        raise ConfigError(f"there is no Ray cluster at {address!r}: {error}") from error
    except RuntimeError as error:  # Ray has written the replicas' errors above
        raise ConfigError(f"the replicas did not start: {str(error).splitlines()[0]}") from error
    where = f"http://{settings.host}:{settings.port}"
    print(f"minserve: replicas are ready at {where}", file=sys.stderr)
    if address is not None:
        return  # they go on without this command: `serve status`, `serve shutdown`
    # Not before: Ray installs handlers of its own when it starts.
    ending = threading.Event()
    for one in (signal.SIGTERM, signal.SIGINT):
        signal.signal(one, lambda *_: ending.set())
    while not ending.wait(0.5):  # in pieces, so that the handlers run
        pass
    print("minserve: shutting down: finishing what is in flight", file=sys.stderr)
    serve.shutdown()
    ray.shutdown()
