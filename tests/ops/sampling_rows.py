"""Batches for the tests of sample_, and what is to be drawn for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from engine import ops
from engine.ops import sampling
from engine.protocol.sampling_params import SamplingParams
from engine.runner.sampling import random_streams as distribution
from tests.ops import torch_sampling

STEPS = 3
PARAMETERS = [
    SamplingParams(temperature=t, top_k=k, top_p=p, min_p=m)
    for t in (0.0, 1e-30, 0.3, 1.0, 50.0, 1e4)
    for k, p, m in (
        (0, 1.0, 0.0),
        (1, 1.0, 0.0),
        (7, 1.0, 0.0),
        (40, 0.8, 0.0),
        (10**6, 0.95, 0.02),
        (0, 0.5, 0.0),
        (0, 0.9, 0.0),
        (0, 0.9999, 0.0),
        (0, 0.0, 0.0),
        (0, 1.0, 0.1),
        (0, 1.0, 1.0),
        (3, 0.999, 0.3),
        (700, 1.0, 0.0),
        (2000, 0.9, 0.001),
    )
]


@dataclass
class Rows:
    """The arguments of sample_ after the logits, one row per sequence."""

    tokens: Tensor
    slots: Tensor
    positions: Tensor
    remaining: Tensor
    cursor: Tensor
    out: Tensor
    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    streams: Tensor
    stop_ids: Tensor

    def copy(self) -> Rows:
        return Rows(*(tensor.clone() for tensor in self.all()))

    def sample(self, logits: Tensor) -> Tensor:
        """Draws, and returns what went to the first row of `out`."""
        ops.sample_(logits, *self.all())
        return self.out[0]

    def sample_best(self, best: Tensor) -> None:
        """Draws from the bests of parts of the rows."""
        sampling.sample_best_(
            best,
            self.tokens,
            self.slots,
            self.positions,
            self.remaining,
            self.cursor,
            self.out,
            self.stop_ids,
        )

    def all(self) -> tuple[Tensor, ...]:
        """Every tensor, in the operator's order."""
        return tuple(getattr(self, field.name) for field in fields(self))


def rows_of(
    params: Sequence[SamplingParams],
    device: str = "cpu",
    positions: Sequence[int] | None = None,
    stop_ids: int = 2,
) -> Rows:
    """Rows in slots 0, 1, ... that have 1000 tokens left to draw."""
    rows = len(params)

    def vector(values: Sequence[float], dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    return Rows(
        tokens=vector([-7] * rows, torch.int32),
        slots=vector(range(rows), torch.int32),
        positions=vector(positions or [0] * rows, torch.int64),
        remaining=vector([1000] * rows, torch.int32),
        cursor=vector([0] * rows, torch.int32),
        out=torch.full((STEPS, rows), -9, dtype=torch.int32, device=device),
        temperature=vector([one.temperature for one in params], torch.float32),
        top_k=vector([one.top_k for one in params], torch.int32),
        top_p=vector([one.top_p for one in params], torch.float64),
        min_p=vector([one.min_p for one in params], torch.float32),
        streams=distribution.stream_ids(
            vector([one.seed for one in params], torch.int64),
            vector([one.choice for one in params], torch.int64),
        ),
        stop_ids=torch.full((rows, stop_ids), -1, dtype=torch.int32, device=device),
    )


def sampled(
    params: Sequence[SamplingParams], positions: Sequence[int], logits: Tensor
) -> tuple[Tensor, Tensor]:
    """(tokens int32, finite): what torch_sampling draws."""
    rows, vocab = rows_of(params, str(logits.device), positions), logits.shape[1]
    best, tokens = logits.max(dim=-1)
    temperature = rows.temperature.clamp(min=1e-30).unsqueeze(-1)
    octaves = torch_sampling.octaves(logits, best, temperature)
    width = torch.where(rows.top_k > 0, rows.top_k, vocab).clamp(max=vocab)
    filtered = ((width < vocab) | (rows.top_p < 1)).nonzero().squeeze(-1)
    if len(filtered):
        top_k, top_p = width[filtered].unsqueeze(-1), rows.top_p[filtered].unsqueeze(-1)
        kept = torch_sampling.keep_top(octaves[filtered], top_k, top_p, int(top_k.max()))
        octaves = octaves.index_copy(0, filtered, kept)
    octaves = torch_sampling.keep_min_p(octaves, rows.min_p.unsqueeze(-1))
    # Rows without top_k first try tokens drawn from all.
    tried = (width == vocab) & (vocab in sampling.TRIED)
    drawn = torch_sampling.sample(octaves, torch_sampling.uniform(rows.streams, rows.positions))
    if tried.any():
        numbers = torch_sampling.uniform(rows.streams, rows.positions, sampling.TRIES)
        drawn = torch.where(tried, torch_sampling.sample(octaves, numbers), drawn)
    for refused in reversed(range(sampling.TRIES if tried.any() else 0)):
        numbers = torch_sampling.uniform(rows.streams, rows.positions, refused)
        token = torch_sampling.sample_unfiltered(logits, best, temperature, numbers)
        kept = octaves.gather(-1, token.unsqueeze(-1)).squeeze(-1) > -torch.inf
        drawn = torch.where(tried & kept, token, drawn)
    return torch.where(rows.temperature > 0, drawn, tokens).int(), best.isfinite()
