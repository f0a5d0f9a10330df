"""The Ray Serve deployment of minserve: how many replicas, with which resources.

Ray is imported when a function here is called, so that the rest of the server works without it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from engine.errors import ConfigError
from service.settings import Settings

NAME = "minserve"  # of the application and of its deployment
INSTALL = "Ray is not installed; pip install 'minserve[ray]'"
# Ray asks a replica for its health so often, waits so long for the answer, and replaces it after
# three failures in a row.
HEALTH_PERIOD, HEALTH_TIMEOUT = 2.0, 10.0
LAST_FRAMES = 5.0  # seconds after a drain for streams that were cut to write their last events
USED_SLOTS = 0.8  # autoscaling aims at this share of used slots
SLOTS = 256  # of a replica, if --max-slots names no number
MOST_REPLICAS = 4096
# Requests that Ray lets through to one replica: all, because the replica's own queue refuses what
# is too much, with 429 and a Retry-After.
MOST_REQUESTS = 100_000

# HAProxy sends the requests of one session to one replica: by the header's hash, on a ring, so that
# another number of replicas moves few sessions. Requests without the header go round.
SESSION_HEADER = "x-session-id"  # unless --session-header names another
CONSISTENT_HASH_ROUTER = "ray.serve.experimental.consistent_hash_router:ConsistentHashRouter"


@dataclass(frozen=True, kw_only=True)
class Scale:
    """How many replicas there are, and what each gets. Raises ConfigError for bad values."""

    replicas: int = 2  # at the start, and the least with autoscaling
    most: int | None = None  # the most with autoscaling; None: always `replicas`
    cpus: float = 1.0  # of each replica
    gpus: float = 0.0  # of each replica
    python_proxy: bool = False  # requests come by Ray's proxy in Python or by handles, not HAProxy

    def __post_init__(self) -> None:
        if not 1 <= self.replicas <= MOST_REPLICAS:
            raise ConfigError(
                f"replicas is {self.replicas}; allowed: 1 to {MOST_REPLICAS}", param="replicas"
            )
        if self.most is not None and not self.replicas <= self.most <= MOST_REPLICAS:
            raise ConfigError(
                f"max_replicas is {self.most}; allowed: {self.replicas} (replicas) to "
                f"{MOST_REPLICAS}",
                param="max_replicas",
            )
        for name, value in (("cpus", self.cpus), ("gpus", self.gpus)):
            if not 0 <= value <= 4096:
                raise ConfigError(f"{name} is {value:g}; allowed: 0 to 4096", param=name)


def proxy_variables(header: str = SESSION_HEADER) -> dict[str, str]:
    """Return the environment of Ray in which its proxies place requests by this header."""
    return {
        "RAY_SERVE_ENABLE_HA_PROXY": "1",
        "RAY_SERVE_HAPROXY_BALANCE_ALGORITHM": f"hdr({header})\n    hash-type consistent",
        # Ray's Python proxy and handles find the session in the same header.
        "RAY_SERVE_SESSION_ID_HEADER_KEY": header,
    }


def make_application(settings: Settings, scale: Scale) -> Any:
    """Return the Ray Serve application: replicas of a server with these settings.

    Raises ConfigError for settings that a replica cannot have, or if Ray is not installed.
    """
    try:
        from ray import serve
    except ImportError:
        raise ConfigError(INSTALL) from None
    from service.cluster.replica import Replica

    _check(settings)
    settings = settings.model_copy(update={"engine_restarts": 0})  # Ray starts another replica
    options: dict[str, Any] = {
        "name": NAME,
        "ray_actor_options": {"num_cpus": scale.cpus, "num_gpus": scale.gpus},
        "max_ongoing_requests": MOST_REQUESTS,
        "health_check_period_s": HEALTH_PERIOD,
        "health_check_timeout_s": HEALTH_TIMEOUT,
        # A replica that is scaled down gets no new requests and finishes its streams.
        "graceful_shutdown_timeout_s": settings.drain_timeout + LAST_FRAMES,
        "graceful_shutdown_wait_loop_s": 0.5,
    }
    if scale.most is None:
        options["num_replicas"] = scale.replicas
    else:
        # Requests in flight are those that hold a slot and those that wait for one.
        options["autoscaling_config"] = {
            "min_replicas": scale.replicas,
            "max_replicas": scale.most,
            "initial_replicas": scale.replicas,
            "target_ongoing_requests": (settings.max_slots or SLOTS) * USED_SLOTS,
        }
    if scale.python_proxy:  # HAProxy refuses a router of its own
        from ray.serve.config import RequestRouterConfig

        router: dict[str, Any] = {"request_router_class": CONSISTENT_HASH_ROUTER}
        options["request_router_config"] = RequestRouterConfig(**router)
    return serve.deployment(**options)(serve.ingress()(Replica)).bind(settings.to_json())


def _check(settings: Settings) -> None:
    """Raise ConfigError for settings of sockets and processes, which are Ray's here."""
    given = settings.model_fields_set
    for name in ("uds", "tls_certificate", "tls_key", "api_workers", "engine_restarts"):
        if name in given:
            raise ConfigError(
                f"--{name.replace('_', '-')} (MINSERVE_{name.upper()}) is given; allowed: nothing, "
                "because Ray Serve has the sockets and the processes",
                param=name,
            )
    settings.engine_config()
