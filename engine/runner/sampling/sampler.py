"""Sampler: samples a token for rows whose logits exist outside of a decode step's graph.

These are prompts whose logits were stored or are processed first, and rows for which the host takes
part in sampling. It uses the same operators as the graphs of decode steps, so the tokens are the
same. Order: grammar, penalties, logit_bias, min_tokens, temperature, top_k, top_p, min_p. Tokens
that a grammar forbids do not exist for the later stages. Nothing waits for the device.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from engine.ops.upload import UploadRing
from engine.runner.sampling.batch_params import BatchSamplingParams
from engine.runner.sampling.batch_rows import (
    FILLED_WORDS,
    HostSamplingRows,
    SamplingRows,
    host_sampling_rows,
    sample_rows,
    sampling_rows,
)
from engine.runner.sampling.logits_processors import LogitsProcessors
from engine.runner.sampling.logprobs import Reported, report

ROW_WORDS = FILLED_WORDS + 1  # words of a row for which one token is sampled


class Rows(NamedTuple):
    """The rows to sample for, on the host."""

    keys: list[int]
    slots: list[int]
    tokens: list[int]  # read by the step
    positions: list[int]  # number of tokens sampled before


class SampleStep(NamedTuple):
    """Rows that have been sampled for, on the device until the step is finished."""

    keys: list[int]  # keys of the rows' sequences
    words: Tensor  # int32: the memory of their SamplingRows
    size: int  # number of rows for which `words` is laid out
    tokens: Tensor  # [rows] int32; negative if the best logit is not finite
    reported: Reported | None


class Allowed(NamedTuple):
    """Token masks of grammars for one step, on the device, for `ops.apply_logits_processors_`."""

    masks: Tensor  # [masked, words] int32
    mask_of: Tensor  # [rows] int32


class _Buffers(NamedTuple):
    """SamplingRows to fill on the host, and their copy on the device.

    The views are kept because making them takes longer than filling them.
    """

    host: Tensor
    given: HostSamplingRows
    words: Tensor
    at: SamplingRows


# Buffers used in turn: two steps may be in flight, each with samples for stored and for new logits.
_IN_TURN = 4


class Sampler:
    """Shared by everything that samples; `params` and `processors` are those of the rows' slots."""

    def __init__(
        self, params: BatchSamplingParams, processors: LogitsProcessors, uploads: UploadRing
    ) -> None:
        self._params = params
        self._processors = processors
        self._uploads = uploads
        self._size = 0  # number of rows in the last call
        self._buffers: list[_Buffers] = []  # all for this number of rows

    def sample(self, rows: Rows, logits: Tensor, allowed: Allowed | None = None) -> SampleStep:
        """Sample from logits [rows, vocab] fp32, which are not modified.

        At least one token must be allowed in each row.
        """
        size = len(rows.keys)
        buffers = self._next_buffers(size)
        self._params.fill(
            buffers.given,
            np.array(rows.slots, np.int32),
            positions=np.array(rows.positions, np.int64),
            tokens=np.array(rows.tokens, np.int64),
        )
        # torch keeps the host memory alive until the copy has ended, even if buffers are dropped.
        buffers.words.copy_(buffers.host, non_blocking=True)
        at, processed = buffers.at, logits
        if allowed is not None or self._processors.concern(rows.slots):
            processed = logits.clone()
            masks, mask_of = (None, None) if allowed is None else allowed
            self._processors.apply(processed, at.tokens, at.slots, at.positions, masks, mask_of)
        sample_rows(processed, at)
        tokens = at.out[0]
        reported = report(logits, tokens, self._params.asked(rows.slots), self._uploads)
        return SampleStep(rows.keys, buffers.words, size, tokens, reported)

    def _next_buffers(self, size: int) -> _Buffers:
        if self._size != size:
            self._size, self._buffers = size, []
        if len(self._buffers) < _IN_TURN:
            self._buffers.append(_make_buffers(size, self._uploads.device))
        else:
            self._buffers.append(self._buffers.pop(0))
        return self._buffers[-1]


def _make_buffers(size: int, device: torch.device) -> _Buffers:
    words = torch.empty(size * ROW_WORDS, dtype=torch.int32, device=device)
    host = torch.empty(size * ROW_WORDS, dtype=torch.int32, pin_memory=device.type == "cuda")
    return _Buffers(host, host_sampling_rows(host, size), words, sampling_rows(words, size))
