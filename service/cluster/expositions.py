"""Expositions: the metrics of all replicas in one answer, each with a label `replica`.

A proxy sends a scrape to any replica. So each replica gives its metrics to a small actor every few
seconds, and the one that is scraped returns its own and those of the others.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Awaitable, Callable
from typing import Any

log = logging.getLogger(__name__)

ACTOR, NAMESPACE = "minserve-metrics", "minserve"
PUSH_SECONDS = 2.0
OLD_SECONDS = 15.0  # a replica that has not been heard of for so long is gone
WAIT_SECONDS = 2.0

_SAMPLE = re.compile(rb"([a-zA-Z_:][a-zA-Z0-9_:]*)(\{)?(.*)", re.DOTALL)
_ENDINGS = (b"_total", b"_bucket", b"_sum", b"_count", b"_created", b"_info")


class Collected:
    """The latest exposition of each replica; a Ray actor."""

    def __init__(self) -> None:
        self._of: dict[str, tuple[float, bytes]] = {}

    def put(self, replica: str, text: bytes) -> None:
        """Keep a replica's metrics."""
        self._of[replica] = time.monotonic(), text

    def all(self) -> dict[str, bytes]:
        """Return the metrics of all replicas that were heard of lately, by replica."""
        now = time.monotonic()
        self._of = {name: one for name, one in self._of.items() if now - one[0] < OLD_SECONDS}
        return {name: text for name, (_, text) in self._of.items()}


class Expositions:
    """One replica's part."""

    def __init__(self, replica: str, own: Callable[[], Awaitable[bytes]]) -> None:
        """`replica`: the label's value. `own`: returns this replica's metrics as text."""
        self._replica = replica
        self._own = own
        self._actor: Any = None
        self._pushing: asyncio.Task[None] | None = None

    async def merged(self, own: bytes) -> bytes:
        """Return the metrics of all replicas; `own` are this one's, now."""
        others: dict[str, bytes] = {}
        try:
            others = await asyncio.wait_for(self._collected().all.remote(), WAIT_SECONDS)
        except Exception as error:  # Ray's errors: the actor or its node has died
            self._actor = None
            log.warning("the metrics of other replicas are missing: %s", error)
        return merge({**others, self._replica: own})

    def start(self) -> None:
        """Begin to give this replica's metrics to the others."""
        if self._pushing is None:
            self._pushing = asyncio.create_task(self._push())

    async def _push(self) -> None:
        while True:
            try:
                text = await self._own()
                await asyncio.wait_for(
                    self._collected().put.remote(self._replica, text), WAIT_SECONDS
                )
            except Exception as error:
                self._actor = None
                log.debug("the metrics could not be given to the other replicas: %s", error)
            await asyncio.sleep(PUSH_SECONDS)

    def _collected(self) -> Any:
        if self._actor is None:
            import ray

            made = ray.remote(num_cpus=0)(Collected)
            self._actor = made.options(
                name=ACTOR, namespace=NAMESPACE, get_if_exists=True, lifetime="detached"
            ).remote()
        return self._actor


def merge(texts: dict[str, bytes]) -> bytes:
    """Return expositions as one, with a label `replica` on every sample.

    The samples of a metric stand together, as the format asks for.
    """
    heads: dict[bytes, list[bytes]] = {}  # HELP and TYPE lines, by metric
    samples: dict[bytes, list[bytes]] = {}
    for replica, text in sorted(texts.items()):
        label = b'replica="' + replica.encode() + b'"'
        for line in text.splitlines():
            if line.startswith(b"# "):
                _, kind, name, *_ = line.split(b" ", 3)
                head = heads.setdefault(name, [])
                if not any(one.startswith(b"# " + kind) for one in head):
                    head.append(line)
                samples.setdefault(name, [])
            elif found := _SAMPLE.match(line):
                name, brace, rest = found.groups()
                more = b"," if brace and not rest.startswith(b"}") else b""
                after = rest if brace else b"} " + rest.lstrip()
                samples.setdefault(_family(name, heads), []).append(
                    name + b"{" + label + more + after
                )
    lines = [line for name, of in samples.items() for line in (*heads.get(name, ()), *of)]
    return b"".join(line + b"\n" for line in lines)


def _family(name: bytes, heads: dict[bytes, list[bytes]]) -> bytes:
    """Return the metric that a sample belongs to."""
    if name in heads:
        return name
    for ending in _ENDINGS:
        short = name.removesuffix(ending)
        if short in heads:
            return short
    return name
