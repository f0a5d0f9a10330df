"""Autotuning: finds the fastest of several ways to compute the same on a GPU, by timing them.

TunedProducts does this for matrix products. cuBLASLt chooses kernel, tile and cluster size of a
product by a heuristic, which takes up to a third longer than the best of its algorithms. So torch's
call and the algorithms that the library offers are timed once for each shape that a caller asks
for, with the model's own weights, one after another as a step reads them. Products of other shapes
use torch's call.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from itertools import pairwise
from time import perf_counter
from typing import NamedTuple

import torch
from torch import Tensor

from engine.gc_tuning import gc_paused
from engine.models.backends.tuning_cache import TuningCache
from engine.ops.cublaslt import product_, product_algorithms

Run = Callable[[], object]

_ROUNDS = 3  # rounds, of which the best counts
_ALIKE = 1.01  # times within this factor count as equal
# The device is held up while everything to be timed is launched, or the host's pace would be
# measured: clock cycles per second of launching, more than a GPU has in one.
_CLOCKS = 3e9
# Work that takes this many milliseconds can keep a device at its power limit, which it may exceed
# briefly but not for long. Candidates within the factor _NEARLY are therefore run for _UNTIL_STEADY
# milliseconds before they are timed, and for _STEADY while they are.
_LONG = 1.0
_NEARLY = 1.12
_UNTIL_STEADY, _STEADY = 120.0, 60.0
_MOST_WEIGHTS = 24  # in a round of products: the device's launch queue is limited


def quickest_of(runs: Sequence[Run]) -> int:
    """Return the index of the run that keeps the device busy for the shortest time.

    Of equally fast ones it is the first, so that noise matters less. Raises what the runs raise.
    """
    return _first_of_the_best(_times(runs))


def quickest_graph_of(runs: Sequence[Run], *, lasting: bool) -> int:
    """Return the index of the fastest run when captured in CUDA graphs, as `quickest_of` does.

    Kernels follow one another faster in a graph. `lasting`: runs of a millisecond or more are
    compared under sustained load, a second for all.
    """
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
    torch.cuda.empty_cache()  # a capture could not do this when it needs memory
    # They may share memory when run one after another, since nobody needs their results.
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
    """Replay the graph for about `milliseconds`; return how many times."""
    count = max(1, round(milliseconds / time))
    for _ in range(count):
        graph.replay()
    return count


def _lasting_time(graph: torch.cuda.CUDAGraph, about: float) -> float:
    """Return the milliseconds of a replay under sustained load."""
    _keep_busy(graph, about, _UNTIL_STEADY)
    begin = _mark()
    count = _keep_busy(graph, about, _STEADY)
    end = _mark()
    end.synchronize()
    time: float = begin.elapsed_time(end) / count
    return time


def works(run: Run) -> bool:
    """Return whether `run` can be executed. Raises errors that do not answer this."""
    try:
        run()
        _finish()
    except RuntimeError as error:
        if type(error) is not RuntimeError:  # out of memory, or a device error
            raise
        _finish()  # raises if the device is lost
        return False
    return True


def _finish() -> None:
    """Wait for the device, if one is used."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def _times(runs: Sequence[Run]) -> list[float]:
    """Return how many milliseconds each run keeps the device busy."""
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


class _Shape(NamedTuple):
    tokens: int
    rows: int
    inputs: int
    add: bool  # accumulate into the output
    single: bool  # float32 output of 16-bit inputs

    def __str__(self) -> str:
        return " ".join(str(int(value)) for value in self)


