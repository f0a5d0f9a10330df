"""Cores of their own for servers, proxies and clients, so that none takes the others' time."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

LEAST = 8
RAY = ("ray::", "raylet", "gcs_server", "engine.worker")
PROXIES = ("haproxy", "ray::ProxyActor", "ray::HAProxyManager", "vllm-router")


@dataclass(frozen=True)
class Cores:
    """The cores that each part of a measurement may use."""

    servers: Collection[int]
    proxies: Collection[int]
    clients: Collection[int]


def shared() -> Cores:
    """Return every core of this process for every part."""
    every = os.sched_getaffinity(0)
    return Cores(every, every, every)


def apart() -> Cores:
    """Return half of the cores for servers, an eighth (at least two) for proxies, rest for clients.

    Raises RuntimeError with fewer than LEAST cores.
    """
    every = sorted(os.sched_getaffinity(0))
    if len(every) < LEAST:
        raise RuntimeError(f"--pin needs {LEAST} cores or more, and there are {len(every)}")
    half, eighth = len(every) // 2, max(2, len(every) // 8)
    return Cores(every[:half], every[half : half + eighth], every[half + eighth :])


def pin(pids: Iterable[int], cores: Collection[int]) -> None:
    """Let every thread of these processes run on these cores only."""
    for pid in pids:
        with suppress(OSError):  # it has ended
            for thread in Path(f"/proc/{pid}/task").iterdir():
                with suppress(ProcessLookupError):
                    os.sched_setaffinity(int(thread.name), cores)


def pin_parts(cores: Cores) -> None:
    """Pin all proxies of this machine, and all other processes of Ray, by their names."""
    proxies = {pid for name in PROXIES for pid in _named(name)}
    pin(proxies, cores.proxies)
    ray = {
        pid for name in ("ray::", "raylet", "gcs_server", "engine.worker") for pid in _named(name)
    }
    pin(ray - proxies, cores.servers)


def _named(name: str) -> list[int]:
    found = subprocess.run(["pgrep", "-f", name], capture_output=True, check=False)
    return [pid for pid in map(int, found.stdout.split()) if pid != os.getpid()]
