"""Sampler: a token for each of some rows whose logits are known.

That is the prompts whose logits were kept or are changed before the sampling, and those in whose
sampling the host has a part. It is what a decode step does in a graph, by the same operators, so
who samples changes no token. The order is: grammar, penalties, logit_bias, min_tokens, temperature,
top_k, top_p, min_p. What a grammar forbids does not exist for the others. Nothing waits for the
device.
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

ROW_WORDS = FILLED_WORDS + 1  # of a row that one token is sampled for


class Rows(NamedTuple):
    """Whom tokens are sampled for, on the host."""

    keys: list[int]
    slots: list[int]
    tokens: list[int]  # that the step has read
    positions: list[int]  # how many tokens have been sampled before


class SampleStep(NamedTuple):
    """Rows that a token has been sampled for, on the device until the step is finished."""

    keys: list[int]  # of their sequences
    words: Tensor  # int32: the memory of their SamplingRows
    size: int  # rows that it is made for
    tokens: Tensor  # [rows] int32; negative where the best logit is not finite
    reported: Reported | None


class Allowed(NamedTuple):
    """What grammars allow in one step: `ops.apply_logits_processors_` takes it, on the device."""

    masks: Tensor  # [masked, words] int32
    mask_of: Tensor  # [rows] int32


class _Buffers(NamedTuple):
    """Where SamplingRows are filled, and where they go. To make the views takes longer
    than to fill them."""

    host: Tensor
    given: HostSamplingRows
    words: Tensor
    at: SamplingRows


# In turn: two steps may be under way, each with samples for prompts that were read before and now.
_IN_TURN = 4


class Sampler:
    """Shared by all that sample; `params` and `processors` are those of the rows' slots."""

    def __init__(
        self, params: BatchSamplingParams, processors: LogitsProcessors, uploads: UploadRing
    ) -> None:
        self._params = params
        self._processors = processors
        self._uploads = uploads
        self._size = 0  # rows that were sampled for last
        self._buffers: list[_Buffers] = []  # all for so many

    def sample(self, rows: Rows, logits: Tensor, allowed: Allowed | None = None) -> SampleStep:
        """Samples from logits [rows, vocab] fp32, which stay as they are. Some token has to be
        allowed for each row."""
        size = len(rows.keys)
        buffers = self._next_buffers(size)
        self._params.fill(
            buffers.given,
            np.array(rows.slots, np.int32),
            positions=np.array(rows.positions, np.int64),
            tokens=np.array(rows.tokens, np.int64),
        )
        # torch's copy keeps that memory until it has ended: buffers of another size are dropped.
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