class TunedProducts:
    """Matrix products x weight^T by the fastest cuBLASLt algorithm, for 16-bit types on a GPU.

    `tuning` has earlier measurements; None: everything is measured.
    """

    def __init__(self, tuning: TuningCache | None = None) -> None:
        self._tuning = TuningCache() if tuning is None else tuning
        self._chosen: dict[_Shape, Tensor | None] = {}  # None: torch's own call

    def tune(
        self,
        weights: Sequence[Tensor],
        tokens: int,
        *,
        add: bool = False,
        single: bool = False,
    ) -> None:
        """Find the fastest way to multiply `tokens` rows with each of `weights`, all of one shape.

        If memory is too short to try, it is torch's call. Waits for the device.
        """
        with suppress(torch.OutOfMemoryError):
            self._tune(weights, tokens, add, single)

    def _tune(self, weights: Sequence[Tensor], tokens: int, add: bool, single: bool) -> None:
        if not weights:
            return
        first = weights[0]
        shape = _Shape(tokens, len(first), first.shape[1], add, single)
        if shape in self._chosen or not _fits(shape, first):
            return
        weights = weights[: _enough(first)]
        dtype = torch.float32 if single else first.dtype
        random = torch.Generator(first.device).manual_seed(0)
        x = torch.randn(
            tokens, shape.inputs, dtype=first.dtype, device=first.device, generator=random
        )
        out = torch.zeros(tokens, shape.rows, dtype=dtype, device=first.device)

        def by_torch() -> None:
            for weight in weights:
                if add:
                    self.add_(out, x, weight)
                else:
                    (self.single if single else self.product)(x, weight)

        def by(algorithm: Tensor) -> None:
            for weight in weights:
                product_(out, x, weight, algorithm, add=add)

        self._chosen[shape] = None
        found = product_algorithms(x, first, out)
        known = self._tuning.product_of(str(shape), found.tolist())
        if known is not None:
            self._chosen[shape] = None if known < 0 else found[known]
            return
        # The library does not guarantee that every algorithm it offers runs.
        algorithms = [one for one in found if works(partial(by, one))]
        quickest = quickest_of([by_torch, *(partial(by, one) for one in algorithms)])
        if quickest > 0:
            self._chosen[shape] = algorithms[quickest - 1]
        self._tuning.add_product(str(shape), algorithms[quickest - 1].tolist() if quickest else [])

    def product(self, x: Tensor, weight: Tensor) -> Tensor:
        """Return x weight^T: x [tokens, inputs], weight [rows, inputs] -> [tokens, rows]."""
        algorithm = self._algorithm(x, weight)
        if algorithm is None:
            return torch.mm(x, weight.t())
        out = x.new_empty(len(x), len(weight))
        product_(out, x, weight, algorithm)
        return out

    def add_(self, out: Tensor, x: Tensor, weight: Tensor) -> None:
        """Add x weight^T to out [tokens, rows]."""
        algorithm = self._algorithm(x, weight, add=True)
        if algorithm is None:
            out.addmm_(x, weight.t())
        else:
            product_(out, x, weight, algorithm, add=True)

    def single(self, x: Tensor, weight: Tensor) -> Tensor:
        """Return x weight^T in float32, without rounding the sums."""
        algorithm = self._algorithm(x, weight, single=True)
        if algorithm is None:
            return torch.mm(x, weight.t(), out_dtype=torch.float32)
        out = x.new_empty(len(x), len(weight), dtype=torch.float32)
        product_(out, x, weight, algorithm)
        return out

    def _algorithm(
        self, x: Tensor, weight: Tensor, *, add: bool = False, single: bool = False
    ) -> Tensor | None:
        shape = _Shape(len(x), len(weight), weight.shape[1], add, single)
        return self._chosen.get(shape)


def _fits(shape: _Shape, weight: Tensor) -> bool:
    """Return whether rows are aligned as product_ requires."""
    bytes_out = 4 if shape.single else weight.element_size()
    return not (shape.inputs * weight.element_size() % 16 or shape.rows * bytes_out % 16)


def _enough(weight: Tensor) -> int:
    """Return how many weights of this size exceed the L2 cache, as those of a step do."""
    cache: int = torch.cuda.get_device_properties(weight.device).L2_cache_size
    return min(_MOST_WEIGHTS, 1 + 2 * cache // weight.nbytes)
