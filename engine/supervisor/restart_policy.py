"""RestartPolicy: how often, and how soon, an engine that died is started again."""

from __future__ import annotations

from collections import deque

LONGEST_WAIT = 30.0  # seconds


class RestartPolicy:
    """At most `most` starts within `window` seconds; the first at once, the next after 1, 2, 4, ...
    seconds. What is older than the window is forgotten."""

    def __init__(self, most: int, window: float) -> None:
        self.most = most
        self.window = window
        self.total = 0  # ever
        self._times: deque[float] = deque()

    @property
    def recent(self) -> int:
        """Starts within the window, as of the latest one."""
        return len(self._times)

    def room_in(self, now: float) -> float:
        """After how many seconds `wait` may allow another start that it has refused."""
        return max(0.0, self._times[0] + self.window - now) if self._times else self.window

    def wait(self, now: float) -> float | None:
        """Counts one more start and tells how many seconds from now it is due; None: no more."""
        while self._times and now - self._times[0] >= self.window:
            self._times.popleft()
        if len(self._times) >= self.most:
            return None
        seconds = min(2.0 ** (len(self._times) - 1), LONGEST_WAIT) if self._times else 0.0
        self._times.append(now + seconds)
        self.total += 1
        return seconds
