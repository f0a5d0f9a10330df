"""TunedProducts: matrix products by the quickest of the library's algorithms, found by timing them;
and how anything else is timed so.

The library guesses which of its kernels, tiles and clusters of blocks suits a product. Its first
guess, which torch takes, needs up to a third more time than the best of those that it names. So
they are timed once for each shape that graphs are made for, with the model's own weights, one after
another as a step reads them. Products of other shapes are torch's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from time import perf_counter
from typing import NamedTuple

import torch
from torch import Tensor

from engine.ops.product import product_, product_algorithms

_MOST_WEIGHTS = (
    6  # that are read in turn; of one alone the cache would have what a step has to read
)
_ROUNDS = 3  # the best of which counts
_ALIKE = 1.01  # times that are no further apart tell nothing
# The device is held up while all that is timed is given to it, or the host's pace would be timed:
# clocks for each second that this takes, and some more.
_CLOCKS = 3e9


class _Shape(NamedTuple):
    tokens: int
    rows: int
    inputs: int
    add: bool  # to what is there
    single: bool  # float32, of inputs of 16 bits


class TunedProducts:
    """x weight^T of tensors on a GPU in bfloat16 or float16."""

    def __init__(self) -> None:
        self._chosen: dict[_Shape, Tensor] = {}

    def tune(
        self, weights: Sequence[Tensor], tokens: int, *, add: bool = False, single: bool = False
    ) -> None:
        """Looks for the quickest way to multiply `tokens` rows with each of `weights`, all of one
        shape. Waits for the device."""
        if not weights:
            return
        first, weights = weights[0], weights[:_MOST_WEIGHTS]
        shape = _Shape(tokens, len(first), first.shape[1], add, single)
        if shape in self._chosen or not _fits(shape, first):
            return
        x = torch.randn(tokens, shape.inputs, dtype=first.dtype, device=first.device)
        out = torch.zeros(
            tokens, shape.rows, dtype=torch.float32 if single else first.dtype, device=first.device
        )

        def multiply(algorithm: Tensor) -> None:
            for weight in weights:
                product_(out, x, weight, algorithm, add=add)

        algorithms = list(product_algorithms(x, first, out))
        quickest = quickest_of([partial(multiply, one) for one in algorithms])
        if quickest is not None:
            self._chosen[shape] = algorithms[quickest]

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


def quickest_of(runs: Sequence[Callable[[], object]]) -> int | None:
    """Which of them keeps the device busy for the shortest time; None where none runs."""
    times = _times(runs)
    return _first_of_the_best(times) if any(map(math.isfinite, times)) else None


def _fits(shape: _Shape, weight: Tensor) -> bool:
    """Whether rows begin where product_ wants them."""
    bytes_out = 4 if shape.single else weight.element_size()
    return not (shape.inputs * weight.element_size() % 16 or shape.rows * bytes_out % 16)


def _first_of_the_best(times: Sequence[float]) -> int:
    """Of those that are alike the library's favourite, so that it is the same one next time."""
    best = min(times)
    return next(index for index, time in enumerate(times) if time <= best * _ALIKE)


def _times(runs: Sequence[Callable[[], object]]) -> list[float]:
    """Milliseconds that each keeps the device busy; infinite where it fails."""
    works = [_works(run) for run in runs]
    start = perf_counter()
    for run, one in zip(runs, works, strict=True):
        if one:
            run()
    held_up = perf_counter() - start
    times = [math.inf] * len(runs)
    for _ in range(_ROUNDS):
        torch.cuda._sleep(int(held_up * _CLOCKS))
        marks = [_mark()]
        for run, one in zip(runs, works, strict=True):
            if one:
                run()
            marks.append(_mark())
        marks[-1].synchronize()
        for index, (begin, end) in enumerate(pairwise(marks)):
            if works[index]:
                times[index] = min(times[index], begin.elapsed_time(end))
    return times


def _works(run: Callable[[], object]) -> bool:
    """Runs it, which loads its kernels."""
    try:
        run()
    except RuntimeError:
        return False
    return True


def _mark() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event
