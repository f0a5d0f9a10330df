"""Times device work: medians over many runs, with inputs rotated so that no cache answers.

On a GPU a launch from Python takes longer than a short kernel, so `graph_seconds_per_call` captures
many calls into one CUDA graph and times its replays: the figure is the device's work alone, as a
server that replays graphs sees it. Every output is filled with NaN before a last replay and must be
finite after it. On the CPU the same function times plain calls by the host clock.
"""

from __future__ import annotations

import gc
import math
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from engine.device import available_memory
from loadtest.report import median

Call = Callable[[], object]

#: All rotating buffers together: several times the L2 cache of a data-centre GPU (50 to 60 MB).
FOOTPRINT = 384 * 2**20
#: Shorter graphs than this would be timed with their own launch.
GRAPH_SECONDS = 2e-3
MOST_LAUNCHES = 64
# Every block from the heap, nothing of it given back, and no small leftover of an aligned block set
# aside in a cache: it would keep the block from being whole again, and the next call from using it.
_KEEP_MEMORY = ":".join(
    f"glibc.malloc.{option}"
    for option in ("mmap_max=0", "trim_threshold=1099511627776", "tcache_count=0", "mxfast=0")
)


class WrongOutputError(RuntimeError):
    """A timed call left a part of its output unwritten, or wrote NaN or infinity."""


@dataclass(frozen=True)
class Timing:
    """Median seconds of one call over `runs` runs.

    `method` is "graph", "events" (a GPU call that could not be captured; short ones include their
    launch) or "clock" (CPU).
    """

    seconds: float
    method: str
    runs: int


def seconds_per_call(
    calls: Sequence[Call], device: torch.device, *, repeat: int = 20, warm: int = 3
) -> float:
    """Return the median seconds of one call.

    `calls` do the same work on different inputs, taken in turn; together they should exceed the
    caches. Measured by events on CUDA, else by the host's clock.
    """
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


def graph_seconds_per_call(
    calls: Sequence[Call],
    device: torch.device,
    *,
    launches: int | None = None,
    repeat: int = 20,
    budget: float = 4.0,
) -> Timing:
    """Return the median seconds of one call without its launch from Python.

    Args:
        calls: the same work on different buffers (see `rotation`), taken in turn. What a call
            returns (a tensor or a tuple of tensors) is checked; as many results stay alive as there
            are calls, so that outputs rotate like inputs.
        launches: calls in the graph; by default as many as make it last GRAPH_SECONDS, and each of
            `calls` at least once.
        repeat: timed replays, or timed calls outside a graph.
        budget: seconds after which there are fewer runs than `repeat` (at least one).

    Raises:
        WrongOutputError: an output is not finite.
        RuntimeError: whatever the calls raise.
    """
    if device.type != "cuda":
        start = time.perf_counter()
        _check_poisoned(calls[0])
        checked = time.perf_counter() - start  # at least what a plain call takes
        runs = max(1, min(repeat, int(budget / checked)))
        seconds = seconds_per_call(calls, device, repeat=runs, warm=1 if runs == repeat else 0)
        return Timing(seconds, "clock", runs)
    for call in calls:  # tunes and loads what is lazy before the capture
        call()
    once = _seconds_once(calls[0], device)
    if launches is None:
        launches = min(MOST_LAUNCHES, math.ceil(GRAPH_SECONDS / once))
    launches = max(launches, len(calls))
    runs = max(3, min(repeat, int(budget / (once * launches))))
    try:
        return Timing(_replay_seconds(calls, device, launches, runs) / launches, "graph", runs)
    except WrongOutputError:
        raise
    except RuntimeError:  # not capturable, or no memory for the graph's own outputs
        torch.cuda.synchronize(device)
        release_memory(device)
        _check_poisoned(calls[0])
        return Timing(seconds_per_call(calls, device, repeat=repeat, warm=1), "events", repeat)


def _check_poisoned(call: Call) -> None:
    with poisoned_allocations():
        check_finite(call())


def _seconds_once(call: Call, device: torch.device) -> float:
    """Return the seconds of one call on a GPU with everything around it, for planning only."""
    torch.cuda.synchronize(device)
    start = time.perf_counter()
    call()
    torch.cuda.synchronize(device)
    return time.perf_counter() - start


