"""Signals that end a server: SIGTERM and SIGINT. The first one drains, a second one of either kind
does not wait for the rest.

A SIGTERM within a second of the first signal is its echo: GNU timeout, for one, signals a process
and then its group, which it is in. People who press Ctrl-C twice mean it.
"""

from __future__ import annotations

import signal
import time

ECHO_SECONDS = 1.0


class EndSignals:
    """Those that have come."""

    def __init__(self) -> None:
        self._first: float | None = None  # when it came, by time.monotonic

    def hurries(self, sig: int) -> bool:
        """Notes that one has come, just now. Whether it says that the server is not to wait."""
        now = time.monotonic()
        if self._first is None:
            self._first = now
            return False
        return sig == signal.SIGINT or now - self._first >= ECHO_SECONDS
