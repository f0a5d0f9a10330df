"""PrefillRunner: reads prompt chunks and samples the tokens after them, mostly in one CUDA graph.

Like a decode step, a short prompt is bound by launching its kernels. So reading is captured in CUDA
graphs too: the chunks, the logits after their last positions and the samples from these, one graph
per bucket of tokens and of chunks. Padding consists of tokens of no sequence, and of empty
sequences with negative slots. No operator's plan depends on where sequences begin, and none touches
a state for padding.

Longer prompts, whose kernels take longer than their launches, are read without a graph, by the same
code.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.ops import copy_words_
from engine.runner.context import RunnerContext
from engine.runner.cuda_graphs import MOST_PADDING, BucketGraphs
from engine.runner.sampling.batch_rows import (
    HostSamplingRows,
    SamplingRows,
    host_sampling_rows,
    sample_rows,
    sampling_rows,
)
from engine.runner.sampling.logprobs import report
from engine.runner.sampling.sampler import ROW_WORDS, Rows, SampleStep
from engine.step_plan import PrefillChunk

# Ratio of a long prompt's run time to its launch time up to which a graph pays, since the host has
# more to do in a step than to launch; and up to which launches dominate.
_PAYS, _LAUNCH_BOUND = 1.5, 1.1


class Read(NamedTuple):
    """The result of reading chunks, on the device until the next call; None if not wanted.

    Rows are the chunks with `sample`.
    """

    hidden: Tensor  # [tokens, d_model] of all chunks
    logits: Tensor | None  # [rows, vocab] fp32
    sampled: SampleStep | None


class _Shape(NamedTuple):
    tokens: int
    sequences: int
    rows: int  # rows of logits

    @property
    def sizes(self) -> list[int]:
        """Number of words of each part of the inputs."""
        return [
            self.rows * ROW_WORDS, self.rows, self.sequences, self.sequences + 1, self.tokens
        ]  # fmt: skip


class _Inputs(NamedTuple):
    """The inputs, uploaded in one copy, and the memory for the sampled tokens."""

    words: Tensor  # the memory of `sampling`
    sampling: SamplingRows | None  # parameters of the rows; None without rows
    last: Tensor  # [rows] int32: the position whose logits belong to the row
    slots: Tensor  # [sequences] int32
    cu_seqlens: Tensor  # [sequences + 1] int32
    tokens: Tensor  # [tokens] int32


def _inputs(memory: Tensor, shape: _Shape) -> _Inputs:
    """Return views of the inputs in `memory` (int32, 1-d)."""
    words, *rest = memory.split(shape.sizes)
    return _Inputs(words, sampling_rows(words, shape.rows) if shape.rows else None, *rest)


class _HostInputs(NamedTuple):
    """_Inputs in host memory, to be filled."""

    sampling: HostSamplingRows | None
    last: NDArray[np.int32]
    slots: NDArray[np.int32]
    cu_seqlens: NDArray[np.int32]
    tokens: NDArray[np.int32]


def _host_inputs(memory: Tensor, shape: _Shape) -> _HostInputs:
    """Return array views of the inputs in host memory `memory` (int32, 1-d)."""
    words, *rest = memory.split(shape.sizes)
    sampling = host_sampling_rows(words, shape.rows) if shape.rows else None
    return _HostInputs(sampling, *(part.numpy() for part in rest))


class _Graphed(NamedTuple):
    """The memory of a graph's shape.

    Two host buffers are used in turn, since a step may begin before the previous step's upload has
    ended. `memory` is what the graph reads and writes.
    """

    hosts: list[Tensor]
    host_inputs: list[_HostInputs]
    memory: Tensor
    inputs: _Inputs


class PrefillRunner:
    """Reads chunks into the states of their slots. No call waits for the device."""

    def __init__(self, context: RunnerContext) -> None:
        self._model = context.model
        self._state = context.state
        self._device = context.device
        self._sampler = context.sampler
        self._params = context.params
        self._processors = context.processors
        self._uploads = context.uploads
        self._graphs: dict[int, BucketGraphs] = {}  # by sequences, ascending
        self._graphed: dict[_Shape, _Graphed] = {}
        # Results are copied out of the graphs, since the next graph overwrites their shared memory.
        self._logits: Tensor | None = None  # [most chunks, vocab] fp32
        self._hidden: Tensor | None = None  # [most tokens, d_model]
        self._turn = 0  # index of the host buffer in use
        self._launch_bound = 0  # up to this many tokens, padding costs nothing

    def worth_graphs(self, sizes: Sequence[int]) -> int:
        """Return the largest of `sizes` (tokens, ascending) for which a graph pays; 0 if none.

        A graph pays while launching a prompt's kernels takes about as long as running them. Waits
        for the device.

        The measurement uses padding, and matrix products that are not tuned yet: the scan is
        missing, and tuned products are faster. Near the threshold the choice does not matter.
        """
        largest = 0
        for tokens in sizes:
            try:
                times_launches = self._times_launches(tokens)
            except torch.OutOfMemoryError:  # a graph of this size would have no room either
                break
            if times_launches > _PAYS:
                break
            largest = tokens
            if times_launches <= _LAUNCH_BOUND:
                self._launch_bound = tokens
        return largest

    def _times_launches(self, tokens: int) -> float:
        """Return the time to read `tokens` tokens without a graph, relative to its launches."""
        shape = _Shape(tokens, 1, 1)
        words = torch.zeros(sum(shape.sizes), dtype=torch.int32)
        self._fill(_host_inputs(words, shape), [], sample=False)
        inputs = _inputs(words.to(self._device), shape)
        self._run(inputs, sample=True)  # libraries load their kernels at first use
        times = []
        for _ in range(3):
            torch.cuda.synchronize(self._device)
            begin = perf_counter()
            self._run(inputs, sample=True)
            launched = perf_counter()
            torch.cuda.synchronize(self._device)
            times.append((perf_counter() - begin, launched - begin))
        taken, launching = min(times)
        return taken / launching

    def capture(self, sizes: Mapping[int, list[int]], vocab_size: int, pool: Any) -> None:
        """Capture graphs for these shapes, as prompt_buckets() returns them."""
        shapes = [_Shape(size, chunks, chunks) for chunks in sizes for size in sizes[chunks]]
        words = max(sum(shape.sizes) for shape in shapes)
        memory = torch.zeros(words, dtype=torch.int32, device=self._device)
        on_gpu = self._device.type == "cuda"
        hosts = [torch.zeros(words, dtype=torch.int32, pin_memory=on_gpu) for _ in range(2)]
        for shape in shapes:
            *mine, its = (piece[: sum(shape.sizes)] for piece in (*hosts, memory))
            given = [_host_inputs(one, shape) for one in mine]
            self._graphed[shape] = _Graphed(mine, given, its, _inputs(its, shape))
        self._logits = torch.empty(max(sizes), vocab_size, device=self._device)
        self._hidden = None  # allocated in the first run, which knows the model's type
        graphs = {
            chunks: BucketGraphs(
                partial(self._run_graphed, chunks), partial(self._clear, chunks), sizes[chunks]
            )
            for chunks in sorted(sizes)
        }
        for one in reversed(graphs.values()):
            one.capture(pool)
        self._graphs = graphs

    def __call__(self, chunks: Sequence[PrefillChunk], sample: bool) -> Read:
        """Read the chunks, each into the state of its slot.

        With `sample`, also sample a token after every chunk with `sample`. It is the first token of
        its request, which must be plain. The tensors of the result are valid until the next call.
        """
        ending = [chunk for chunk in chunks if chunk.sample]
        if sample and self._processors.concern(chunk.slot for chunk in ending):
            read = self(chunks, sample=False)
            assert read.logits is not None
            return read._replace(sampled=self.sample(read.logits, ending))
        tokens = sum(len(chunk.tokens) for chunk in chunks)
        rows = len(ending)
        size = self._graph_of(tokens, len(chunks))
        if size is not None:
            assert self._logits is not None and self._hidden is not None
            graphed = self._graphed[size]
            self._turn = 1 - self._turn
            self._fill(graphed.host_inputs[self._turn], chunks, sample)
            copy_words_(graphed.memory, graphed.hosts[self._turn])
            self._graphs[size.sequences].replay(size.tokens)
            inputs = graphed.inputs
            hidden = self._hidden[:tokens]
            logits: Tensor | None = self._logits[:rows]
        else:
            shape = _Shape(tokens, len(chunks), rows)
            on_gpu = self._device.type == "cuda"
            host = torch.empty(sum(shape.sizes), dtype=torch.int32, pin_memory=on_gpu)
            self._fill(_host_inputs(host, shape), chunks, sample)
            inputs = _inputs(host.to(self._device, non_blocking=True), shape)
            hidden, logits = self._run(inputs, sample)
        sampled = None
        if sample and rows:
            assert inputs.sampling is not None and logits is not None
            first = inputs.sampling.out[0, :rows]
            asked = self._params.asked([chunk.slot for chunk in ending])
            reported = report(logits, first, asked, self._uploads)
            keys = [chunk.key for chunk in ending]
            sampled = SampleStep(keys, inputs.words, len(inputs.last), first, reported)
        return Read(hidden, logits if rows else None, sampled)

    def sample(self, logits: Tensor, chunks: Sequence[PrefillChunk]) -> SampleStep:
        """Sample from known logits [rows, vocab] fp32, one row per chunk of a plain request."""
        nothing = [0] * len(chunks)
        keys, slots = [chunk.key for chunk in chunks], [chunk.slot for chunk in chunks]
        return self._sampler.sample(Rows(keys, slots, nothing, nothing), logits)

    def _graph_of(self, tokens: int, chunks: int) -> _Shape | None:
        for sequences, graphs in self._graphs.items():
            if sequences >= chunks:
                size = graphs.size_of(tokens)
                if size is None or size > max(tokens + MOST_PADDING, self._launch_bound):
                    return None
                return _Shape(size, sequences, sequences)
        return None

    def _fill(self, host: _HostInputs, chunks: Sequence[PrefillChunk], sample: bool) -> None:
        """Write the inputs; what the chunks do not need becomes padding."""
        tokens, ends, slots, last = host.tokens, host.cu_seqlens, host.slots, host.last
        count = len(chunks)
        reached = np.cumsum([len(chunk.tokens) for chunk in chunks], dtype=np.int32)
        total = int(reached[-1]) if count else 0
        tokens[:total] = np.frombuffer(b"".join([chunk.tokens for chunk in chunks]), np.int32)
        tokens[total:] = 0
        ends[0], ends[1 : count + 1], ends[count + 1 :] = 0, reached, total
        slots[:count], slots[count:] = [chunk.slot for chunk in chunks], -1
        slots_of_rows = [chunk.slot for chunk in chunks if chunk.sample]
        last[: len(slots_of_rows)] = [
            end - 1 for end, chunk in zip(reached.tolist(), chunks, strict=True) if chunk.sample
        ]
        last[len(slots_of_rows) :] = 0
        if host.sampling is not None:
            self._fill_sampling(host.sampling, slots_of_rows if sample else [])

    def _fill_sampling(self, host: HostSamplingRows, slots: Sequence[int]) -> None:
        nothing = np.zeros(len(slots), np.int64)
        rows = np.array(slots, np.int32)
        self._params.fill(host, rows, positions=nothing, tokens=nothing)

    def _run(self, inputs: _Inputs, sample: bool) -> tuple[Tensor, Tensor | None]:
        hidden = self._model.prefill(inputs.tokens, inputs.cu_seqlens, self._state, inputs.slots)
        if inputs.sampling is None:
            return hidden, None
        logits = self._model.logits(hidden.index_select(0, inputs.last))
        if sample:
            sample_rows(logits, inputs.sampling)
        return hidden, logits

    def _run_graphed(self, chunks: int, tokens: int) -> None:
        hidden, logits = self._run(
            self._graphed[_Shape(tokens, chunks, chunks)].inputs, sample=True
        )
        assert logits is not None and self._logits is not None
        # Allocated in the first run, which has the largest size and is not a capture; in a capture
        # it would be in memory that the next graph overwrites.
        if self._hidden is None:
            self._hidden = torch.empty_like(hidden)
        self._hidden[:tokens].copy_(hidden)
        self._logits[:chunks].copy_(logits)

    def _clear(self, chunks: int, tokens: int) -> None:
        graphed = self._graphed[_Shape(tokens, chunks, chunks)]
        self._fill(graphed.host_inputs[0], [], sample=False)
        graphed.memory.copy_(graphed.hosts[0])
