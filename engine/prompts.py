"""PromptStep: reads prompts' chunks and draws the tokens that follow them; few tokens in one graph.

A short prompt is, like a decode step, bound by launching its kernels. So its reading is captured in
CUDA graphs too: the chunks, the logits behind their last positions and the draws from these, one
graph per bucket of tokens and of chunks. What fills a bucket up is tokens of no sequence, and
sequences of no tokens whose slots are negative; no operator's plan depends on where sequences lie,
and none touches a state for these.

Longer prompts, whose kernels outlast their launches, and those with positions to score, whose
hidden states are wanted, are read by the same code without a graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from engine.columns import FILLED_WORDS, Columns, Parameters, columns, draw_rows
from engine.graphs import BucketGraphs, prompt_buckets
from engine.models.cell import ModelState
from engine.plan import PrefillChunk
from engine.serving import ServingModel

_ROW_WORDS = FILLED_WORDS + 1  # of a row that one token is drawn for


class Read(NamedTuple):
    """What reading chunks gives, on the device, until the next call; None where it is not wanted.
    Rows are those of the chunks with `sample`."""

    hidden: Tensor | None  # [tokens, d_model], of all chunks, where there are targets to score
    logits: Tensor | None  # [rows, vocab] fp32
    drawn: Tensor | None  # [rows] int32; negative where the logits are not finite


class _Shape(NamedTuple):
    tokens: int
    sequences: int
    rows: int  # of logits

    @property
    def sizes(self) -> list[int]:
        """Words of each part of the inputs."""
        return [
            self.rows * _ROW_WORDS, self.rows, self.sequences, self.sequences + 1, self.tokens
        ]  # fmt: skip


class _Inputs(NamedTuple):
    """What is uploaded at once, and the place for the tokens drawn."""

    drawing: Columns | None  # of the rows; None without any
    last: Tensor  # [rows] int32: the position whose logits are the row's
    slots: Tensor  # [sequences] int32
    cu_seqlens: Tensor  # [sequences + 1] int32
    tokens: Tensor  # [tokens] int32


def _inputs(memory: Tensor, shape: _Shape) -> _Inputs:
    """The inputs that lie in `memory` (int32, 1-d)."""
    drawing, *rest = memory.split(shape.sizes)
    return _Inputs(columns(drawing, shape.rows) if shape.rows else None, *rest)


class _Graphed(NamedTuple):
    """A shape's places: on the host, written only when no round is under way, so that its copy to
    the device has ended; and those that its graph reads and writes."""

    host: Tensor
    given: _Inputs
    memory: Tensor
    inputs: _Inputs


class PromptStep:
    """Reads with `model` into `state`; `parameters` are those of the chunks' slots. No call waits
    for the device."""

    def __init__(
        self, model: ServingModel, state: ModelState, parameters: Parameters, device: torch.device
    ) -> None:
        self._model = model
        self._state = state
        self._parameters = parameters
        self._device = device
        self._graphs: dict[int, BucketGraphs] = {}  # by sequences, rising
        self._places: dict[_Shape, _Graphed] = {}

    def capture(self, most_tokens: int, most_chunks: int, vocab_size: int, pool: Any) -> None:
        """Captures graphs for calls of up to so many tokens and chunks, and no more than pays."""
        sizes = prompt_buckets(most_tokens, most_chunks)
        shapes = [_Shape(size, chunks, chunks) for chunks in sizes for size in sizes[chunks]]
        words = max(sum(shape.sizes) for shape in shapes)
        memory = torch.zeros(words, dtype=torch.int32, device=self._device)
        host = torch.zeros(words, dtype=torch.int32, pin_memory=self._device.type == "cuda")
        for shape in shapes:
            mine, its = (piece[: sum(shape.sizes)] for piece in (host, memory))
            self._places[shape] = _Graphed(mine, _inputs(mine, shape), its, _inputs(its, shape))
        self._logits = torch.empty(max(sizes), vocab_size, device=self._device)
        graphs = {
            chunks: BucketGraphs(
                partial(self._run_graphed, chunks), partial(self._clear, chunks), sizes[chunks]
            )
            for chunks in sorted(sizes)
        }
        for one in reversed(graphs.values()):
            one.capture(pool)
        self._graphs = graphs

    def __call__(self, chunks: Sequence[PrefillChunk], draw: bool) -> Read:
        """Reads the chunks, each into the state of its slot. With `draw` it also draws a token, the
        first of its request, which must be plain, after every chunk with `sample`."""
        tokens = sum(len(chunk.tokens) for chunk in chunks)
        rows = sum(chunk.sample for chunk in chunks)
        scored = any(chunk.targets is not None for chunk in chunks)
        size = None if scored else self._graph_of(tokens, len(chunks))
        hidden, logits = None, None
        if size is not None:
            place = self._places[size]
            self._fill(place.given, chunks, draw)
            place.memory.copy_(place.host, non_blocking=True)
            self._graphs[size.sequences].replay(size.tokens)
            inputs = place.inputs
            logits = self._logits[:rows]
        else:
            shape = _Shape(tokens, len(chunks), rows)
            on_gpu = self._device.type == "cuda"
            host = torch.empty(sum(shape.sizes), dtype=torch.int32, pin_memory=on_gpu)
            self._fill(_inputs(host, shape), chunks, draw)
            inputs = _inputs(host.to(self._device, non_blocking=True), shape)
            hidden, logits = self._run(inputs, draw)
        drawn = inputs.drawing.out[0, :rows] if draw and inputs.drawing is not None else None
        return Read(hidden if scored else None, logits if rows else None, drawn if rows else None)

    def _graph_of(self, tokens: int, chunks: int) -> _Shape | None:
        for sequences, graphs in self._graphs.items():
            if sequences >= chunks:
                size = graphs.size_of(tokens)
                return None if size is None else _Shape(size, sequences, sequences)
        return None

    def _fill(self, given: _Inputs, chunks: Sequence[PrefillChunk], draw: bool) -> None:
        """Writes the inputs, on the host; what the chunks do not need becomes padding."""
        tokens, ends = given.tokens.numpy(), given.cu_seqlens.numpy()
        slots, last = given.slots.numpy(), given.last.numpy()
        begin = 0
        drawn: list[int] = []
        slots[len(chunks) :] = -1
        ends[0], last[:] = 0, 0
        for index, chunk in enumerate(chunks):
            end = begin + len(chunk.tokens)
            tokens[begin:end] = chunk.tokens
            slots[index], ends[index + 1] = chunk.slot, end
            if chunk.sample:
                last[len(drawn)] = end - 1
                drawn.append(chunk.slot)
            begin = end
        tokens[begin:] = 0
        ends[len(chunks) + 1 :] = begin
        if given.drawing is not None:
            rows = np.array(drawn if draw else [], np.int32)
            nothing = np.zeros(len(rows), np.int64)
            self._parameters.fill(given.drawing, rows, positions=nothing, tokens=nothing)

    def _run(self, inputs: _Inputs, draw: bool) -> tuple[Tensor, Tensor | None]:
        hidden = self._model.prefill(inputs.tokens, inputs.cu_seqlens, self._state, inputs.slots)
        if inputs.drawing is None:
            return hidden, None
        logits = self._model.logits(hidden.index_select(0, inputs.last))
        if draw:
            draw_rows(logits, inputs.drawing)
        return hidden, logits

    def _run_graphed(self, chunks: int, tokens: int) -> None:
        _, logits = self._run(self._places[_Shape(tokens, chunks, chunks)].inputs, draw=True)
        assert logits is not None
        # The next graph, whose memory is the same, may overwrite them before they are read.
        self._logits[:chunks].copy_(logits)

    def _clear(self, chunks: int, tokens: int) -> None:
        place = self._places[_Shape(tokens, chunks, chunks)]
        self._fill(place.given, [], draw=False)
        place.memory.copy_(place.host)
