"""A sampler with the logits processors of its sequences, each in the slot of its key."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from engine.ops.upload import UploadRing
from engine.protocol.logprobs import TokenLogprobs
from engine.protocol.requests import Request
from engine.protocol.sampling_params import SamplingParams
from engine.protocol.token_ids import pack_ids
from engine.runner.sampling.batch_params import BatchSamplingParams
from engine.runner.sampling.logits_processors import LogitsProcessors
from engine.runner.sampling.logprobs import Reported
from engine.runner.sampling.sampler import Allowed, Rows, Sampler, SampleStep
from engine.step_plan import Admission


class Draws(NamedTuple):
    tokens: Tensor  # [rows]
    logprobs: dict[int, TokenLogprobs]  # of the rows that asked


class Sampling:
    """Draws for its sequences as a runner does, which knows what each has drawn last."""

    def __init__(
        self, vocab: int, eos: tuple[int, ...], device: str = "cpu", slots: int = 64
    ) -> None:
        self.uploads = UploadRing(torch.device(device))
        self.processors = LogitsProcessors(slots, vocab, eos, self.uploads)
        self.params = BatchSamplingParams(slots, vocab, eos)
        self.sampler = Sampler(self.params, self.processors, self.uploads)
        self.last: dict[int, int] = {}

    def admit(self, key: int, params: SamplingParams, prompt: Sequence[int] = (0,)) -> None:
        request = Request(id=key, prompt=pack_ids(prompt), sampling=params)
        admission = Admission(request, key, slot=key, source=None, cached_tokens=0)
        self.processors.admit([admission])
        self.params.admit([admission])

    def sample(
        self,
        keys: Sequence[int],
        positions: Sequence[int],
        logits: Tensor,
        allowed: Allowed | None = None,
    ) -> Draws:
        keys = list(keys)
        read = [self.last.get(key, 0) for key in keys]
        given = logits.clone()
        drawing = self.sampler.sample(Rows(keys, keys, read, list(positions)), given, allowed)
        assert torch.equal(given, logits) or given.isnan().any(), "they are somebody's"
        self.last.update(zip(keys, drawing.tokens.tolist(), strict=True))
        return Draws(drawing.tokens, logprobs_of(drawing))


def logprobs_of(drawing: SampleStep) -> dict[int, TokenLogprobs]:
    """Of the rows that asked, once the device is done."""
    if drawing.reported is None:
        return {}
    asked, words = drawing.reported
    reports = Reported(asked, words.cpu()).by_row()
    return {row: one for row, report in reports.items() for one in report.unpack()}
