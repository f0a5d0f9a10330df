"""RedisStore: states in a Redis or Valkey.

Keys, of which MODEL and STATE are hashes, as OWNER is:

| key | holds |
| --- | --- |
| `minserve:{MODEL:STATE}` | one state; see `redis_scripts` |
| `minserve:{MODEL:STATE}:GENERATION:N` | part N, from 1 on, of a large state's content |
| `minserve:{MODEL:STATE}:lock` | the token of its lock, while it has one |
| `minserve:{MODEL:OWNER}:ids`, `:expiry` | the owner's states, for lists and quotas |

The server removes states whose lifetime is over. The indexes are kept right as far as needed: an id
whose state is gone is taken out when it is met.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import re
import time
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import msgspec

from engine.cache.shared.redis_scripts import (
    ADMIT,
    DESCRIBE,
    OPEN,
    REMOVE,
    RENEW,
    UNLOCK,
    WRITE,
    Call,
)
from engine.cache.shared.redis_url import connect, redacted
from engine.cache.shared.store import (
    ABSENT,
    LEASE_SECONDS,
    Entry,
    Listed,
    Lock,
    Opened,
    SharedStore,
    StateName,
    busy,
    conflict,
)
from engine.errors import (
    ConfigError,
    EngineError,
    StateNotStored,
    StateQuota,
    StoreUnavailable,
)

log = logging.getLogger(__name__)

INLINE_BYTES = 2**20  # the largest content that is stored in the state's own hash
# Parts of larger contents: a server does nothing else while it takes one in. Just below 4 MiB,
# since Redis allocates 5 MiB for a value of 4 MiB and its header.
CHUNK_BYTES = 2**22 - 2**10
LEAST_VERSION = 7
TRIES = 3  # of reading a large state that is being replaced
UNUSED_SECONDS = 600.0  # how long parts are kept whose state was not written, as its server died
ADMITTED_SECONDS = 3600.0  # how long a new id counts for the quota before its state is stored
LISTED_AT_ONCE = 200

_GENERATION = re.compile(rb"[1-9][0-9]{0,17}-[0-9a-f]{8}")

Method = TypeVar("Method", bound=Callable[..., Any])


def _asks_server(method: Method) -> Method:
    """Make a method raise StoreUnavailable for whatever goes wrong with the server's answer."""

    @functools.wraps(method)
    def asking(self: RedisStore, *args: Any, **options: Any) -> Any:
        try:
            return method(self, *args, **options)
        except EngineError:
            raise
        except Exception as error:  # redis-py's errors, and whatever an answer without sense causes
            if _is_full(error):
                raise StateNotStored(f"the state store is full: {error}") from None
            reason = f"{type(error).__name__}: {error}"
            raise StoreUnavailable(f"the state store does not answer ({reason})") from error

    return asking  # type: ignore[return-value]


