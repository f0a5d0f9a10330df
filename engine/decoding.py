"""DecodeState: a decode batch on the device, whose rows draw, go on and end by themselves.

What a row needs (its slot, last token, position, parameters) lies in one piece of device memory,
the columns of engine/columns.py. It is uploaded at once when the batch is made, and left there
while rounds follow one another: a step reads it, and `draw_` moves it on. What a round brings
(which rows are left, how many tokens each drew, and these) lies at the end of the same memory and
is fetched at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from engine.columns import FILLED_WORDS, RESULT_WORD, Columns, Parameters, columns, draw_rows
from engine.device import upload
from engine.graphs import BucketGraphs
from engine.plan import MOST_STEPS, DecodeRow, Drawn

ModelStep = Callable[[Tensor, Tensor], Tensor]

_WORDS = FILLED_WORDS + MOST_STEPS


class Round(NamedTuple):
    """A round under way."""

    keys: list[int]
    results: Tensor  # [2 + steps, size] int32: slots, cursor, out; once the device is done


class DecodeState:
    """`step` reads tokens int32 [batch] into the state rows of slots int32 [batch] and gives logits
    fp32 [batch, vocab]. At most one round may be started before the one before it is finished."""

    def __init__(
        self, step: ModelStep, max_batch: int, parameters: Parameters, device: torch.device
    ) -> None:
        self._step = step
        self._device = device
        self._parameters = parameters
        on_gpu = device.type == "cuda"
        self._memory = torch.zeros(_WORDS * max_batch, dtype=torch.int32, device=device)
        # Written only when no round is under way, so that its copy to the device has ended.
        self._staging = torch.zeros(FILLED_WORDS * max_batch, dtype=torch.int32, pin_memory=on_gpu)
        # In turn, for the one round that is read while the next one runs.
        self._results = [
            torch.zeros((2 + MOST_STEPS) * max_batch, dtype=torch.int32, pin_memory=on_gpu)
            for _ in range(2)
        ]
        self._views: dict[int, Columns] = {}  # by size
        self._keys: list[int] = []  # of the batch, row by row
        self._size = 0
        self._graphs: BucketGraphs | None = None

    def capture(self, sizes: list[int], pool: Any) -> None:
        """Captures the step, drawing included, for batches of up to `sizes`, rising."""
        graphs = BucketGraphs(self._run_step, self._clear, sizes)
        graphs.capture(pool)
        self._graphs = graphs

    def _clear(self, size: int) -> None:
        self._memory.zero_()
        self._at(size).slots.fill_(-1)

    def _run_step(self, size: int) -> None:
        at = self._at(size)
        draw_rows(self._step(at.tokens, at.slots), at)

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
        first = RESULT_WORD * size
        results = self._results[0][: (2 + steps) * size]
        self._results.reverse()
        results.copy_(self._memory[first : first + len(results)], non_blocking=True)
        return Round(self._keys, results.view(-1, size))

    def _at(self, size: int) -> Columns:
        view = self._views.get(size)
        if view is None:
            view = self._views[size] = columns(self._memory[: _WORDS * size], size)
        return view

    def _upload(self, rows: Sequence[DecodeRow]) -> None:
        batch = len(rows)
        size = (self._graphs and self._graphs.size_of(batch)) or batch
        staging = self._staging[: FILLED_WORDS * size]
        self._parameters.fill(
            columns(staging, size),
            np.array([row.slot for row in rows], np.int32),
            np.array([row.position for row in rows], np.int64),
            np.array([row.token for row in rows], np.int64),
        )
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
