"""EventPool: moments of the device's work, to be waited for, and to be timed from one to the
other."""

from __future__ import annotations

import time

import torch


class EventPool:
    """Makes events on the stream that is the device's current one now. To ask for that again for
    each event takes longer than the event."""

    def __init__(self, where: torch.device) -> None:
        self._stream = torch.cuda.current_stream(where) if where.type == "cuda" else None

    def record(self) -> DeviceEvent:
        """The moment after all that the device was given so far."""
        return DeviceEvent(self._stream)


class DeviceEvent:
    """A moment of the device's work; seconds between two exist once the device has passed both."""

    def __init__(self, stream: torch.cuda.Stream | None) -> None:
        self._event: torch.cuda.Event | None = None
        if stream is not None:
            self._event = torch.cuda.Event(enable_timing=True)
            self._event.record(stream)
        self._time = time.perf_counter()

    def wait(self) -> None:
        """Returns when the device has passed it. Raises torch.AcceleratorError."""
        if self._event is not None:
            self._event.synchronize()

    @property
    def is_passed(self) -> bool:
        """Whether it need not be waited for. Raises torch.AcceleratorError."""
        return self._event is None or self._event.query()

    def seconds_until(self, later: DeviceEvent) -> float:
        """From this event to a later one; the device has passed both."""
        if self._event is not None and later._event is not None:
            milliseconds: float = self._event.elapsed_time(later._event)
            return milliseconds / 1000
        return later._time - self._time
