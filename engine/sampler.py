"""Sampler: draws one token for every row of a step, each with its own request's parameters.

Of those in whose draws the host has a part: it lays the masks of grammars on the logits, and
fetches log-probabilities. All else is done as for a batch without the host, by the same operators,
so who draws changes no token. The order is: grammar, penalties, logit_bias, min_tokens,
temperature, top_k, top_p, min_p. What a grammar forbids does not exist for the others. Nothing
waits for the device. While the same sequences decode together, their parameters stay on the device
and only positions and tokens go there, and the masks of grammars.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from engine import distribution, ops
from engine.adjustments import Adjustments
from engine.device import upload
from engine.distribution import Logprobs
from engine.messages import SamplingParams
from engine.sequence import is_greedy

FLOAT_MAX = torch.finfo(torch.float32).max
MIN_TEMPERATURE = 1e-30  # keeps the quotient defined; draws are greedy long before


class Rows(NamedTuple):
    """Whom a step draws for, on the host."""

    keys: list[int]
    slots: list[int]
    tokens: list[int]  # that the step has read
    positions: list[int]  # how many tokens have been drawn before


class Draws(NamedTuple):
    """One drawn token per row, on the device."""

    tokens: Tensor  # [rows] int32; meaningless where not finite
    finite: Tensor  # [rows] bool: the row's logits held no NaN and no +infinity
    logprobs: Logprobs | None  # of the rows that `Sampler.logprob_rows` names


class Allowed(NamedTuple):
    """What grammars allow in one step, on the device, as `ops.adjust_` takes it."""

    masks: Tensor  # [masked, words] int32
    mask_of: Tensor  # [rows] int32


@dataclass(slots=True)
class _Batch:
    """The parameters of one set of rows, as `ops.draw_` takes them."""

    keys: list[int]
    slots: Tensor
    adjusted: bool  # requests change logits
    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    streams: Tensor
    logprob_index: Tensor | None  # [l] of the rows; None where nobody asks for any
    logprob_top: int


class Sampler:
    """Keeps every sequence's parameters from `admit` until `release`; `adjustments` are those of
    the sequences' slots."""

    def __init__(self, vocab_size: int, adjustments: Adjustments, device: torch.device) -> None:
        self.vocab_size = vocab_size
        self.device = device
        self._adjustments = adjustments
        self._params: dict[int, SamplingParams] = {}
        self._batch: _Batch | None = None

    def admit(self, key: int, params: SamplingParams) -> None:
        """Notes how the tokens of sequence `key` are to be drawn."""
        self._params[key] = params

    def release(self, keys: Iterable[int]) -> None:
        """Forgets sequences; unknown keys are ignored."""
        for key in keys:
            known = self._params.pop(key, None)
            if known is not None and self._batch is not None and key in self._batch.keys:
                self._batch = None

    def logprob_rows(self, keys: Sequence[int]) -> list[tuple[int, int]]:
        """(row, how many best) of the rows whose requests ask for log-probabilities."""
        tops = ((row, self._params[key].logprobs) for row, key in enumerate(keys))
        return [(row, top) for row, top in tops if top is not None]

    def sample(self, rows: Rows, logits: Tensor, allowed: Allowed | None = None) -> Draws:
        """Draws a token for each of `rows` from `logits` [rows, vocab] fp32, which it may change.
        Some token has to be allowed for each."""
        if self._batch is None or self._batch.keys != rows.keys:
            self._batch = self._build(rows)
        batch, index = self._batch, self._batch.logprob_index
        raw = None if index is None else logits[index]
        positions = self._tensor(rows.positions, torch.int64)
        if batch.adjusted or allowed is not None:
            read = self._tensor(rows.tokens, torch.int32)
            masks, mask_of = (None, None) if allowed is None else allowed
            self._adjustments.apply(logits, read, batch.slots, positions, masks, mask_of)
        tokens = _draw(batch, logits, positions)
        logprobs = None
        if raw is not None and index is not None:
            drawn = tokens[index].clamp(min=0).long()
            logprobs = distribution.token_logprobs(raw, drawn, batch.logprob_top)
        return Draws(tokens, tokens >= 0, logprobs)

    def _build(self, rows: Rows) -> _Batch:
        params = [self._params[key] for key in rows.keys]
        logprobs = self.logprob_rows(rows.keys)
        top_k = [one.top_k if one.top_k < self.vocab_size else 0 for one in params]
        streams = distribution.stream_ids(
            self._tensor([one.seed for one in params], torch.int64),
            self._tensor([one.choice for one in params], torch.int64),
        )
        return _Batch(
            keys=rows.keys.copy(),
            slots=self._tensor(rows.slots, torch.int32),
            adjusted=self._adjustments.concern(rows.slots),
            temperature=self._tensor([drawn_temperature(one) for one in params], torch.float32),
            top_k=self._tensor(top_k, torch.int32),
            top_p=self._tensor([one.top_p for one in params], torch.float64),
            min_p=self._tensor([one.min_p for one in params], torch.float32),
            streams=streams,
            logprob_index=(
                self._tensor([row for row, _ in logprobs], torch.int64) if logprobs else None
            ),
            logprob_top=max((top for _, top in logprobs), default=0),
        )

    def _tensor(self, values: Sequence[float], dtype: torch.dtype) -> Tensor:
        return upload(values, dtype, self.device)


def drawn_temperature(params: SamplingParams) -> float:
    """As `ops.draw_` takes it: 0 where the best token is drawn; else what float32 cannot hold
    becomes its nearest positive value."""
    if is_greedy(params):
        return 0.0
    return min(max(params.temperature, MIN_TEMPERATURE), FLOAT_MAX)


def _draw(batch: _Batch, logits: Tensor, positions: Tensor) -> Tensor:
    """The tokens [rows] int32, -1 where logits are not finite, by the operator that draws for a
    batch without the host."""
    rows, device = len(logits), logits.device
    tokens, slots, remaining, cursor = torch.zeros(4, rows, dtype=torch.int32, device=device)
    out = torch.zeros(1, rows, dtype=torch.int32, device=device)
    stop_ids = torch.zeros(rows, 0, dtype=torch.int32, device=device)
    ops.draw_(
        logits, tokens, slots, positions, remaining, cursor, out,
        batch.temperature, batch.top_k, batch.top_p, batch.min_p, batch.streams, stop_ids,
    )  # fmt: skip
    return out[0]
