"""TunedProducts: matrix products by the quickest of the library's algorithms, found by timing them.

The library chooses its kernel, tile and cluster of blocks for a product by a rule, which needs up
to a third more time than the best of what it has. So torch's call and the algorithms that the
library names are timed once for each shape that a caller asks for, with the model's own weights,
one after another as a step reads them. Products of other shapes are torch's.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from engine.models.backends.autotune import quickest_of, works
from engine.ops.cublaslt import product_, product_algorithms

_MOST_WEIGHTS = 24  # in a round: what is given to a device at once has a limit


class _Shape(NamedTuple):
    tokens: int
    rows: int
    inputs: int
    add: bool  # to what is there
    single: bool  # float32, of inputs of 16 bits


class TunedProducts:
    """x weight^T of tensors on a GPU in bfloat16 or float16."""

    def __init__(self) -> None:
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
        # The library does not promise that what it names runs.
        algorithms = [one for one in found if works(partial(by, one))]
        quickest = quickest_of([by_torch, *(partial(by, one) for one in algorithms)])
        if quickest > 0:
            self._chosen[shape] = algorithms[quickest - 1]

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
