"""EventPool: points in the device's work, to wait for and to measure times between."""

from __future__ import annotations

import time

import torch


class EventPool:
    """Records events on the stream that is current at its creation.

    Asking for the current stream for each event would take longer than the event.
    """

    def __init__(self, where: torch.device) -> None:
        self._stream = torch.cuda.current_stream(where) if where.type == "cuda" else None

    def record(self) -> DeviceEvent:
        """Record the point after all work that the device was given so far."""
        return DeviceEvent(self._stream)


class DeviceEvent:
    """A point in the device's work."""

    def __init__(self, stream: torch.cuda.Stream | None) -> None:
        self._event: torch.cuda.Event | None = None
        if stream is not None:
            self._event = torch.cuda.Event(enable_timing=True)
            self._event.record(stream)
        self._time = time.perf_counter()

    def wait(self) -> None:
        """Wait until the device has passed it. Raises torch.AcceleratorError."""
        if self._event is not None:
            self._event.synchronize()

    @property
    def is_passed(self) -> bool:
        """Whether the device has passed it. Raises torch.AcceleratorError."""
        return self._event is None or self._event.query()

    def seconds_until(self, later: DeviceEvent) -> float:
        """Return the seconds from this event to a later one; the device must have passed both."""
        if self._event is not None and later._event is not None:
            milliseconds: float = self._event.elapsed_time(later._event)
            return milliseconds / 1000
        return later._time - self._time
