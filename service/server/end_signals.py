"""EndSignals: tells whether a SIGTERM or SIGINT drains the server or ends it at once.

The first signal drains; a second one, of either kind, ends the server at once. But a SIGTERM within
a second of the first signal is ignored, because some programs send two: GNU timeout signals the
process and then its group. A second Ctrl-C is always obeyed.
"""

from __future__ import annotations

import signal
import time

ECHO_SECONDS = 1.0


class EndSignals:
    """Remembers when the first signal came."""

    def __init__(self) -> None:
        self._first: float | None = None  # when it came, by time.monotonic

    def hurries(self, sig: int) -> bool:
        """Record a signal that came now; return whether the server has to end at once."""
        now = time.monotonic()
        if self._first is None:
            self._first = now
            return False
        return sig == signal.SIGINT or now - self._first >= ECHO_SECONDS
