"""Which of several ways to compute the same is the quickest on a GPU, found by timing them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from time import perf_counter

import torch

from engine.gc_tuning import gc_paused

Run = Callable[[], object]

_ROUNDS = 3  # the best of which counts
_ALIKE = 1.01  # times that are no further apart tell nothing
# The device is held up while all that is timed is given to it, or the host's pace would be timed:
# clocks for each second that this takes, more than a GPU has in one.
_CLOCKS = 3e9
# What takes so many milliseconds can keep a device at the limit of its power, which it may exceed
# for a moment and not for good: what is as quick but for this factor is run for so many
# milliseconds before its time counts, and for so many while it does.
_LONG = 1.0
_NEARLY = 1.12
_UNTIL_STEADY, _STEADY = 120.0, 60.0


def quickest_of(runs: Sequence[Run]) -> int:
    """Which of them keeps the device busy for the shortest time; of those that are alike the first,
    so that noise has less of a part in it. Raises what they raise."""
    return _first_of_the_best(_times(runs))


def quickest_graph_of(runs: Sequence[Run], *, lasting: bool) -> int:
    """The same of CUDA graphs of them: kernels follow one another sooner there. `lasting`: those
    that take a millisecond or more are compared under a load that lasts, a second for all."""
    graphs = _captured(runs)
    times = _times([graph.replay for graph in graphs])
    best = min(times)
    near = [index for index, time in enumerate(times) if time <= best * _NEARLY]
    if not lasting or best < _LONG or len(near) == 1:
        return _first_of_the_best(times)
    steady = [_lasting_time(graphs[index], times[index]) for index in near]
    return near[_first_of_the_best(steady)]


def _first_of_the_best(times: Sequence[float]) -> int:
    best = min(times)
    return next(index for index, time in enumerate(times) if time <= best * _ALIKE)


def _captured(runs: Sequence[Run]) -> list[torch.cuda.CUDAGraph]:
    for run in runs:
        run()  # loads its kernels, which a capture does not allow
    torch.cuda.synchronize()
    torch.cuda.empty_cache()  # which a capture could not do when it needs memory
    # One after another they may use the same memory: nobody wants their results.
    pool, graphs = torch.cuda.graph_pool_handle(), []
    for run in runs:
        graph = torch.cuda.CUDAGraph()
        with (
            gc_paused(),
            torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"),
        ):
            run()
        graphs.append(graph)
    return graphs


def _keep_busy(graph: torch.cuda.CUDAGraph, time: float, milliseconds: float) -> int:
    """Replays it for about so long; how many times."""
    count = max(1, round(milliseconds / time))
    for _ in range(count):
        graph.replay()
    return count


def _lasting_time(graph: torch.cuda.CUDAGraph, about: float) -> float:
    """Milliseconds of a replay among many."""
    _keep_busy(graph, about, _UNTIL_STEADY)
    begin = _mark()
    count = _keep_busy(graph, about, _STEADY)
    end = _mark()
    end.synchronize()
    time: float = begin.elapsed_time(end) / count
    return time


def works(run: Run) -> bool:
    """Whether this can be run at all, to its end. Raises what is no answer to that."""
    try:
        run()
        _finish()
    except RuntimeError as error:
        if type(error) is not RuntimeError:  # no memory, or a device in error
            raise
        _finish()  # raises where the device is lost
        return False
    return True


def _finish() -> None:
    """Waits for the device, if one is used."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def _times(runs: Sequence[Run]) -> list[float]:
    """Milliseconds that each keeps the device busy."""
    for run in runs:
        run()  # loads its kernels
    start = perf_counter()
    for run in runs:
        run()
    held_up = perf_counter() - start
    times = [math.inf] * len(runs)
    for _ in range(_ROUNDS):
        torch.cuda._sleep(int(held_up * _CLOCKS))
        marks = [_mark()]
        for run in runs:
            run()
            marks.append(_mark())
        marks[-1].synchronize()
        for index, (begin, end) in enumerate(pairwise(marks)):
            times[index] = min(times[index], begin.elapsed_time(end))
    return times


def _mark() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event
