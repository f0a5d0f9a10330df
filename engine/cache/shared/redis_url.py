"""The URL of a Redis or Valkey: how the client for it is made, and how logs show it.

| URL | server |
| --- | --- |
| `redis://[[USER]:PASSWORD@]HOST[:PORT][/DB]` | a single one |
| `rediss://...` | the same, with TLS |
| `redis+sentinel://[...@]HOST:PORT[,HOST:PORT...]/SERVICE[/DB]` | the master that Sentinels name |
| `redis+cluster://[...@]HOST:PORT[,HOST:PORT...]` | a cluster |

`rediss+sentinel` and `rediss+cluster` use TLS. Options in the query are redis-py's connection
options, for example `?socket_timeout=2&ssl_ca_certs=/etc/ca.pem`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from urllib.parse import SplitResult, unquote, urlsplit, urlunsplit

from engine.errors import ConfigError

FORMS = (
    "redis://HOST[:PORT][/DB], redis+sentinel://HOST:PORT[,...]/SERVICE, "
    "redis+cluster://HOST:PORT[,...], each also as rediss for TLS, or file:///FOLDER"
)
INSTALL = "the state store needs redis-py: pip install 'minserve[redis]'"
CONNECT_SECONDS, ANSWER_SECONDS = 2.0, 5.0
SENTINEL_PORT, PORT = 26379, 6379


def redacted(url: str) -> str:
    """Return the URL as logs may show it: without user, password and query."""
    if _splits_password(url):
        url = f"{url.partition('://')[0]}://hidden@{url.rpartition('@')[2]}"
    try:
        parts = urlsplit(url)
        host = parts.netloc.rpartition("@")[2]
    except ValueError:
        return "an invalid URL"
    hidden = "***@" if "@" in parts.netloc else ""
    return urlunsplit((parts.scheme, hidden + host, parts.path, "", ""))


def _splits_password(url: str) -> bool:
    """Return whether the host seems to end within the user or the password, at a / ? or #."""
    try:
        parts = urlsplit(url)
    except ValueError:
        return False
    if parts.scheme == "file" or "@" in parts.netloc:
        return False
    if "@" in parts.path:
        return True
    try:
        last = urlsplit(f"//{parts.netloc.rpartition(',')[2]}")
        is_host = last.hostname is not None and (last.port is None or last.port > 0)
    except ValueError:
        is_host = False
    return not is_host and "@" in parts.query + parts.fragment


def connect(url: str, connections: int) -> Any:
    """Return a client of redis-py for the URL, which connects when it is used.

    Args:
        url: one of the forms above.
        connections: how many threads will use it at once.

    Raises ConfigError.
    """
    try:
        import redis
    except ImportError:
        raise ConfigError(INSTALL, param="state_store") from None
    if _splits_password(url):  # an error of the parser would show a part of it
        raise ConfigError(
            f"state_store is {redacted(url)!r}, whose user or password has a / ? or #; allowed: "
            "%2F, %3F and %23 in their place",
            param="state_store",
        )
    try:
        parts = urlsplit(url)
        make = _KINDS[parts.scheme.partition("+")[2]]
        return make(redis, parts, connections)
    except (ValueError, TypeError, KeyError, redis.RedisError) as error:
        raise ConfigError(
            f"state_store is {redacted(url)!r}, which cannot be used ({error}); allowed: {FORMS}",
            param="state_store",
        ) from None


def _options(redis: Any, connections: int) -> dict[str, Any]:
    from redis.backoff import NoBackoff
    from redis.retry import Retry

    return {
        "socket_connect_timeout": CONNECT_SECONDS,
        "socket_timeout": ANSWER_SECONDS,
        "socket_keepalive": True,
        # All that is asked may be asked twice: a connection that a restart of the server has closed
        # is noticed when it is used next.
        "retry": Retry(NoBackoff(), 1, supported_errors=(redis.ConnectionError,)),
        "max_connections": connections,
        "client_name": "minserve",
    }


def _single(redis: Any, parts: SplitResult, connections: int) -> Any:
    url = urlunsplit(parts)
    pool = redis.BlockingConnectionPool.from_url(
        url, timeout=ANSWER_SECONDS, **_options(redis, connections)
    )
    return redis.Redis(connection_pool=pool)


def _cluster(redis: Any, parts: SplitResult, connections: int) -> Any:
    from redis.cluster import ClusterNode, RedisCluster

    options = _options(redis, connections) | _query(redis, parts)
    retry = options.pop("retry")
    nodes = [ClusterNode(host, port) for host, port in _hosts(parts, PORT)]
    return _Late(lambda: RedisCluster(startup_nodes=nodes, retry=retry, **options))


def _sentinel(redis: Any, parts: SplitResult, connections: int) -> Any:
    from redis.sentinel import Sentinel

    path = [unquote(part) for part in parts.path.split("/") if part]
    if not path:
        raise ValueError("the path must name the service: /SERVICE or /SERVICE/DB")
    options = _options(redis, connections) | _query(redis, parts)
    if len(path) > 1:
        options["db"] = int(path[1])
    keys = ("socket_connect_timeout", "socket_timeout")
    asking = {key: options[key] for key in keys}
    sentinel = Sentinel(_hosts(parts, SENTINEL_PORT), sentinel_kwargs=asking, **options)
    return sentinel.master_for(path[0])


_KINDS: dict[str, Callable[[Any, SplitResult, int], Any]] = {
    "": _single,
    "cluster": _cluster,
    "sentinel": _sentinel,
}


def _hosts(parts: SplitResult, port: int) -> list[tuple[str, int]]:
    found = []
    for one in parts.netloc.rpartition("@")[2].split(","):
        single = urlsplit(f"//{one}")
        if not single.hostname:
            raise ValueError("a host is missing")
        found.append((single.hostname, single.port or port))
    return found


def _query(redis: Any, parts: SplitResult) -> dict[str, Any]:
    """Return the options in the URL: those of the query, the user and the password, and TLS."""
    from redis.connection import parse_url

    told = urlunsplit(("redis", "host", "", parts.query, ""))
    found: dict[str, Any] = dict(parse_url(told))
    del found["host"]
    user, with_password, password = parts.netloc.rpartition("@")[0].partition(":")
    if user:
        found["username"] = unquote(user)
    if with_password:
        found["password"] = unquote(password)
    if parts.scheme.startswith("rediss"):
        found["ssl"] = True
    return found


class _Late:
    """Makes a client when it is used first: a cluster's client connects when it is made."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make
        self._made: Any = None

    def __getattr__(self, name: str) -> Any:
        if self._made is None:
            self._made = self._make()
        return getattr(self._made, name)
