"""The ways in which HopperBackend reads tokens, and which one a number of them goes."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from enum import Enum, auto

from engine.models.minrnn.lm import LM

# Steps of more rows and prompts of more tokens are read with products of the library: its large
# tiles fill the GPU, and they outweigh the two kernels a layer more. Measured on an H200; what
# `prepare` measures counts before it.
_MOST_ROWS = 192
_MOST_ROWS_OF_SMALL_LAYERS = 1024  # of less than _SMALL weights: fewer kernels for longer
_SMALL = 4_000_000
# Of so few tokens the library was never quicker.
MOST_WITHOUT_LIBRARY = 32
_MOST_TOKENS = 192
_MOST_TOKENS_WITH_CONV = 384  # which the library's products would have three kernels more for


class ExecutionPath(Enum):
    """How tokens are read."""

    CHAIN = auto()
    CHAIN_TO_HEAD = auto()  # which is apart; of steps
    LIBRARY_AROUND = auto()  # the middle of a layer, which is the chain's: out projection to GELU
    LIBRARY = auto()
    CLUSTERS = auto()  # of blocks, each with all weights: one kernel, or one to a head; of steps
    WHOLE = auto()  # one kernel; of steps of few rows
    NARROW = auto()  # the same with 8-bit weights


OF_THE_LIBRARY = (ExecutionPath.LIBRARY_AROUND, ExecutionPath.LIBRARY)
#: Which have a head apart in any case.
TO_A_HEAD = (ExecutionPath.CHAIN_TO_HEAD, *OF_THE_LIBRARY)
OF_FEW = (ExecutionPath.NARROW, ExecutionPath.WHOLE)
#: More than so many rows have clusters take turns on some GPUs.
ROWS_AT_ONCE = {ExecutionPath.CLUSTERS: 96}


def to_be_timed(sizes: Iterable[int]) -> list[int]:
    """Powers of two and the largest, for each takes up to a second."""
    rising = sorted(sizes)
    return [size for size in rising if size.bit_count() == 1 or size == rising[-1]]


def nearest(
    found: Mapping[int, ExecutionPath],
    size: int,
    unmeasured: ExecutionPath,
    most: Mapping[ExecutionPath, int] | None = None,
) -> ExecutionPath:
    """What was found for this size, or for the one that is nearest to it: by ratio, so that of two
    powers the larger one counts from 1.42 times the smaller one on. `most`: the largest size that
    can go a way, where there is one."""
    timed = max(found, default=0)
    limits = {way: max(rows, timed) for way, rows in ROWS_AT_ONCE.items()} | dict(most or {})
    possible = {other: way for other, way in found.items() if size <= limits.get(way, size)}
    if not possible or size == 0:
        return unmeasured
    way = possible[min(possible, key=lambda other: max(other, size) / min(other, size))]
    return ExecutionPath.CHAIN if size <= MOST_WITHOUT_LIBRARY and way in TO_A_HEAD else way


def where_the_library_begins(model: LM) -> tuple[int, int]:
    """The most rows of a step, and the most tokens of a prompt, that go the other way."""
    if model.config.conv_kernel:
        return sys.maxsize, _MOST_TOKENS_WITH_CONV
    layer = next(iter(model.layers))
    small = sum(weight.numel() for weight in layer.parameters()) < _SMALL
    return _MOST_ROWS_OF_SMALL_LAYERS if small else _MOST_ROWS, _MOST_TOKENS