def _replay_seconds(
    calls: Sequence[Call], device: torch.device, launches: int, repeat: int
) -> float:
    """Return the median seconds of one replay of a graph of `launches` calls."""
    kept: deque[object] = deque(maxlen=len(calls))
    graph = torch.cuda.CUDAGraph()
    stream = torch.cuda.current_stream(device)
    try:
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            for index in range(launches):
                kept.append(calls[index % len(calls)]())
    except BaseException:
        _mend_after_capture(stream)
        raise
    for _ in range(2):
        graph.replay()
    marks = []
    for _ in range(repeat):
        begin = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        marks.append((begin, end))
    torch.cuda.synchronize(device)
    for result in kept:
        for tensor in _tensors(result):
            tensor.fill_(math.nan)
    graph.replay()
    for result in kept:
        check_finite(result)
    return median([begin.elapsed_time(end) / 1000 for begin, end in marks])


def _mend_after_capture(stream: torch.cuda.Stream) -> None:
    """Restore stream and random generator after a capture that failed.

    It leaves its own stream current and the generator in capture mode, either of which would make
    later work fail. Sets `stream`, and a new state of the generator.
    """
    torch.cuda.set_stream(stream)
    fresh = torch.Generator(stream.device).manual_seed(1)
    torch.cuda.default_generators[stream.device_index].graphsafe_set_state(fresh)


def _tensors(result: object) -> Iterator[Tensor]:
    if isinstance(result, Tensor):
        yield result
    elif isinstance(result, (tuple, list)):
        for part in result:
            yield from _tensors(part)


def check_finite(result: object) -> None:
    """Raise WrongOutputError if a tensor of `result` holds NaN or infinity."""
    for tensor in _tensors(result):
        if not tensor.is_floating_point():
            continue
        dense = tensor if tensor.is_contiguous() else tensor.transpose(-1, -2)
        for part in dense.detach().reshape(-1).split(2**30):  # what 32-bit indices reach
            least, most = torch.aminmax(part) if part.numel() else (0.0, 0.0)
            # Both propagate NaN, and neither needs a copy of the tensor.
            if not (math.isfinite(float(least)) and math.isfinite(float(most))):
                raise WrongOutputError("the output is not finite: NaN, infinity or left unwritten")


@contextmanager
def poisoned_allocations() -> Iterator[None]:
    """Let torch fill uninitialised memory with NaN, to detect elements never written.

    (torch does this for its deterministic mode.)
    """
    before = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warn_only)


def rotation(size: int, device: torch.device, most: int = 50) -> int:
    """Return how many sets of buffers of `size` bytes to rotate so that caches are useless.

    At most as many as half of the free memory holds; at least one.
    """
    footprint = FOOTPRINT if device.type == "cuda" else 4 * last_level_cache()
    return max(1, min(most, -(-footprint // size), available_memory(device) // (2 * size)))


def release_memory(device: torch.device) -> None:
    """Free what the last case held."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def keeps_freed_memory() -> bool:
    """Whether this process runs under `restart_keeping_memory`'s options."""
    return _KEEP_MEMORY in os.environ.get("GLIBC_TUNABLES", "")


def restart_keeping_memory() -> None:
    """Restart this process once with a C library that keeps freed blocks (CPU).

    A call that allocates its output then gets the pages of the last one instead of fresh ones from
    the kernel, which cost several times the call itself and which a copy into existing memory does
    not pay either. The options can only be given at the start; other libraries than glibc ignore
    them.
    """
    if not keeps_freed_memory():
        tunables = [os.environ.get("GLIBC_TUNABLES", ""), _KEEP_MEMORY]
        os.environ["GLIBC_TUNABLES"] = ":".join(filter(None, tunables))
        sys.stdout.flush()
        os.execv(sys.executable, sys.orig_argv)


def last_level_cache() -> int:
    """Return the bytes of the CPU's largest cache; 32 MiB if they are unknown."""
    sizes = [0]
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = path.read_text().strip()
        unit = {"K": 2**10, "M": 2**20, "G": 2**30}.get(text[-1:], 1)
        digits = text.rstrip("KMG")
        sizes.append(int(digits) * unit if digits.isdigit() else 0)
    return max(sizes) or 32 * 2**20


def copy_bandwidth(device: torch.device, size: int) -> float:
    """Return the bytes per second of a large copy, counting bytes read and written."""
    count = max(2, -(-256 * 2**20 // size)) if device.type == "cuda" else 4
    pairs = [
        (torch.randn(size // 4, device=device), torch.empty(size // 4, device=device))
        for _ in range(min(count, 4))
    ]
    calls = [lambda s=source, t=target: t.copy_(s) for source, target in pairs]
    return 2 * size / seconds_per_call(calls, device)
