"""DecodeState: a decode batch on the device, whose rows draw, go on and end by themselves.

What a row needs (its slot, last token, position, parameters) lies in one piece of device memory,
column by column. It is uploaded at once when the batch is made, and left there while rounds follow
one another: a step reads it, and `draw_` moves it on. What a round brings (which rows are left, how
many tokens each drew, and these) lies at the end of the same memory and is fetched at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from engine import distribution, ops
from engine.device import upload
from engine.graphs import BucketGraphs
from engine.messages import SamplingParams
from engine.plan import MOST_STEPS, Admission, DecodeRow, Drawn
from engine.sampler import FLOAT_MAX, MIN_TEMPERATURE
from engine.sequence import MOST_STOP_IDS, is_plain, stop_ids

ModelStep = Callable[[Tensor, Tensor], Tensor]

_WIDE = 3  # columns of 8 bytes, which come first
_NARROW = 5  # columns of 4 bytes
_UPLOADED = 2 * _WIDE + _NARROW + MOST_STOP_IDS + 2  # words of a row: all but `out`
_FETCHED_FROM = _UPLOADED - 2  # slots, cursor and `out`
_WORDS = _UPLOADED + MOST_STEPS


class _Columns(NamedTuple):
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


def _columns(memory: Tensor, size: int) -> _Columns:
    """The columns of `size` rows, packed at the beginning of `memory` (int32, 1-d)."""
    wide = memory[: 2 * _WIDE * size].view(torch.int64).view(_WIDE, size)
    rest = memory[2 * _WIDE * size : len(memory) // size * size]
    narrow = rest[: _NARROW * size].view(_NARROW, size)
    floats = narrow.view(torch.float32)
    rest = rest[_NARROW * size :]
    stops = rest[: MOST_STOP_IDS * size].view(size, MOST_STOP_IDS)
    last = rest[MOST_STOP_IDS * size :].view(-1, size)
    return _Columns(
        wide[0], wide[1], wide[2].view(torch.float64), narrow[0], narrow[1], narrow[2],
        floats[3], floats[4], stops, last[0], last[1], last[2 : 2 + MOST_STEPS],
    )  # fmt: skip


class _Parameters:
    """What requests ask for, by the slot of their sequence: columns on the host."""

    def __init__(self, slots: int, vocab_size: int, eos_token_id: int | None) -> None:
        self._vocab_size = vocab_size
        self._eos_token_id = eos_token_id
        self.streams = np.zeros(slots, np.int64)
        self.top_p = np.ones(slots, np.float64)
        self.top_k = np.zeros(slots, np.int32)
        self.temperature = np.zeros(slots, np.float32)
        self.min_p = np.zeros(slots, np.float32)
        self.stop_ids = np.full((slots, MOST_STOP_IDS), -1, np.int32)
        self.max_tokens = np.zeros(slots, np.int32)

    def put(self, slots: list[int], params: list[SamplingParams]) -> None:
        """Notes the parameters of plain requests."""
        seeds = torch.tensor([one.seed for one in params])
        choices = torch.tensor([one.choice for one in params])
        self.streams[slots] = distribution.stream_ids(seeds, choices).numpy()
        self.top_p[slots] = [one.top_p for one in params]
        self.top_k[slots] = [one.top_k if one.top_k < self._vocab_size else 0 for one in params]
        self.temperature[slots] = [_temperature(one) for one in params]
        self.min_p[slots] = [one.min_p for one in params]
        self.max_tokens[slots] = [one.max_tokens for one in params]
        self.stop_ids[slots] = -1
        for slot, one in zip(slots, params, strict=True):
            ids = list(stop_ids(one, self._eos_token_id))
            self.stop_ids[slot, : len(ids)] = ids


def _temperature(params: SamplingParams) -> float:
    """As the sampler takes it: what float32 cannot hold becomes its nearest positive value."""
    if params.temperature <= 0:
        return 0.0
    return min(max(params.temperature, MIN_TEMPERATURE), FLOAT_MAX)


class Round(NamedTuple):
    """A round under way."""

    keys: list[int]
    results: Tensor  # [2 + steps, size] int32: slots, cursor, out; once the device is done


class DecodeState:
    """`step` reads tokens int32 [batch] into the state rows of slots int32 [batch] and gives logits
    fp32 [batch, vocab]. At most one round may be started before the one before it is finished."""

    def __init__(
        self,
        step: ModelStep,
        max_batch: int,
        vocab_size: int,
        eos_token_id: int | None,
        device: torch.device,
    ) -> None:
        self._step = step
        self._device = device
        self._parameters = _Parameters(max_batch, vocab_size, eos_token_id)
        on_gpu = device.type == "cuda"
        self._memory = torch.zeros(_WORDS * max_batch, dtype=torch.int32, device=device)
        # Written only when no round is under way, so that its copy to the device has ended.
        self._staging = torch.zeros(_UPLOADED * max_batch, dtype=torch.int32, pin_memory=on_gpu)
        # In turn, for the one round that is read while the next one runs.
        self._results = [
            torch.zeros((2 + MOST_STEPS) * max_batch, dtype=torch.int32, pin_memory=on_gpu)
            for _ in range(2)
        ]
        self._views: dict[int, _Columns] = {}  # by size
        self._keys: list[int] = []  # of the batch, row by row
        self._size = 0
        self._graphs: BucketGraphs | None = None

    def capture(self, sizes: list[int], pool: Any) -> None:
        """Captures the step, drawing included, for batches of up to `sizes`, rising."""
        graphs = BucketGraphs(self._run_step, self._clear, sizes)
        graphs.capture(pool)
        self._graphs = graphs

    def admit(self, admissions: Sequence[Admission]) -> None:
        """Notes what those of the requests ask for that may become rows here."""
        plain = [one for one in admissions if is_plain(one.request.sampling)]
        if plain:
            params = [one.request.sampling for one in plain]
            self._parameters.put([one.slot for one in plain], params)

    def _clear(self, size: int) -> None:
        self._memory.zero_()
        self._at(size).slots.fill_(-1)

    def _run_step(self, size: int) -> None:
        at = self._at(size)
        logits = self._step(at.tokens, at.slots)
        ops.draw_(
            logits, at.tokens, at.slots, at.positions, at.remaining, at.cursor, at.out,
            at.temperature, at.top_k, at.top_p, at.min_p, at.streams, at.stop_ids,
        )  # fmt: skip

    def start(self, rows: Sequence[DecodeRow], again: bool, steps: int) -> Round:
        """Takes `steps` steps (at most MOST_STEPS); with `again` of the batch that is there."""
        if again:
            self._at(self._size).cursor.zero_()
        else:
            self._upload(rows)
        size = self._size
        for _ in range(steps):
            if self._graphs is not None and self._graphs.size_of(size) is not None:
                self._graphs.replay(size)
                continue
            self._run_step(size)
            if self._device.type == "cpu" and not bool((self._at(size).slots >= 0).any()):
                break
        first = _FETCHED_FROM * size
        results = self._results[0][: (2 + steps) * size]
        self._results.reverse()
        results.copy_(self._memory[first : first + len(results)], non_blocking=True)
        return Round(self._keys, results.view(-1, size))

    def _at(self, size: int) -> _Columns:
        columns = self._views.get(size)
        if columns is None:
            columns = self._views[size] = _columns(self._memory[: _WORDS * size], size)
        return columns

    def _upload(self, rows: Sequence[DecodeRow]) -> None:
        batch = len(rows)
        size = (self._graphs and self._graphs.size_of(batch)) or batch
        staging = self._staging[: _UPLOADED * size]
        at = _columns(staging, size)
        parameters = self._parameters
        slots = np.array([row.slot for row in rows], np.int32)
        positions = np.array([row.position for row in rows], np.int64)
        staging.zero_()
        at.slots.numpy()[batch:] = -1
        for column, values in (
            (at.slots, slots),
            (at.positions, positions),
            (at.remaining, parameters.max_tokens[slots] - positions),
            (at.tokens, [row.token for row in rows]),
            (at.streams, parameters.streams[slots]),
            (at.top_p, parameters.top_p[slots]),
            (at.top_k, parameters.top_k[slots]),
            (at.temperature, parameters.temperature[slots]),
            (at.min_p, parameters.min_p[slots]),
            (at.stop_ids, parameters.stop_ids[slots]),
        ):
            column.numpy()[:batch] = values
        self._memory[: len(staging)].copy_(staging, non_blocking=True)
        self._keys = [row.key for row in rows]
        self._size = size


def to_drawn(round: Round) -> tuple[Drawn, list[int]]:
    """What the device drew, once it is done, and the keys whose logits were not finite."""
    keys = round.keys
    host = round.results.numpy()[:, : len(keys)]
    slots, counts, tokens = host[0], host[1], np.ascontiguousarray(host[2:].T)  # [rows, steps]
    ended = np.flatnonzero(slots < 0).tolist()
    lengths = counts[ended].tolist()
    spoiled = [
        keys[row]
        for row, length in zip(ended, lengths, strict=True)
        if length and tokens[row, length - 1] < 0
    ]
    return Drawn(tokens.tobytes(), dict(zip(ended, lengths, strict=True))), spoiled


class LogitsStep:
    """The decode step up to its logits, for batches in whose draws the host has a part."""

    def __init__(self, step: ModelStep, device: torch.device) -> None:
        self._step = step
        self._device = device
        self._graphs: BucketGraphs | None = None

    def capture(self, sizes: list[int], vocab_size: int, pool: Any) -> None:
        """Captures it for batches of up to `sizes`, rising."""
        # tokens, slots
        self._inputs = torch.zeros(2, sizes[-1], dtype=torch.int32, device=self._device)
        self._logits = torch.empty(sizes[-1], vocab_size, device=self._device)
        graphs = BucketGraphs(self._run, self._clear, sizes)
        graphs.capture(pool)
        self._graphs = graphs

    def _clear(self, size: int) -> None:
        self._inputs[0] = 0
        self._inputs[1] = -1

    def _run(self, size: int) -> None:
        tokens, slots = self._inputs[:, :size]
        self._logits[:size].copy_(self._step(tokens, slots))

    def __call__(self, tokens: Sequence[int], slots: Sequence[int]) -> Tensor:
        """Reads one token into each of these rows of the state: logits fp32 [batch, vocab]; the
        next call may overwrite them."""
        size = None if self._graphs is None else self._graphs.size_of(len(tokens))
        if self._graphs is None or size is None:
            return self._step(
                upload(tokens, torch.int32, self._device), upload(slots, torch.int32, self._device)
            )
        padding = size - len(tokens)
        inputs = torch.tensor(
            [[*tokens, *[0] * padding], [*slots, *[-1] * padding]],
            dtype=torch.int32,
            pin_memory=True,
        )
        self._inputs[:, :size].copy_(inputs, non_blocking=True)
        self._graphs.replay(size)
        return self._logits[: len(tokens)]
