"""BatchSamplingParams: sampling parameters by slot, from which SamplingRows are filled quickly."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from engine.protocol.sampling_params import (
    MOST_STOP_IDS,
    SamplingParams,
    is_greedy,
    is_plain,
    stop_ids,
    top_of,
)
from engine.runner.sampling import random_streams
from engine.runner.sampling.batch_rows import HostSamplingRows
from engine.step_plan import Admission

_MOST_FLOAT = float(np.finfo(np.float32).max)
_MIN_TEMPERATURE = 1e-30  # keeps the division defined; sampling is greedy long before


class BatchSamplingParams:
    """The requests' sampling parameters by slot: one host array for each parameter."""

    def __init__(self, slots: int, vocab_size: int, eos_token_ids: tuple[int, ...]) -> None:
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._usual_stops = _row_of(eos_token_ids)  # stop ids of requests that set none
        self._plain = np.zeros(slots, np.bool_)
        self._streams = np.zeros(slots, np.int64)
        self._top_p = np.ones(slots, np.float64)
        self._top_k = np.zeros(slots, np.int32)
        self._temperature = np.zeros(slots, np.float32)
        self._min_p = np.zeros(slots, np.float32)
        self._tops = np.full(slots, -1, np.int32)
        self._stop_ids = np.full((slots, MOST_STOP_IDS), -1, np.int32)
        self._max_tokens = np.zeros(slots, np.int32)

    def admit(self, admissions: Sequence[Admission]) -> None:
        """Store the parameters of these requests."""
        if not admissions:
            return
        slots = [one.slot for one in admissions]
        params = [one.request.sampling for one in admissions]
        self._plain[slots] = [is_plain(one, self._eos_token_ids) for one in params]
        self._put(slots, params)

    def all_plain(self, slots: Sequence[int]) -> bool:
        """Return whether the device can sample for all of these slots without the host."""
        return bool(self._plain[list(slots)].all())

    def asked(self, slots: Sequence[int]) -> list[tuple[int, int]]:
        """Return (row, number of top tokens) of those that ask for log-probabilities."""
        tops = self._tops[list(slots)]
        return [(row, top) for row, top in enumerate(tops.tolist()) if top >= 0]

    def fill(
        self,
        at: HostSamplingRows,
        slots: NDArray[np.int32],
        positions: NDArray[np.int64],
        tokens: NDArray[np.int64],
    ) -> None:
        """Fill the first rows for the sequences in `slots`, and make the rest padding.

        All arrays are [n].
        """
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
            (at.tops, self._tops[slots]),
            (at.stop_ids, self._stop_ids[slots]),
        ):
            column[:batch] = values
            column[batch:] = 0
        at.slots[:batch] = slots
        at.slots[batch:] = -1
        at.cursor[:] = 0

    def _put(self, slots: list[int], params: list[SamplingParams]) -> None:
        temperatures = [sampling_temperature(one) for one in params]
        self._temperature[slots] = temperatures
        if any(temperatures):  # greedy sampling uses none of these
            seeds = np.array([one.seed for one in params], np.int64)
            choices = np.array([one.choice for one in params], np.int64)
            self._streams[slots] = random_streams.stream_ids(seeds, choices)
            self._top_p[slots] = [one.top_p for one in params]
            self._top_k[slots] = [
                one.top_k if one.top_k < self._vocab_size else 0 for one in params
            ]
            self._min_p[slots] = [one.min_p for one in params]
        self._tops[slots] = [top_of(one) for one in params]
        self._max_tokens[slots] = [one.max_tokens for one in params]
        ignore = np.array([one.ignore_eos for one in params])
        self._stop_ids[slots] = np.where(ignore[:, np.newaxis], -1, self._usual_stops)
        for slot, one in zip(slots, params, strict=True):
            if one.stop_token_ids:
                self._stop_ids[slot] = _row_of(stop_ids(one, self._eos_token_ids))


def _row_of(ids: Iterable[int]) -> NDArray[np.int32]:
    """Return stop ids [MOST_STOP_IDS], padded with -1; the host handles requests with more."""
    row = np.full(MOST_STOP_IDS, -1, np.int32)
    first = list(ids)[:MOST_STOP_IDS]
    row[: len(first)] = first
    return row


def sampling_temperature(params: SamplingParams) -> float:
    """Return the temperature for `ops.sample_`: 0 for greedy sampling.

    Values that float32 cannot represent become the nearest positive one.
    """
    if is_greedy(params):
        return 0.0
    return min(max(params.temperature, _MIN_TEMPERATURE), _MOST_FLOAT)
