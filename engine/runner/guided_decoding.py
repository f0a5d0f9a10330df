"""GuidedSampler: steps in whose sampling the host has a part, for grammars (and for more stop ids,
or more best tokens, than the device sees to).

A GuidedStep reads tokens into states and leaves logits. While the device is at that, the host asks
the matchers of grammars for their masks. The step's second piece lays them on the logits and
samples, and the host takes in what was sampled before it can go on. Both pieces are CUDA graphs
where there are some, for what a step of few rows costs is what the host gives to the device. It
does so in two copies: the sampling parameters of the rows, and the masks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.ops import copy_words_
from engine.ops.upload import upload
from engine.runner.context import RunnerContext
from engine.runner.cuda_graphs import BucketGraphs
from engine.runner.sampling.batch_rows import (
    HostSamplingRows,
    SamplingRows,
    host_sampling_rows,
    sample_rows,
    sampling_rows,
)
from engine.runner.sampling.logprobs import report
from engine.runner.sampling.sampler import ROW_WORDS, Allowed, Rows, SampleStep
from engine.step_plan import Admission, StepPlan
from engine.structured_output.matchers import GrammarMatchers

_MOST_SIZES = 8  # of sizes that are kept, where there are no graphs and so any size may come


class Masks(NamedTuple):
    """What grammars allow of some rows, on the host."""

    of: NDArray[np.int32]  # [rows]: which mask a row has; negative: none
    bits: NDArray[np.int32]  # [masks, words], words at least vocab / 32


class _Buffers(NamedTuple):
    """Views of the memory of all, for so many rows."""

    at: SamplingRows
    host: HostSamplingRows
    rows: tuple[Tensor, Tensor]  # the words of `at`, there and on the host
    mask_of: Tensor  # [size] int32
    host_mask_of: NDArray[np.int32]
    masks: Tensor  # [size, words] int32
    host_masks: NDArray[np.int32]
    begin: int  # the word at which mask_of begins, and behind it masks


class GuidedStep:
    """A decode step of rows in whose sampling the host has a part, in two pieces: `begin` and
    `sample`.

    Of up to `max_batch` rows. One step at a time: the next begins when its tokens are known.
    """

    def __init__(self, context: RunnerContext, max_batch: int, vocab_size: int) -> None:
        self._model = context.model
        self._state = context.state
        self._params = context.params
        self._processors = context.processors
        self._uploads = context.uploads
        device = context.device
        # A bit for each token and for the end of a text, which matchers have too.
        self.mask_words = vocab_size // 32 + 1
        shape, on_gpu = max_batch * (ROW_WORDS + 1 + self.mask_words), device.type == "cuda"
        self._memory = torch.zeros(shape, dtype=torch.int32, device=device)
        self._host = torch.zeros(shape, dtype=torch.int32, pin_memory=on_gpu)
        self._vocab_size = vocab_size
        self._buffers: dict[int, _Buffers] = {}  # by size
        self._logits: Tensor | None = None  # of all graphs
        self._left: Tensor | None = None  # by `begin`
        self._step_graphs: BucketGraphs | None = None
        self._sample_graphs: BucketGraphs | None = None

    def capture(self, sizes: list[int], pool: Any) -> None:
        """Captures both pieces for batches of up to `sizes`, rising."""
        shape = sizes[-1], self._vocab_size
        self._logits = torch.zeros(shape, device=self._memory.device)
        self._step_graphs = BucketGraphs(self._run_step, self._clear, sizes)
        self._step_graphs.capture(pool)
        self._sample_graphs = BucketGraphs(self._run_sample, self._clear, sizes)
        self._sample_graphs.capture(pool)

    def begin(self, rows: Rows) -> None:
        """Reads a token into the state of each row."""
        count = len(rows.keys)
        buffers = self._buffers_of(self._size_for(count))
        self._params.fill(
            buffers.host,
            np.array(rows.slots, np.int32),
            positions=np.array(rows.positions, np.int64),
            tokens=np.array(rows.tokens, np.int64),
        )
        there, host = buffers.rows
        copy_words_(there, host)
        graph = self._graph(self._step_graphs, count)
        if graph is None:
            self._left = self._model.step(buffers.at.tokens, self._state, buffers.at.slots)
        else:
            graph.replay(len(buffers.mask_of))
            self._left = self._logits

    def masks(self, rows: int, masked: int) -> Masks:
        """Memory to fill before `sample`, of so many rows, of which `masked` have a mask."""
        buffers = self._buffers_of(self._size_for(rows))
        buffers.host_mask_of[:] = -1
        return Masks(buffers.host_mask_of[:rows], buffers.host_masks[:masked])

    def sample(self, rows: Rows, masks: Masks | None) -> SampleStep:
        """Samples from what `begin` left; `masks` as they were filled."""
        count, size = len(rows.keys), self._size_for(len(rows.keys))
        buffers, raw, self._left = self._buffers_of(size), self._left, None
        assert raw is not None
        if masks is not None:
            words = slice(buffers.begin, buffers.begin + size + masks.bits.size)
            self._memory[words].copy_(self._host[words], non_blocking=True)
        graph = self._graph(self._sample_graphs, count)
        if graph is not None:
            if masks is None:
                buffers.mask_of.fill_(-1)
            graph.replay(size)
        else:
            logits = raw
            if masks is not None:
                logits = raw.clone()
                self._process(logits, buffers, buffers.masks[: len(masks.bits)], buffers.mask_of)
            elif self._processors.concern(rows.slots):
                logits = raw.clone()
                self._process(logits, buffers)
            sample_rows(logits, buffers.at)
        tokens = buffers.at.out[0, :count]
        reported = report(raw[:count], tokens, self._params.asked(rows.slots), self._uploads)
        return SampleStep(rows.keys, self._memory, size, tokens, reported)

    def _size_for(self, rows: int) -> int:
        size = None if self._step_graphs is None else self._step_graphs.size_of(rows)
        return size or rows

    @staticmethod
    def _graph(graphs: BucketGraphs | None, rows: int) -> BucketGraphs | None:
        return graphs if graphs is not None and graphs.size_of(rows) is not None else None

    def _buffers_of(self, size: int) -> _Buffers:
        buffers = self._buffers.get(size)
        if buffers is None:
            if self._step_graphs is None and len(self._buffers) == _MOST_SIZES:
                self._buffers.clear()
            buffers = self._buffers[size] = self._make_buffers(size)
        return buffers

    def _make_buffers(self, size: int) -> _Buffers:
        begin = ROW_WORDS * size
        end = begin + size * (1 + self.mask_words)
        there, host = self._memory[begin:end], self._host[begin:end]
        return _Buffers(
            at=sampling_rows(self._memory[:begin], size),
            host=host_sampling_rows(self._host[:begin], size),
            rows=(self._memory[:begin], self._host[:begin]),
            mask_of=there[:size],
            host_mask_of=host[:size].numpy(),
            masks=there[size:].view(size, self.mask_words),
            host_masks=host[size:].view(size, self.mask_words).numpy(),
            begin=begin,
        )

    def _clear(self, size: int) -> None:
        buffers = self._buffers_of(size)
        self._memory.zero_()
        buffers.at.slots.fill_(-1)
        buffers.mask_of.fill_(-1)

    def _run_step(self, size: int) -> None:
        at = self._buffers_of(size).at
        assert self._logits is not None
        self._logits[:size].copy_(self._model.step(at.tokens, self._state, at.slots))

    def _run_sample(self, size: int) -> None:
        buffers = self._buffers_of(size)
        assert self._logits is not None
        logits = self._logits[:size].clone()
        self._process(logits, buffers, buffers.masks, buffers.mask_of)
        sample_rows(logits, buffers.at)

    def _process(
        self,
        logits: Tensor,
        buffers: _Buffers,
        masks: Tensor | None = None,
        mask_of: Tensor | None = None,
    ) -> None:
        at = buffers.at
        self._processors.apply(logits, at.tokens, at.slots, at.positions, masks, mask_of)


class GuidedSampler:
    """The guided steps of one model and the sampling after its prompts; sequences are known from
    `admit` to `release`."""

    def __init__(self, context: RunnerContext, step: GuidedStep, matchers: GrammarMatchers) -> None:
        self._step = step
        self._sampler = context.sampler
        self._matchers = matchers
        self._device = context.device

    def capture(self, sizes: list[int], pool: Any) -> None:
        """As GuidedStep.capture."""
        self._step.capture(sizes, pool)

    def admit(self, admissions: Sequence[Admission]) -> None:
        """Notes which grammars the texts of these requests have to match."""
        for admission in admissions:
            sampling = admission.request.sampling
            if sampling.max_tokens > 0:
                self._matchers.admit(admission.key, sampling)

    def release(self, keys: Sequence[int]) -> None:
        """Forgets sequences; unknown keys are ignored."""
        self._matchers.release(keys)

    def sample(self, plan: StepPlan, rows: Rows, prompts: Tensor | None) -> list[SampleStep]:
        """Decodes, then samples for `rows`, which are the plan's: for the chunks that end their
        prompt, whose logits `prompts` are, and for the decoded rows."""
        chunks = len(rows.keys) - len(plan.decode)
        of_chunks, decoded = (
            Rows(*(column[part] for column in rows))
            for part in (slice(chunks), slice(chunks, None))
        )
        # While a GPU is busy with the step, the host is with all masks.
        masks = None
        if plan.decode:
            self._step.begin(decoded)
            masks = self._masks(decoded)
        allowed = self._allowed(of_chunks)
        samples = []
        if prompts is not None:
            samples.append(self._sampler.sample(of_chunks, prompts, allowed))
        if plan.decode:
            samples.append(self._step.sample(decoded, masks))
        return samples

    def _masks(self, rows: Rows) -> Masks | None:
        """Of the rows of the step that has begun."""
        masked = self._matchers.rows(rows.keys)
        if not masked:
            return None
        masks = self._step.masks(len(rows.keys), len(masked))
        masks.of[masked] = range(len(masked))
        self._fill(rows, masked, masks.bits)
        return masks

    def _fill(self, rows: Rows, masked: Sequence[int], bits: NDArray[np.int32]) -> None:
        """The masks of the rows that have one; matchers may have more tokens than `bits`, or
        fewer."""
        keys, positions = (
            [rows.keys[row] for row in masked],
            [rows.positions[row] for row in masked],
        )
        words, room = self._matchers.words, bits.shape[1]
        if words == room:
            self._matchers.fill(keys, positions, bits)
            return
        whole = np.empty((len(masked), words), np.int32)
        self._matchers.fill(keys, positions, whole)
        bits[:, : min(words, room)] = whole[:, :room]

    def take(self, keys: Sequence[int], tokens: Sequence[int]) -> set[int]:
        """The matchers follow what was sampled, of which negative tokens are none. Returns whose
        grammars let nothing follow. On a GPU the masks of the next step are begun."""
        matchers, masked = self._matchers, self._matchers.rows(keys)
        complete = {
            keys[row]
            for row in masked
            if tokens[row] >= 0 and matchers.take(keys[row], tokens[row])
        }
        if self._device.type == "cuda":  # elsewhere the model needs the processor
            matchers.begin([keys[row] for row in masked if keys[row] not in complete])
        return complete

    def rejected(self) -> dict[int, str]:
        """GrammarMatchers.rejected."""
        return self._matchers.rejected()

    def _allowed(self, rows: Rows) -> Allowed | None:
        """Of rows whose logits are there already."""
        masked = self._matchers.rows(rows.keys)
        if not masked:
            return None
        shape, on_gpu = (len(masked), self._matchers.words), self._device.type == "cuda"
        bits = torch.empty(shape, dtype=torch.int32, pin_memory=on_gpu)
        self._fill(rows, masked, bits.numpy())
        mask_of = [-1] * len(rows.keys)
        for which, row in enumerate(masked):
            mask_of[row] = which
        return Allowed(
            bits.to(self._device, non_blocking=True), upload(mask_of, torch.int32, self._device)
        )


def rows_of(plan: StepPlan) -> Rows:
    """Whom a plan samples for, but for the batch of a plain one."""
    chunks = [chunk for chunk in plan.prefill if chunk.sample]
    decode = [] if plan.plain else plan.decode
    nothing = [0] * len(chunks)
    return Rows(
        [*(chunk.key for chunk in chunks), *(row.key for row in decode)],
        [*(chunk.slot for chunk in chunks), *(row.slot for row in decode)],
        [*nothing, *(row.token for row in decode)],
        [*nothing, *(row.position for row in decode)],
    )
