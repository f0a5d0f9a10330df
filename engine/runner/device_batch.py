"""DeviceBatch: a decode batch on the device, whose rows sample, continue and end by themselves.

All data of the rows (slots, last tokens, positions, sampling parameters) are in one block of device
memory, the SamplingRows of engine/runner/sampling/batch_rows.py. It is uploaded once, when the
batch is made, and stays there while decode steps follow one another: a step reads it, and sampling
updates it. A sequence that joins later is copied in from where its first token was sampled, so the
host need not know that token. The results of a run (which rows are left, how many tokens each has
sampled, and the tokens) are at the end of the same block and are fetched in one copy.
Log-probabilities, if any rows ask for them, are stored elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from engine import ops
from engine.protocol.logprobs import MOST_TOP, words_of_report
from engine.runner.context import RunnerContext
from engine.runner.cuda_graphs import StepGraphs
from engine.runner.sampling.batch_rows import (
    FILLED_WORDS,
    RESULT_WORD,
    HostSamplingRows,
    SamplingRows,
    host_sampling_rows,
    sample_bests,
    sample_rows,
    sampling_rows,
    words_of,
)
from engine.runner.sampling.sampler import SampleStep
from engine.step_plan import MOST_STEPS, DecodeRow, Drawn, StepPlan

_WORDS = FILLED_WORDS + MOST_STEPS


class DecodeRun(NamedTuple):
    """The results of decode steps in flight, valid once the device is done."""

    keys: list[int]
    results: Tensor  # [2 + steps, size] int32: slots, cursor, out; valid once the device is done
    reports: Tensor | None  # [steps, size, words] int32; valid once the device is done


class _Kind(NamedTuple):
    """The variants of a step, by what its rows ask for."""

    greedy: bool = False  # only the most likely tokens
    adjusted: bool = False  # logits processors run before sampling
    reported: bool = False  # log-probabilities are reported


_GREEDY, _SAMPLED = _Kind(greedy=True), _Kind()
_KINDS = (_GREEDY, *(_Kind(False, *asked) for asked in product((False, True), repeat=2)))


class DeviceBatch:
    """The decode batch of up to `max_batch` rows.

    At most one run may be started before the previous one is finished.
    """

    def __init__(self, context: RunnerContext, max_batch: int) -> None:
        self._model = context.model
        self._state = context.state
        self._device = context.device
        self._params = context.params
        self._processors = context.processors
        self._uploads = context.uploads
        device = context.device
        on_gpu = device.type == "cuda"
        self._memory = torch.zeros(_WORDS * max_batch, dtype=torch.int32, device=device)
        # Written when a new batch is made; no other run is in flight then, so its last copy has
        # ended.
        self._staging = torch.zeros(FILLED_WORDS * max_batch, dtype=torch.int32, pin_memory=on_gpu)
        # Two, used in turn, since one run's results are read while the next run is in flight.
        self._results = [
            torch.zeros((2 + MOST_STEPS) * max_batch, dtype=torch.int32, pin_memory=on_gpu)
            for _ in range(2)
        ]
        self._reported = torch.zeros(max_batch, dtype=torch.int32, device=device)
        self._reports: Tensor | None = None  # used by the graphs
        self._views: dict[int, SamplingRows] = {}  # by size
        self._keys: list[int] = []  # keys of the batch's rows; a run in flight has its own list
        self._size = 0
        self._graphs: dict[_Kind, StepGraphs] = {}

    def capture(self, sizes: list[int], vocab_size: int, pool: Any) -> None:
        """Capture the step, including sampling, for batches of these `sizes` (ascending)."""
        words = words_of_report(min(MOST_TOP, vocab_size))
        shape = MOST_STEPS, sizes[-1], words
        self._reports = torch.zeros(shape, dtype=torch.int32, device=self._device)
        for kind in _KINDS:
            fitting = sizes
            if kind.greedy:
                fitting = [size for size in sizes if self._model.step_to_bests(size)]
            graphs = StepGraphs(partial(self._run_graphed, kind), self._clear, fitting)
            graphs.capture(pool)
            self._graphs[kind] = graphs

    def _clear(self, size: int) -> None:
        self._memory.zero_()
        self._at(size).slots.fill_(-1)

    def _run_graphed(self, kind: _Kind, size: int) -> None:
        self._run(kind, size, self._reports_of_graph(size) if kind.reported else None)

    def _reports_of_graph(self, size: int) -> Tensor:
        assert self._reports is not None
        words = self._reports.shape[2]
        return self._reports.flatten()[: MOST_STEPS * size * words].view(MOST_STEPS, size, words)

    def _run(self, kind: _Kind, size: int, reports: Tensor | None) -> None:
        """Run one step; `reports` [steps, size, words] int32 if rows want log-probabilities."""
        at = self._at(size)
        if kind.greedy:
            step = self._model.step_to_bests(size)
            assert step is not None
            sample_bests(step(at.tokens, self._state, at.slots), at)
            return
        logits = self._model.step(at.tokens, self._state, at.slots)
        processed = logits
        if kind.adjusted:
            if reports is not None:
                processed = logits.clone()
            self._processors.apply(processed, at.tokens, at.slots, at.positions)
        sample_rows(processed, at)
        if reports is not None:
            out, reported_rows = at.out[: len(reports)], self._reported[:size]
            ops.report_logprobs_(logits, at.tops, at.cursor, out, reported_rows, reports)

    def start(self, plan: StepPlan, samples: Sequence[SampleStep] = ()) -> DecodeRun:
        """Start the decode steps of a plain plan.

        `samples` are the rows for which the plan's chunks have sampled.
        """
        if plan.again:
            self._change(plan)
        else:
            self._upload(plan.decode)
        self._join(plan, samples)
        if plan.decode:
            self._at(self._size).cursor.zero_()  # joining rows have sampled already
        if plan.top >= 0:
            self._reported.zero_()
        return self._go(plan)

    def _go(self, plan: StepPlan) -> DecodeRun:
        size, steps = self._size, plan.steps
        kind = _Kind(adjusted=plan.adjusted, reported=plan.top >= 0)
        if plan.greedy and kind == _SAMPLED and self._model.step_to_bests(size) is not None:
            kind = _GREEDY
        graphs, words, reports = self._graphs.get(kind), words_of_report(plan.top), None
        if graphs is not None and graphs.size_of(size) is not None:
            graphs.replay(size, steps)
            if kind.reported:
                reports = self._reports_of_graph(size)[:steps, :, :words].contiguous()
        else:
            if kind.reported:
                shape = steps, size, words
                reports = torch.zeros(shape, dtype=torch.int32, device=self._device)
            for _ in range(steps):
                self._run(kind, size, reports)
                if self._device.type == "cpu" and not bool((self._at(size).slots >= 0).any()):
                    break
        first = RESULT_WORD * size
        results = self._results[0][: (2 + steps) * size]
        self._results.reverse()
        # The second range, the cursors after the slots, is reset for the next run.
        ops.copy_words_(results, self._memory[first : first + len(results)], size, size)
        if reports is not None:
            reports = reports.to("cpu", non_blocking=True)
        return DecodeRun(self._keys, results.view(-1, size), reports)

    def _at(self, size: int) -> SamplingRows:
        view = self._views.get(size)
        if view is None:
            view = self._views[size] = sampling_rows(self._memory[: _WORDS * size], size)
        return view

    def _size_for(self, rows: int) -> int:
        graphs = self._graphs.get(_SAMPLED)
        return (graphs and graphs.size_of(rows)) or rows

    def _upload(self, rows: Sequence[DecodeRow]) -> None:
        """Upload a new batch."""
        size = self._size_for(len(rows))
        staging = self._staging[: FILLED_WORDS * size]
        self._fill(host_sampling_rows(staging, size), rows)
        ops.copy_words_(self._memory[: len(staging)], staging)
        self._keys = [row.key for row in rows]
        self._size = size

    def _fill(self, at: HostSamplingRows, rows: Sequence[DecodeRow]) -> None:
        self._params.fill(
            at,
            np.array([row.slot for row in rows], np.int32),
            np.array([row.position for row in rows], np.int64),
            np.array([max(row.token, 0) for row in rows], np.int64),
        )

    def _change(self, plan: StepPlan) -> None:
        """Change the batch: end the rows that leave, and make room for those that join."""
        at = self._at(self._size)
        if plan.leave:
            at.slots.index_fill_(0, self._uploads.put(plan.leave), -1)
        if plan.at:
            size = self._size_for(max(len(self._keys), 1 + max(plan.at)))
            if size != self._size:
                self._widen(size)
            keys = self._keys.copy()
            keys += [-1] * (1 + max(plan.at) - len(keys))
            for row, joining in zip(plan.at, plan.decode, strict=True):
                keys[row] = joining.key
            self._keys = keys

    def _widen(self, size: int) -> None:
        """Move the rows to the layout for another size; the rest becomes padding."""
        rows = range(len(self._keys))
        filled = self._memory[self._word_indices(rows, self._size)]
        self._clear(size)
        self._memory[self._word_indices(rows, size)] = filled
        self._size = size

    def _join(self, plan: StepPlan, samples: Sequence[SampleStep]) -> None:
        """Copy in the joining rows that are not there yet."""
        rows = dict(zip((row.key for row in plan.decode), plan.at, strict=True))
        known = [row for row in plan.decode if row.token >= 0] if plan.again else []
        if known:
            size = len(known)
            host = torch.empty(
                FILLED_WORDS * size, dtype=torch.int32, pin_memory=self._device.type == "cuda"
            )
            self._fill(host_sampling_rows(host, size), known)
            # torch keeps `host` alive until the copy has ended
            words = host.to(self._device, non_blocking=True)
            self._copy_in(words, range(size), size, [rows[row.key] for row in known])
        for sample in samples:
            there = [index for index, key in enumerate(sample.keys) if key in rows]
            if there:
                targets = [rows[sample.keys[index]] for index in there]
                self._copy_in(sample.words, there, sample.size, targets)

    def _copy_in(
        self, words: Tensor, sources: Sequence[int], size: int, targets: Sequence[int]
    ) -> None:
        both = np.stack([words_of(targets, self._size).ravel(), words_of(sources, size).ravel()])
        there, here = self._uploads.put(both)
        self._memory.index_copy_(0, there, words.index_select(0, here))

    def _word_indices(self, rows: Sequence[int], size: int) -> Tensor:
        return self._uploads.put(words_of(rows, size))


def to_drawn(run: DecodeRun) -> tuple[Drawn, list[int]]:
    """Return the results of a run that is done, and the keys whose logits were not finite."""
    keys, reports = run.keys, None
    if run.reports is not None:
        reports = run.reports.numpy()[:, : len(keys)].transpose(1, 0, 2)
    host = run.results.numpy()[:, : len(keys)]
    slots, counts, tokens = host[0], host[1], np.ascontiguousarray(host[2:].T)  # [rows, steps]
    ended = np.flatnonzero(slots < 0).tolist()
    lengths = counts[ended].tolist()
    spoiled = [
        keys[row]
        for row, length in zip(ended, lengths, strict=True)
        if length and tokens[row, length - 1] < 0
    ]
    return Drawn(tokens.tobytes(), dict(zip(ended, lengths, strict=True)), reports), spoiled
