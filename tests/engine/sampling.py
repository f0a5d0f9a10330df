"""A sampler with the adjustments of its sequences, each in the slot of its key."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from engine.adjustments import Adjustments
from engine.messages import Request, SamplingParams, pack_ids
from engine.plan import Admission
from engine.sampler import Allowed, Draws, Rows, Sampler


class Sampling:
    """Draws for its sequences as a runner does, which knows what each has drawn last."""

    def __init__(self, vocab: int, eos: int | None, device: str = "cpu", slots: int = 64) -> None:
        where = torch.device(device)
        self.adjustments = Adjustments(slots, vocab, eos, where)
        self.sampler = Sampler(vocab, self.adjustments, where)
        self.last: dict[int, int] = {}

    def admit(self, key: int, params: SamplingParams, prompt: Sequence[int] = (0,)) -> None:
        request = Request(id=key, prompt=pack_ids(prompt), sampling=params)
        admission = Admission(request, key, slot=key, source=None, cached_tokens=0)
        self.adjustments.admit([admission])
        self.sampler.admit(key, params)

    def release(self, keys: Iterable[int]) -> None:
        self.sampler.release(keys)

    def sample(
        self,
        keys: Sequence[int],
        positions: Sequence[int],
        logits: Tensor,
        allowed: Allowed | None = None,
    ) -> Draws:
        keys = list(keys)
        read = [self.last.get(key, 0) for key in keys]
        draws = self.sampler.sample(
            Rows(keys, keys, read, list(positions)), logits.clone(), allowed
        )
        self.last.update(zip(keys, draws.tokens.tolist(), strict=True))
        return draws
