"""Columns: what `ops.draw_` needs of the rows that it draws for, packed in one piece of memory.

A piece is filled on the host and uploaded at once. Parameters keeps what requests ask for, so that
filling it is one look-up per column.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine import distribution, ops
from engine.messages import SamplingParams
from engine.ops.linear_best import draw_best_
from engine.plan import MOST_STEPS, Admission
from engine.sampler import drawn_temperature
from engine.sequence import MOST_STOP_IDS, is_plain, stop_ids

_WIDE = 3  # columns of 8 bytes, which come first
_NARROW = 5  # columns of 4 bytes
FILLED_WORDS = 2 * _WIDE + _NARROW + MOST_STOP_IDS + 2  # of a row: all but `out`
RESULT_WORD = FILLED_WORDS - 2  # where slots, cursor and `out` begin, in words of all rows


def _words() -> NDArray[np.int64]:
    """Of each word that is filled of a row: its place, as multiples of the size and of the row, and
    what comes on top: [3, FILLED_WORDS, 1]."""
    words = [(2 * column, 2, half) for column in range(_WIDE) for half in range(2)]
    begin = 2 * _WIDE
    words += [(begin + column, 1, 0) for column in range(_NARROW)]
    begin += _NARROW
    words += [(begin, MOST_STOP_IDS, stop) for stop in range(MOST_STOP_IDS)]
    begin += MOST_STOP_IDS
    words += [(begin + column, 1, 0) for column in range(2)]
    return np.array(words, np.int64).T[:, :, None]


_WORDS = _words()


class Columns(NamedTuple):
    """Of `size` rows; what they mean is said at `ops.draw_`."""

    positions: Tensor  # [size] int64
    streams: Tensor  # [size] int64
    top_p: Tensor  # [size] float64
    tokens: Tensor  # [size] int32
    remaining: Tensor  # [size] int32
    top_k: Tensor  # [size] int32
    temperature: Tensor  # [size] float32
    min_p: Tensor  # [size] float32
    stop_ids: Tensor  # [size, MOST_STOP_IDS] int32
    slots: Tensor  # [size] int32
    cursor: Tensor  # [size] int32
    out: Tensor  # [MOST_STEPS, size] int32; fewer where the memory has no more


def columns(memory: Tensor, size: int) -> Columns:
    """The columns of `size` rows, packed at the beginning of `memory` (int32, 1-d)."""
    wide = memory[: 2 * _WIDE * size].view(torch.int64).view(_WIDE, size)
    rest = memory[2 * _WIDE * size : len(memory) // size * size]
    narrow = rest[: _NARROW * size].view(_NARROW, size)
    floats = narrow.view(torch.float32)
    rest = rest[_NARROW * size :]
    stops = rest[: MOST_STOP_IDS * size].view(size, MOST_STOP_IDS)
    last = rest[MOST_STOP_IDS * size :].view(-1, size)
    return Columns(
        wide[0], wide[1], wide[2].view(torch.float64), narrow[0], narrow[1], narrow[2],
        floats[3], floats[4], stops, last[0], last[1], last[2 : 2 + MOST_STEPS],
    )  # fmt: skip


class HostColumns(NamedTuple):
    """Columns in host memory, seen as arrays: to make these views takes longer than to fill them,
    so who fills the same memory often keeps them."""

    positions: NDArray[np.int64]
    streams: NDArray[np.int64]
    top_p: NDArray[np.float64]
    tokens: NDArray[np.int32]
    remaining: NDArray[np.int32]
    top_k: NDArray[np.int32]
    temperature: NDArray[np.float32]
    min_p: NDArray[np.float32]
    stop_ids: NDArray[np.int32]
    slots: NDArray[np.int32]
    cursor: NDArray[np.int32]


def host_columns(memory: Tensor, size: int) -> HostColumns:
    """The columns of `size` rows but `out`, packed at the beginning of `memory`, on the host."""
    *filled, _ = columns(memory, size)
    return HostColumns(*(column.numpy() for column in filled))


def words_of(rows: Sequence[int], size: int) -> NDArray[np.int64]:
    """Where what is filled of `rows` lies in the memory of `size` rows: [FILLED_WORDS, rows]."""
    at_size, at_row, more = _WORDS
    places: NDArray[np.int64] = at_size * size + at_row * np.asarray(rows, np.int64) + more
    return places


class Drawing(NamedTuple):
    """Rows that a round has drawn the first tokens for, on the device until the next round reads
    prompts."""

    keys: list[int]  # of their sequences
    words: Tensor  # int32: the memory of their columns
    size: int  # rows that it is made for
    tokens: Tensor  # [rows] int32; negative where the logits are not finite


def draw_rows(logits: Tensor, at: Columns) -> None:
    """`ops.draw_` with logits fp32 [rows, vocab]."""
    ops.draw_(
        logits, at.tokens, at.slots, at.positions, at.remaining, at.cursor, at.out,
        at.temperature, at.top_k, at.top_p, at.min_p, at.streams, at.stop_ids,
    )  # fmt: skip


def draw_bests(best: Tensor, at: Columns) -> None:
    """`draw_best_`, with bests int64 [rows, parts]."""
    draw_best_(
        best, at.tokens, at.slots, at.positions, at.remaining, at.cursor, at.out, at.stop_ids
    )


class Parameters:
    """What plain requests ask for, by the slot of their sequence: columns on the host."""

    def __init__(self, slots: int, vocab_size: int, eos_token_id: int | None) -> None:
        self._vocab_size = vocab_size
        self._eos_token_id = eos_token_id
        self._plain = np.zeros(slots, np.bool_)
        self._streams = np.zeros(slots, np.int64)
        self._top_p = np.ones(slots, np.float64)
        self._top_k = np.zeros(slots, np.int32)
        self._temperature = np.zeros(slots, np.float32)
        self._min_p = np.zeros(slots, np.float32)
        self._stop_ids = np.full((slots, MOST_STOP_IDS), -1, np.int32)
        self._max_tokens = np.zeros(slots, np.int32)

    def admit(self, admissions: Sequence[Admission]) -> None:
        """Notes what these requests ask for."""
        if not admissions:
            return
        slots = [one.slot for one in admissions]
        params = [one.request.sampling for one in admissions]
        plain = [is_plain(one) for one in params]
        self._plain[slots] = plain
        if not all(plain):
            slots = [slot for slot, is_one in zip(slots, plain, strict=True) if is_one]
            params = [one for one, is_one in zip(params, plain, strict=True) if is_one]
        if slots:
            self._put(slots, params)

    def all_plain(self, slots: Sequence[int]) -> bool:
        """Whether the device can draw for all of these without the host."""
        return bool(self._plain[list(slots)].all())

    def fill(
        self,
        at: HostColumns,
        slots: NDArray[np.int32],
        positions: NDArray[np.int64],
        tokens: NDArray[np.int64],
    ) -> None:
        """Fills the first rows for the sequences of `slots`, [n] as the others are, and makes the
        rest padding."""
        batch = len(slots)
        for column, values in (
            (at.positions, positions),
            (at.remaining, self._max_tokens[slots] - positions),
            (at.tokens, tokens),
            (at.streams, self._streams[slots]),
            (at.top_p, self._top_p[slots]),
            (at.top_k, self._top_k[slots]),
            (at.temperature, self._temperature[slots]),
            (at.min_p, self._min_p[slots]),
            (at.stop_ids, self._stop_ids[slots]),
        ):
            column[:batch] = values
            column[batch:] = 0
        at.slots[:batch] = slots
        at.slots[batch:] = -1
        at.cursor[:] = 0

    def _put(self, slots: list[int], params: list[SamplingParams]) -> None:
        temperatures = [drawn_temperature(one) for one in params]
        self._temperature[slots] = temperatures
        if any(temperatures):  # else a draw looks at nothing of this
            seeds = np.array([one.seed for one in params], np.int64)
            choices = np.array([one.choice for one in params], np.int64)
            self._streams[slots] = distribution.stream_ids(seeds, choices)
            self._top_p[slots] = [one.top_p for one in params]
            self._top_k[slots] = [
                one.top_k if one.top_k < self._vocab_size else 0 for one in params
            ]
            self._min_p[slots] = [one.min_p for one in params]
        self._max_tokens[slots] = [one.max_tokens for one in params]
        self._stop_ids[slots] = -1
        if self._eos_token_id is not None:
            self._stop_ids[slots, 0] = [
                -1 if one.ignore_eos else self._eos_token_id for one in params
            ]
        for slot, one in zip(slots, params, strict=True):
            if one.stop_token_ids:
                ids = list(stop_ids(one, self._eos_token_id))
                self._stop_ids[slot, : len(ids)] = ids
