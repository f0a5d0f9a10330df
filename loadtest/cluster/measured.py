"""What the commands of a turn cost a Redis, measured on one of its own."""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from engine.cache.shared.redis_scripts import ADMIT, OPEN, RENEW, WRITE, Call
from loadtest.report import median
from loadtest.store.redis import RedisProcess, memory_of

SESSIONS = 20_000
CALLS = 5_000
PREFIX = "minserve:{0123456789abcdef:"
TTL = "86400000"
ENTRY = "[123,4,23548,1700000000.0,86400.0,[1,2,3,4]]"
TOKEN = "0123456789abcdef0123456789abcdef"


def measure(state_bytes: int, sessions: int = SESSIONS, calls: int = CALLS) -> dict[str, float]:
    """Return those fields of Costs that are the store's.

    One client calls one script at a time, the most costly way for a Redis: a round of its event
    loop for each. Seconds of the thread are its processor time, so that others on the machine do
    not count.

    Args:
        state_bytes: of a state.
        sessions: whose states are stored.
        calls: of each kind.

    Raises RuntimeError if there is no Redis.
    """
    with tempfile.TemporaryDirectory() as folder, RedisProcess(Path(folder)) as process:
        from redis import Redis

        with Redis.from_url(process.url) as client:
            return _measured(client, process.url, state_bytes, sessions, calls)


def _measured(
    client: Any, url: str, state_bytes: int, sessions: int, calls: int
) -> dict[str, float]:
    draw = random.Random(0)
    content = draw.randbytes(state_bytes)
    keys = [f"{PREFIX}{draw.getrandbits(192):048x}}}" for _ in range(sessions)]
    indexes = [f"{PREFIX}{draw.getrandbits(128):032x}}}:{kind}" for kind in ("ids", "expiry")]
    generations = dict.fromkeys(keys, 0)

    def run(call: Call) -> Any:
        return client.evalsha(*call.by_hash)

    def opened(key: str, known: str) -> Call:
        return OPEN.call([key, f"{key}:lock"], [known, TOKEN, 6000])

    def generation(key: str) -> str:
        return f"{generations[key]}-01234567" if generations[key] else ""

    def written(key: str) -> Call:
        base = generation(key)
        generations[key] += 1
        arguments = [TOKEN, base, generation(key), TTL, ENTRY, 0, content]
        return WRITE.call([key, f"{key}:lock"], arguments)

    def admitted(key: str) -> Call:
        now = round(1000 * time.time())
        return ADMIT.call(indexes, [f"session:{key[-33:-1]}", now + int(TTL), now, ""])

    for script in (OPEN, WRITE, ADMIT, RENEW):
        client.script_load(script.text)
    client.config_set("appendfsync", "no")
    empty = memory_of(url)["used_memory"]
    for key in keys:
        run(admitted(key))
    indexed = memory_of(url)["used_memory"]
    for key in keys:
        run(written(key))
    full = memory_of(url)["used_memory"]

    def cost(make: Callable[[str], Call]) -> tuple[float, float]:
        """Return the thread's seconds and the client's for a call: a mean, and a median."""
        chosen = draw.choices(keys, k=calls)
        begun, times = _thread_seconds(client), []
        for key in chosen:
            call = make(key)
            start = time.perf_counter()
            run(call)
            times.append(time.perf_counter() - start)
        return (_thread_seconds(client) - begun) / calls, median(times)

    open_seconds, open_whole = cost(lambda key: opened(key, generation(key)))
    read_seconds, _ = cost(lambda key: opened(key, ""))
    renew_seconds, _ = cost(lambda key: RENEW.call([key, f"{key}:lock"], [TOKEN, 6000]))
    write_seconds, write_whole = cost(written)
    admit_seconds, _ = cost(admitted)
    client.config_set("appendfsync", "always")
    _, synced_whole = cost(written)
    return {
        "state_bytes": state_bytes,
        "stored_bytes": round((full - indexed) / sessions),
        "index_bytes": round((indexed - empty) / sessions),
        "open_seconds": open_seconds,
        "read_seconds": read_seconds,
        "write_seconds": write_seconds,
        "admit_seconds": admit_seconds,
        "renew_seconds": renew_seconds,
        "sync_seconds": max(synced_whole - write_whole, 0.0),
        "client_seconds": max(open_whole - open_seconds, 0.0),
    }


def _thread_seconds(client: Any) -> float:
    told = client.info("cpu")
    return float(told["used_cpu_user_main_thread"]) + float(told["used_cpu_sys_main_thread"])
