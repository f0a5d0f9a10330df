"""PrefillRunner: reads prompts' chunks and samples the tokens behind them, mostly in one graph.

A short prompt is, like a decode step, bound by launching its kernels. So its reading is captured in
CUDA graphs too: the chunks, the logits behind their last positions and the samples from these, one
graph per bucket of tokens and of chunks. What fills a bucket up is tokens of no sequence, and
sequences of no tokens whose slots are negative; no operator's plan depends on where sequences lie,
and none touches a state for these.

Longer prompts, once their kernels outlast their launches, are read without a graph, by the same
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

# How many times as long as its launches a long prompt may take for a graph to pay: a step has more
# for the host to do than to launch. And for the launches to be what takes the time.
_PAYS, _LAUNCH_BOUND = 1.5, 1.1


class Read(NamedTuple):
    """What reading chunks gives, on the device, until the next call; None where it is not wanted.
    Rows are those of the chunks with `sample`."""

    hidden: Tensor | None  # [tokens, d_model], of all chunks, where there are targets to score
    logits: Tensor | None  # [rows, vocab] fp32
    sampled: SampleStep | None


class _Shape(NamedTuple):
    tokens: int
    sequences: int
    rows: int  # of logits

    @property
    def sizes(self) -> list[int]:
        """Words of each part of the inputs."""
        return [
            self.rows * ROW_WORDS, self.rows, self.sequences, self.sequences + 1, self.tokens
        ]  # fmt: skip


class _Inputs(NamedTuple):
    """What is uploaded at once, and the memory for the sampled tokens."""

    words: Tensor  # the memory of `sampling`
    sampling: SamplingRows | None  # of the rows; None without any
    last: Tensor  # [rows] int32: the position whose logits are the row's
    slots: Tensor  # [sequences] int32
    cu_seqlens: Tensor  # [sequences + 1] int32
    tokens: Tensor  # [tokens] int32


def _inputs(memory: Tensor, shape: _Shape) -> _Inputs:
    """The inputs that lie in `memory` (int32, 1-d)."""
    words, *rest = memory.split(shape.sizes)
    return _Inputs(words, sampling_rows(words, shape.rows) if shape.rows else None, *rest)


class _HostInputs(NamedTuple):
    """What _Inputs has, on the host, to be filled."""

    sampling: HostSamplingRows | None
    last: NDArray[np.int32]
    slots: NDArray[np.int32]
    cu_seqlens: NDArray[np.int32]
    tokens: NDArray[np.int32]


def _host_inputs(memory: Tensor, shape: _Shape) -> _HostInputs:
    """The inputs that lie in `memory` (int32, 1-d), on the host."""
    words, *rest = memory.split(shape.sizes)
    sampling = host_sampling_rows(words, shape.rows) if shape.rows else None
    return _HostInputs(sampling, *(part.numpy() for part in rest))


class _Graphed(NamedTuple):
    """A shape's memory: on the host, two buffers that steps use in turn, since a step may begin
    before the copy of the one before it has ended; and what its graph reads and writes."""

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
        self._graphs: dict[int, BucketGraphs] = {}  # by sequences, rising
        self._graphed: dict[_Shape, _Graphed] = {}
        # What graphs leave behind, for the next one overwrites the memory that they share.
        self._logits: Tensor | None = None  # [most chunks, vocab] fp32
        self._hidden: Tensor | None = None  # [most tokens, d_model]
        self._turn = 0  # of the buffers on the host
        self._launch_bound = 0  # up to so many tokens, padding costs nothing

    def worth_graphs(self, sizes: Sequence[int]) -> int:
        """The largest of so many tokens, rising, up to which a GPU's host takes about as long to
        launch a prompt's kernels as they take; 0 if that is so for none. Waits for the device.

        What is timed is padding, and products that the model has not chosen yet: the scan is
        missing, and what is chosen later is quicker. Where both are near, it does not matter.
        """
        largest = 0
        for tokens in sizes:
            try:
                times_launches = self._times_launches(tokens)
            except torch.OutOfMemoryError:  # nor is there room for a graph of it
                break
            if times_launches > _PAYS:
                break
            largest = tokens
            if times_launches <= _LAUNCH_BOUND:
                self._launch_bound = tokens
        return largest

    def _times_launches(self, tokens: int) -> float:
        """How long reading so many takes, without a graph, by how long its launches take."""
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
        """Captures graphs for calls of up to so many chunks, and for each of so many tokens, as
        prompt_buckets() gives them."""
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
        self._hidden = None  # its type is the model's
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
        """Reads the chunks, each into the state of its slot. With `sample` it also samples a token,
        the first of its request, which must be plain, after every chunk with `sample`.

        The tensors of the result are valid until the next call.
        """
        ending = [chunk for chunk in chunks if chunk.sample]
        if sample and self._processors.concern(chunk.slot for chunk in ending):
            read = self(chunks, sample=False)
            assert read.logits is not None
            return read._replace(sampled=self.sample(read.logits, ending))
        tokens = sum(len(chunk.tokens) for chunk in chunks)
        rows = len(ending)
        scored = any(chunk.targets is not None for chunk in chunks)
        size = self._graph_of(tokens, len(chunks))
        hidden, logits = None, None
        if size is not None:
            assert self._logits is not None and self._hidden is not None
            graphed = self._graphed[size]
            self._turn = 1 - self._turn
            self._fill(graphed.host_inputs[self._turn], chunks, sample)
            copy_words_(graphed.memory, graphed.hosts[self._turn])
            self._graphs[size.sequences].replay(size.tokens)
            inputs = graphed.inputs
            hidden, logits = self._hidden[:tokens], self._logits[:rows]
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
        return Read(hidden if scored else None, logits if rows else None, sampled)

    def sample(self, logits: Tensor, chunks: Sequence[PrefillChunk]) -> SampleStep:
        """Samples from known logits [rows, vocab] fp32, a row for each of the chunks, whose
        requests must be plain."""
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
        """Writes the inputs; what the chunks do not need becomes padding."""
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
        # The first run is one of the largest, and no capture: in one, these would lie in the memory
        # that the next graph overwrites.
        if self._hidden is None:
            self._hidden = torch.empty_like(hidden)
        self._hidden[:tokens].copy_(hidden)
        self._logits[:chunks].copy_(logits)

    def _clear(self, chunks: int, tokens: int) -> None:
        graphed = self._graphed[_Shape(tokens, chunks, chunks)]
        self._fill(graphed.host_inputs[0], [], sample=False)
        graphed.memory.copy_(graphed.hosts[0])