class RedisStore(SharedStore):
    """The states of one model in a Redis or Valkey, of version 7 or later."""

    def __init__(self, url: str, model: str, connections: int = 16) -> None:
        """Create without connecting.

        Args:
            url: one of the forms in `redis_url`.
            model: fingerprint of the model; states of others are not seen.
            connections: the most threads that use the store at once.

        Raises ConfigError.
        """
        self._redis = connect(url, connections)
        self._shown = redacted(url)
        self._has_pipelines = "+cluster" not in url.partition("://")[0]
        self._model = hashlib.blake2b(model.encode(), digest_size=8).hexdigest()

    @_asks_server
    def open(
        self, name: StateName, known: str, lock: Lock | None = None, most: int | None = None
    ) -> Opened:
        key = self._key(name)
        token = "" if lock is None else lock.token
        for _ in range(TRIES):
            arguments = [known, token, _ms(LEASE_SECONDS)]
            answer = self._run(OPEN.call([key, f"{key}:lock"], arguments))
            if answer[0]:
                rest = max(int(answer[1]), 0) / 1000
                raise busy(name.id, rest)
            generation, chunks = _generation(answer[1]), int(answer[2])
            if lock is not None and generation == ABSENT and most is not None:
                self._count(lock, most)
            if lock is None and generation != ABSENT:  # with a lock, when it is given back
                self._run(self._indexing(name, int(answer[4]) / 1000))
            if generation == ABSENT or chunks < 0:
                return Opened(generation)
            if chunks == 0:
                return Opened(generation, bytes(answer[3]))
            parts = [self._redis.get(f"{key}:{generation}:{i + 1}") for i in range(chunks)]
            if None not in parts:
                return Opened(generation, b"".join(parts))
        raise StoreUnavailable("a part of the state is missing in the state store")

    def _count(self, lock: Lock, most: int) -> None:
        """Count a new state for its owner's quota. Raises StateQuota if it is one too many."""
        if not int(self._run(self._indexing(lock.name, ADMITTED_SECONDS, most))):
            self.unlock(lock)
            raise StateQuota(f"{most} states are kept already; allowed: up to {most}")

    def _indexing(self, name: StateName, seconds: float, most: int | None = None) -> Call:
        """Return the call that adds a state, which expires in `seconds`, to its owner's indexes."""
        now = time.time()
        limit = "" if most is None else most
        arguments = [name.id, _ms(now + seconds), _ms(now), limit]
        return ADMIT.call(self._indexes(name.owner), arguments)

    @_asks_server
    def describe(self, name: StateName) -> tuple[str, Listed] | None:
        answer = self._run(DESCRIBE.call(self._state_and_lock(name), [1]))
        if len(answer) < 2:
            return None
        listed = _listed(name.id, answer)
        self._run(self._indexing(name, listed.entry.ttl))
        return _generation(answer[0]), listed

    @_asks_server
    def write(self, lock: Lock, base: str, content: bytes) -> str:
        entry, key = Entry.of(content), self._key(lock.name)
        number = int(base.partition("-")[0]) if base else 0
        generation = f"{number + 1}-{lock.token[:8]}"
        ttl = max(_ms(entry.ttl), 1)
        parts: list[memoryview] = []
        if len(content) > INLINE_BYTES:
            view = memoryview(content)
            parts = [view[i : i + CHUNK_BYTES] for i in range(0, len(content), CHUNK_BYTES)]
        for i, part in enumerate(parts):
            name, most = f"{key}:{generation}:{i + 1}", _ms(UNUSED_SECONDS)
            self._redis.set(name, bytes(part), px=min(ttl, most))
        value = b"" if parts else content
        arguments = [lock.token, base, generation, ttl, msgspec.json.encode(entry)]
        writing = WRITE.call([key, f"{key}:lock"], [*arguments, len(parts), value])
        _, written = self._run_all([self._indexing(lock.name, entry.ttl), writing])
        if not int(written):
            for i in range(len(parts)):
                self._redis.unlink(f"{key}:{generation}:{i + 1}")
            raise conflict(lock.name)
        return generation

    @_asks_server
    def remove(self, lock: Lock, base: str) -> None:
        if not int(self._run(REMOVE.call(self._state_and_lock(lock.name), [lock.token, base]))):
            raise conflict(lock.name)
        self._take_out(lock.name.owner, [lock.name.id])

    @_asks_server
    def unlock(self, lock: Lock) -> None:
        ttl = int(self._run(UNLOCK.call(self._state_and_lock(lock.name), [lock.token])))
        if ttl > 0:
            self._run(self._indexing(lock.name, ttl / 1000))
        elif ttl == 0:
            self._take_out(lock.name.owner, [lock.name.id])

    @_asks_server
    def renew(self, locks: Iterable[Lock]) -> None:
        lease = _ms(LEASE_SECONDS)
        self._run_all(
            [RENEW.call(self._state_and_lock(lock.name), [lock.token, lease]) for lock in locks]
        )

    @_asks_server
    def list_states(self, owner: str, after: str, limit: int) -> tuple[list[Listed], bool]:
        found: list[Listed] = []
        ids_key = self._indexes(owner)[0]
        while len(found) <= limit:
            least = f"({after}" if after else "-"
            ids = self._redis.zrangebylex(ids_key, least, "+", start=0, num=LISTED_AT_ONCE)
            gone = []
            names = [StateName(owner, raw.decode()) for raw in ids]
            answers = self._run_all(
                [DESCRIBE.call(self._state_and_lock(one), [0]) for one in names]
            )
            for id, answer in zip((one.id for one in names), answers, strict=True):
                if len(answer) > 1:
                    found.append(_listed(id, answer))
                elif not answer:
                    gone.append(id)
                after = id
            self._take_out(owner, gone)
            if len(ids) < LISTED_AT_ONCE:
                break
        return found[:limit], len(found) > limit

    @_asks_server
    def warnings(self) -> list[str]:
        told = self._redis.info("server")
        version = str(_of_one(told).get("redis_version", "0"))
        if int(version.partition(".")[0]) < LEAST_VERSION:
            raise ConfigError(
                f"the state store {self._shown} is Redis {version}; allowed: {LEAST_VERSION} or "
                "later, or Valkey",
                param="state_store",
            )
        try:
            found = {
                name: _of_one(self._redis.config_get(name)).get(name, "")
                for name in ("appendonly", "appendfsync", "maxmemory-policy")
            }
        except Exception as error:
            return [f"its configuration cannot be read ({error}): see that it keeps what it has"]
        warnings = []
        if found["appendonly"] != "yes":
            warnings.append("appendonly is not yes: a restart of the store loses finished turns")
        elif found["appendfsync"] != "always":
            warnings.append(
                f"appendfsync is {found['appendfsync']}: the loss of its machine loses finished "
                "turns of the last second or more"
            )
        if found["maxmemory-policy"] != "noeviction":
            warnings.append(
                f"maxmemory-policy is {found['maxmemory-policy']}, not noeviction: a store that is "
                "full drops states"
            )
        return warnings

    def close(self) -> None:
        self._redis.close()

    def _run(self, call: Call) -> Any:
        """Run one script and return its answer."""
        from redis.exceptions import NoScriptError

        try:
            return self._redis.evalsha(*call.by_hash)
        except NoScriptError:  # the server has not met it, or was restarted
            return self._redis.eval(*call.whole)

    def _run_all(self, calls: list[Call]) -> list[Any]:
        """Run scripts in order, in one round trip unless a cluster has them on several nodes."""
        from redis.exceptions import NoScriptError

        if len(calls) > 1 and self._has_pipelines:
            pipeline = self._redis.pipeline(transaction=False)
            for call in calls:
                pipeline.evalsha(*call.by_hash)
            answers = pipeline.execute(raise_on_error=False)
            for i, answer in enumerate(answers):
                if isinstance(answer, NoScriptError):
                    answers[i] = self._run(calls[i])
                elif isinstance(answer, Exception):
                    raise answer
            return list(answers)
        return [self._run(call) for call in calls]

    def _take_out(self, owner: str, ids: list[str]) -> None:
        """Remove ids from the owner's indexes whose states are gone."""
        if ids:
            for key in self._indexes(owner):
                self._redis.zrem(key, *ids)

    def _key(self, name: StateName) -> str:
        return f"minserve:{{{self._model}:{name.digest}}}"

    def _state_and_lock(self, name: StateName) -> list[str]:
        key = self._key(name)
        return [key, f"{key}:lock"]

    def _indexes(self, owner: str) -> list[str]:
        both = f"minserve:{{{self._model}:{owner}}}"
        return [f"{both}:ids", f"{both}:expiry"]


def _ms(seconds: float) -> int:
    return round(seconds * 1000)


def _generation(raw: bytes) -> str:
    """Return a generation from the server, checked. Raises ValueError."""
    if raw and not _GENERATION.fullmatch(raw):
        raise ValueError(f"{raw[:50]!r} is no generation of a state")
    return bytes(raw).decode()


def _listed(id: str, answer: list[Any]) -> Listed:
    entry = msgspec.json.decode(answer[1], type=Entry)
    return Listed(id, entry, time.time() + max(int(answer[3]), 0) / 1000)


def _of_one(answer: dict[str, Any]) -> dict[str, Any]:
    """Return one node's answer, where a cluster's client returns those of all nodes."""
    values = list(answer.values())
    if values and all(isinstance(value, dict) for value in values):
        return dict(values[0])
    return answer


def _is_full(error: Exception) -> bool:
    """Return whether the server has no memory, or no disk for its log, for what it was given."""
    return type(error).__name__ == "OutOfMemoryError" or str(error).startswith(("OOM", "MISCONF"))
