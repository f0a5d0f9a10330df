"""DepartureRate: how quickly requests leave the waiting queue, as seen lately."""

from __future__ import annotations

import math

MEMORY_SECONDS = 30.0  # after so long a departure counts for a third
MOST_SECONDS = 3600.0  # that the mean is said to be


class DepartureRate:
    """The mean time from one departure to the next, while there is a queue. Departures come in
    bursts (a batch ends as one), so time and departures are summed apart; both fade."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._departures = 0.0
        self._noted_at = 0.0  # the latest departure, or when the queue was last empty

    def restart(self, now: float) -> None:
        """The queue was empty until now; that time tells nothing."""
        self._noted_at = now

    def note(self, departures: int, now: float) -> None:
        """So many left just now."""
        if departures == 0:
            return
        self._seconds, self._departures = self._faded(now)
        self._departures += departures
        self._noted_at = now

    @property
    def known(self) -> bool:
        """There has been a departure."""
        return self._departures > 0

    def at_rest(self) -> float:
        """Seconds per departure as of the latest one; 0 when there has been none."""
        return self._seconds / self._departures if self.known else 0.0

    def at(self, now: float) -> float:
        """Seconds per departure, a standstill since the latest one included. Before the first one
        that is how long it has been waited for."""
        seconds, departures = self._faded(now)
        if not self.known:
            return min(seconds, MOST_SECONDS)
        return min(seconds / max(departures, 1e-9), MOST_SECONDS)

    def _faded(self, now: float) -> tuple[float, float]:
        passed = max(now - self._noted_at, 0.0)
        fade = math.exp(-passed / MEMORY_SECONDS)
        return self._seconds * fade + passed, self._departures * fade
