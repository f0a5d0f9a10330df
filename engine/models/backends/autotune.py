"""Which of several ways to compute the same is the quickest on a GPU, found by timing them.

TunedProducts does so with matrix products. The library chooses its kernel, tile and cluster of
blocks for a product by a rule, which needs up to a third more time than the best of what it has. So
torch's call and the algorithms that the library names are timed once for each shape that a caller
asks for, with the model's own weights, one after another as a step reads them. Products of other
shapes are torch's.
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
_MOST_WEIGHTS = 24  # in a round of products: what is given to a device at once has a limit


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


class _Shape(NamedTuple):
    tokens: int
    rows: int
    inputs: int
    add: bool  # to what is there
    single: bool  # float32, of inputs of 16 bits

    def __str__(self) -> str:
        return " ".join(str(int(value)) for value in self)


class TunedProducts:
    """Matrix products by the quickest of the library's algorithms: x weight^T of tensors on a GPU
    in bfloat16 or float16. `tuning`: what was measured before; None: everything is measured."""

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
        """Looks for the quickest way to multiply `tokens` rows with each of `weights`, all of one
        shape; where there is no memory to try in, that is torch's. Waits for the device."""
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
        # The library does not promise that what it names runs.
        algorithms = [one for one in found if works(partial(by, one))]
        quickest = quickest_of([by_torch, *(partial(by, one) for one in algorithms)])
        if quickest > 0:
            self._chosen[shape] = algorithms[quickest - 1]
        self._tuning.add_product(str(shape), algorithms[quickest - 1].tolist() if quickest else [])

    def product(self, x: Tensor, weight: Tensor) -> Tensor:
        """x [tokens, inputs], weight [rows, inputs] -> [tokens, rows]."""
        algorithm = self._algorithm(x, weight)
        if algorithm is None:
            return torch.mm(x, weight.t())
        out = x.new_empty(len(x), len(weight))
        product_(out, x, weight, algorithm)
        return out

    def add_(self, out: Tensor, x: Tensor, weight: Tensor) -> None:
        """out [tokens, rows] += x weight^T."""
        algorithm = self._algorithm(x, weight, add=True)
        if algorithm is None:
            out.addmm_(x, weight.t())
        else:
            product_(out, x, weight, algorithm, add=True)

    def single(self, x: Tensor, weight: Tensor) -> Tensor:
        """As `product`, in float32: sums are not rounded."""
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
    """Whether rows begin where product_ wants them."""
    bytes_out = 4 if shape.single else weight.element_size()
    return not (shape.inputs * weight.element_size() % 16 or shape.rows * bytes_out % 16)


def _enough(weight: Tensor) -> int:
    """How many weights of this size no cache has all of: those of a step come from memory."""
    cache: int = torch.cuda.get_device_properties(weight.device).L2_cache_size
    return min(_MOST_WEIGHTS, 1 + 2 * cache // weight.nbytes)
