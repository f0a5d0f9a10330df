"""Timing of device work: medians over many runs, inputs rotated so that no cache answers."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

from loadtest.report import median


def seconds_per_call(
    calls: Sequence[Callable[[], object]], device: torch.device, *, repeat: int = 20, warm: int = 3
) -> float:
    """Median seconds of one call. `calls` do the same work on different inputs, taken in turn:
    together they should exceed the caches. On CUDA measured by events, else by the host clock."""
    for index in range(warm * len(calls)):
        calls[index % len(calls)]()
    if device.type != "cuda":
        samples = []
        for index in range(repeat):
            start = time.perf_counter()
            calls[index % len(calls)]()
            samples.append(time.perf_counter() - start)
        return median(samples)
    marks = []
    for index in range(repeat):
        start_event = torch.cuda.Event(enable_timing=True)
        end_event = torch.cuda.Event(enable_timing=True)
        start_event.record()
        calls[index % len(calls)]()
        end_event.record()
        marks.append((start_event, end_event))
    torch.cuda.synchronize(device)
    return median([begin.elapsed_time(end) / 1000 for begin, end in marks])


def copy_bandwidth(device: torch.device, size: int) -> float:
    """Bytes per second of a large copy, read and written bytes both counted."""
    count = max(2, -(-256 * 2**20 // size)) if device.type == "cuda" else 4
    pairs = [
        (torch.randn(size // 4, device=device), torch.empty(size // 4, device=device))
        for _ in range(min(count, 4))
    ]
    calls = [lambda s=source, t=target: t.copy_(s) for source, target in pairs]
    return 2 * size / seconds_per_call(calls, device)
