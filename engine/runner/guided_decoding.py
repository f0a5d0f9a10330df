"""GuidedSampler: decode steps for which the host takes part in sampling.

The reasons are grammars, more stop ids than the device checks, or more top tokens than it reports.

A GuidedStep reads tokens into states and leaves logits. Meanwhile the host computes the grammars'
token masks. The second half of the step applies them to the logits and samples; the host must see
the sampled tokens before the next step. Both halves are CUDA graphs where available, since the
host's launches dominate a step of few rows. The host uploads two blocks: the rows' sampling
parameters, and the masks.
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

# sizes whose buffers are kept if there are no graphs, since any size may occur then
_MOST_SIZES = 8


class Masks(NamedTuple):
    """Token masks of some rows, on the host."""

    of: NDArray[np.int32]  # [rows]: index of the row's mask; negative: none
    bits: NDArray[np.int32]  # [masks, words]; words is at least vocab / 32


class _Buffers(NamedTuple):
    """Views of the shared memory for a given number of rows."""

    at: SamplingRows
    host: HostSamplingRows
    rows: tuple[Tensor, Tensor]  # the words of `at`, on the device and on the host
    mask_of: Tensor  # [size] int32
    host_mask_of: NDArray[np.int32]
    masks: Tensor  # [size, words] int32
    host_masks: NDArray[np.int32]
    begin: int  # the word at which mask_of begins, followed by masks


class GuidedStep:
    """A decode step in two halves, `begin` and `sample`, between which the host computes masks.

    For up to `max_batch` rows. One step at a time: the next begins when its tokens are known.
    """

    def __init__(self, context: RunnerContext, max_batch: int, vocab_size: int) -> None:
        self._model = context.model
        self._state = context.state
        self._params = context.params
        self._processors = context.processors
        self._uploads = context.uploads
        device = context.device
        # One bit for each token and one for the end of the text, which matchers have too.
        self.mask_words = vocab_size // 32 + 1
        shape, on_gpu = max_batch * (ROW_WORDS + 1 + self.mask_words), device.type == "cuda"
        self._memory = torch.zeros(shape, dtype=torch.int32, device=device)
        self._host = torch.zeros(shape, dtype=torch.int32, pin_memory=on_gpu)
        self._vocab_size = vocab_size
        self._buffers: dict[int, _Buffers] = {}  # by size
        self._logits: Tensor | None = None  # shared by all graphs
        self._left: Tensor | None = None  # logits that `begin` has produced
        self._step_graphs: BucketGraphs | None = None
        self._sample_graphs: BucketGraphs | None = None

    def capture(self, sizes: list[int], pool: Any) -> None:
        """Capture both halves for batches of these `sizes` (ascending)."""
        shape = sizes[-1], self._vocab_size
        self._logits = torch.zeros(shape, device=self._memory.device)
        self._step_graphs = BucketGraphs(self._run_step, self._clear, sizes)
        self._step_graphs.capture(pool)
        self._sample_graphs = BucketGraphs(self._run_sample, self._clear, sizes)
        self._sample_graphs.capture(pool)

    def begin(self, rows: Rows) -> None:
        """Start the first half: read a token into the state of each row."""
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
        """Return the memory to fill with masks before `sample`: `masked` masks for `rows` rows."""
        buffers = self._buffers_of(self._size_for(rows))
        buffers.host_mask_of[:] = -1
        return Masks(buffers.host_mask_of[:rows], buffers.host_masks[:masked])

    def sample(self, rows: Rows, masks: Masks | None) -> SampleStep:
        """Sample from the logits of `begin`; `masks` is the filled result of `masks()`, or None."""
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
    """Guided decode steps of one model, and guided sampling after prompts.

    Sequences are known from `admit` to `release`.
    """

    def __init__(self, context: RunnerContext, step: GuidedStep, matchers: GrammarMatchers) -> None:
        self._step = step
        self._sampler = context.sampler
        self._matchers = matchers
        self._device = context.device

    def capture(self, sizes: list[int], pool: Any) -> None:
        """Capture the step's graphs; see GuidedStep.capture."""
        self._step.capture(sizes, pool)

    def admit(self, admissions: Sequence[Admission]) -> None:
        """Register the grammars that the texts of these requests must match."""
        for admission in admissions:
            sampling = admission.request.sampling
            if sampling.max_tokens > 0:
                self._matchers.admit(admission.key, sampling)

    def release(self, keys: Sequence[int]) -> None:
        """Forget sequences; unknown keys are ignored."""
        self._matchers.release(keys)

    def sample(self, plan: StepPlan, rows: Rows, prompts: Tensor | None) -> list[SampleStep]:
        """Decode and sample.

        Args:
            plan: the plan.
            rows: its rows: first the chunks that end their prompt, then the decoded rows.
            prompts: logits of these chunks [chunks, vocab]; None without any.
        """
        chunks = len(rows.keys) - len(plan.decode)
        of_chunks, decoded = (
            Rows(*(column[part] for column in rows))
            for part in (slice(chunks), slice(chunks, None))
        )
        # While the GPU runs the step, the host computes all masks.
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
        """Compute the masks for the step that has begun; None if no row has a grammar."""
        masked = self._matchers.rows(rows.keys)
        if not masked:
            return None
        masks = self._step.masks(len(rows.keys), len(masked))
        masks.of[masked] = range(len(masked))
        self._fill(rows, masked, masks.bits)
        return masks

    def _fill(self, rows: Rows, masked: Sequence[int], bits: NDArray[np.int32]) -> None:
        """Compute the masks of the rows in `masked` into `bits`, which may have other widths."""
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
        """Advance the matchers by the sampled tokens; negative ones are ignored.

        Returns the keys whose grammars allow nothing more. On a GPU, computing the masks of the
        next step is started.
        """
        matchers, masked = self._matchers, self._matchers.rows(keys)
        complete = {
            keys[row]
            for row in masked
            if tokens[row] >= 0 and matchers.take(keys[row], tokens[row])
        }
        if self._device.type == "cuda":  # on a CPU the model needs the processor
            matchers.begin([keys[row] for row in masked if keys[row] not in complete])
        return complete

    def rejected(self) -> dict[int, str]:
        """Return the rejected sequences; see GrammarMatchers.rejected."""
        return self._matchers.rejected()

    def _allowed(self, rows: Rows) -> Allowed | None:
        """Compute and upload the masks of rows whose logits exist already."""
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
    """Return the rows for which a plan samples, except for the batch of a plain plan."""
    chunks = [chunk for chunk in plan.prefill if chunk.sample]
    decode = [] if plan.plain else plan.decode
    nothing = [0] * len(chunks)
    return Rows(
        [*(chunk.key for chunk in chunks), *(row.key for row in decode)],
        [*(chunk.slot for chunk in chunks), *(row.slot for row in decode)],
        [*nothing, *(row.token for row in decode)],
        [*nothing, *(row.position for row in decode)],
    )
