"""The access log: one line for each HTTP request, written when it has ended, however it ended.

It tells who asked for what, what came of it and what it cost. It never holds a prompt, an answer,
a key, or a path as it was sent: the route's template stands for it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import lru_cache

import msgspec

from service.settings import AccessLogFormat


class Exchange(msgspec.Struct, frozen=True, kw_only=True):
    """What a line tells; the JSON line has these fields."""

    time: str  # of the end, UTC
    request_id: str
    method: str
    route: str  # a template, "other" for what is none
    status: int  # 499: the client left before its answer's end
    outcome: str | None  # of work for the model, as in minserve_requests_total
    seconds: float  # from the request's headers until the answer's last byte
    tokens_in: int | None  # prompt tokens given to the engine; samples share their prompt
    tokens_out: int | None  # generated tokens that came from the engine
    key: str | None  # the name of the key
    peer: str | None = None  # the address of who sent what cannot be read as HTTP


class AccessLog:
    """Gives lines in one of the formats to `write`."""

    def __init__(self, format: AccessLogFormat, write: Callable[[bytes], None]) -> None:
        self._render = {"json": msgspec.json.Encoder().encode, "text": _as_text}.get(format)
        self._write = write

    @property
    def on(self) -> bool:
        """Whether lines are written at all."""
        return self._render is not None

    def add(self, exchange: Exchange) -> None:
        """Writes one line."""
        if self._render is not None:
            self._write(self._render(exchange))


def timestamp() -> str:
    """Now, in UTC, to the millisecond."""
    milliseconds = time.time_ns() // 1_000_000
    return f"{_whole(milliseconds // 1000)}.{milliseconds % 1000:03d}Z"


@lru_cache(maxsize=2)
def _whole(seconds: int) -> str:
    """Of which there are many lines."""
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds))


def _as_text(line: Exchange) -> bytes:
    """No value has spaces; what there is none of is left out."""
    parts = [line.time, line.method, line.route, str(line.status), f"{line.seconds:.6f}s"]
    for name in ("outcome", "tokens_in", "tokens_out", "key", "peer", "request_id"):
        value = getattr(line, name)
        if value is not None:
            parts.append(f"{name}={value}")
    return " ".join(parts).encode()
