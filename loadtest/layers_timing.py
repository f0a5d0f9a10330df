"""Time limits of `loadtest.layers`: few calls of slow layers, and none after the budget."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter

import torch

from loadtest.timing import seconds_per_call

SLOW = 0.1  # seconds of a call beyond which it is timed twice only


class Budget:
    """Seconds, from now on, in which measurements may start; None: no limit.

    A measurement that has started is not cut short, so a run may end somewhat later.
    """

    def __init__(self, seconds: float | None) -> None:
        self._end = None if seconds is None else perf_counter() + seconds

    def spent(self) -> bool:
        return self._end is not None and perf_counter() >= self._end


def host_seconds(call: Callable[[], object], device: torch.device) -> float:
    """Return the seconds of one call by the host's clock; the device is idle before and after."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = perf_counter()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return perf_counter() - start


def step_seconds(call: Callable[[], object], device: torch.device) -> float:
    """Return the seconds of one call that has been made before, so that all it needs is loaded.

    Calls of up to SLOW seconds are timed by `seconds_per_call`; they read more than a GPU's L2
    cache holds, so inputs need no rotation. A slower call is made twice, timed by the host's clock,
    against which the launch latency is negligible; the faster one counts.
    """
    first = host_seconds(call, device)
    if first <= SLOW:
        return seconds_per_call([call], device, repeat=7)
    return min(first, host_seconds(call, device))
