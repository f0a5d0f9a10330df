"""SamplingRows: the inputs of `ops.sample_` for a batch, packed in one block of memory.

A block is filled on the host (engine/runner/sampling/batch_params.py) and uploaded in one copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine import ops
from engine.ops.sampling import sample_best_
from engine.protocol.sampling_params import MOST_STOP_IDS
from engine.step_plan import MOST_STEPS

_WIDE = 3  # fields of 8 bytes, which come first
_NARROW = 6  # fields of 4 bytes
FILLED_WORDS = 2 * _WIDE + _NARROW + MOST_STOP_IDS + 2  # words of a row, except for `out`
RESULT_WORD = FILLED_WORDS - 2  # word per row at which slots, cursor and `out` begin


def _words() -> NDArray[np.int64]:
    """Return, for each filled word of a row, the coefficients of its offset: [3, FILLED_WORDS, 1].

    The offset is first * size + second * row + third.
    """
    words = [(2 * column, 2, half) for column in range(_WIDE) for half in range(2)]
    begin = 2 * _WIDE
    words += [(begin + column, 1, 0) for column in range(_NARROW)]
    begin += _NARROW
    words += [(begin, MOST_STOP_IDS, stop) for stop in range(MOST_STOP_IDS)]
    begin += MOST_STOP_IDS
    words += [(begin + column, 1, 0) for column in range(2)]
    return np.array(words, np.int64).T[:, :, None]


_WORDS = _words()


class SamplingRows(NamedTuple):
    """The fields of `size` rows; `ops.sample_` and `ops.report_logprobs_` describe them."""

    positions: Tensor  # [size] int64
    streams: Tensor  # [size] int64
    top_p: Tensor  # [size] float64
    tokens: Tensor  # [size] int32
    remaining: Tensor  # [size] int32
    top_k: Tensor  # [size] int32
    temperature: Tensor  # [size] float32
    min_p: Tensor  # [size] float32
    tops: Tensor  # [size] int32
    stop_ids: Tensor  # [size, MOST_STOP_IDS] int32
    slots: Tensor  # [size] int32
    cursor: Tensor  # [size] int32
    out: Tensor  # [MOST_STEPS, size] int32; fewer if the memory is smaller


def sampling_rows(memory: Tensor, size: int) -> SamplingRows:
    """Return views of the fields of `size` rows at the beginning of `memory` (int32, 1-d)."""
    wide = memory[: 2 * _WIDE * size].view(torch.int64).view(_WIDE, size)
    rest = memory[2 * _WIDE * size : len(memory) // size * size]
    narrow = rest[: _NARROW * size].view(_NARROW, size)
    floats = narrow.view(torch.float32)
    rest = rest[_NARROW * size :]
    stops = rest[: MOST_STOP_IDS * size].view(size, MOST_STOP_IDS)
    last = rest[MOST_STOP_IDS * size :].view(-1, size)
    return SamplingRows(
        wide[0], wide[1], wide[2].view(torch.float64), narrow[0], narrow[1], narrow[2],
        floats[3], floats[4], narrow[5], stops, last[0], last[1], last[2 : 2 + MOST_STEPS],
    )  # fmt: skip


class HostSamplingRows(NamedTuple):
    """SamplingRows in host memory, as arrays.

    Making the views takes longer than filling them, so keep them for memory that is reused.
    """

    positions: NDArray[np.int64]
    streams: NDArray[np.int64]
    top_p: NDArray[np.float64]
    tokens: NDArray[np.int32]
    remaining: NDArray[np.int32]
    top_k: NDArray[np.int32]
    temperature: NDArray[np.float32]
    min_p: NDArray[np.float32]
    tops: NDArray[np.int32]
    stop_ids: NDArray[np.int32]
    slots: NDArray[np.int32]
    cursor: NDArray[np.int32]


def host_sampling_rows(memory: Tensor, size: int) -> HostSamplingRows:
    """Return array views of the fields of `size` rows, except `out`, in host memory `memory`."""
    *filled, _ = sampling_rows(memory, size)
    return HostSamplingRows(*(column.numpy() for column in filled))


def words_of(rows: Sequence[int], size: int) -> NDArray[np.int64]:
    """Return the offsets of the filled words of `rows` in memory for `size` rows.

    The result is [FILLED_WORDS, rows].
    """
    at_size, at_row, more = _WORDS
    offsets: NDArray[np.int64] = at_size * size + at_row * np.asarray(rows, np.int64) + more
    return offsets


def sample_rows(logits: Tensor, at: SamplingRows) -> None:
    """Run `ops.sample_` on logits fp32 [rows, vocab]."""
    ops.sample_(
        logits, at.tokens, at.slots, at.positions, at.remaining, at.cursor, at.out,
        at.temperature, at.top_k, at.top_p, at.min_p, at.streams, at.stop_ids,
    )  # fmt: skip


def sample_bests(best: Tensor, at: SamplingRows) -> None:
    """Run `sample_best_` on bests int64 [rows, parts]."""
    sample_best_(
        best, at.tokens, at.slots, at.positions, at.remaining, at.cursor, at.out, at.stop_ids
    )
