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

FLOAT_MAX = torch.finfo(torch.float32).max
MIN_TEMPERATURE = 1e-30  # keeps the quotient defined; draws are greedy long before


class Rows(NamedTuple):
    """Whom a step draws for, on the host."""

    keys: list[int]
    slots: list[int]
    tokens: list[int]  # that the step has read
    positions: list[int]  # how many tokens have been drawn before

    def add(self, key: int, slot: int, token: int, position: int) -> None:
        self.keys.append(key)
        self.slots.append(slot)
        self.tokens.append(token)
        self.positions.append(position)


class Draws(NamedTuple):
    """One drawn token per row, on the device."""

    tokens: Tensor  # [rows] int64 or int32; meaningless where not finite
    finite: Tensor  # [rows] bool: the row's logits held no NaN and no +infinity
    logprobs: Logprobs | None  # of the rows that `Sampler.logprob_rows` names


class Allowed(NamedTuple):
    """What grammars allow in one step, on the device."""

    rows: Tensor  # [g] of the batch
    bits: Tensor  # [g, words] int32, as `distribution.allow` reads them


class _Drawn(NamedTuple):
    rows: Tensor  # [d] of the batch
    temperature: Tensor  # [d]
    top_k: Tensor  # [d]
    top_p: Tensor  # [d]
    min_p: Tensor  # [d]
    streams: Tensor  # [d]


@dataclass(slots=True)
class _Batch:
    """The parameters of one set of rows; a part that no row uses is None."""

    keys: Sequence[int]
    slots: Tensor | None  # [rows], where requests change logits
    drawn: _Drawn | None
    logprob_index: Tensor | None  # [l] of the batch
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

        Where no token is possible (all are banned), the most likely one of those that the grammar
        allows is taken.
        """
        if self._batch is None or self._batch.keys != rows.keys:
            self._batch = self._build(rows)
        batch = self._batch
        raw_best, tokens = distribution.greedy(logits)
        possible, best = logits, raw_best
        if allowed is not None:
            masked = distribution.allow(logits[allowed.rows], allowed.bits)
            possible = logits.index_copy(0, allowed.rows, masked)
            best, tokens = distribution.greedy(possible)
        at = None
        if batch.drawn or batch.slots is not None:
            at = self._tensor(rows.positions, torch.int64)
        if batch.slots is not None:
            assert at is not None
            fallback = tokens
            if possible is logits and batch.logprob_index is not None:
                possible = logits.clone()
            read = self._tensor(rows.tokens, torch.int32)
            self._adjustments.apply(possible, read, batch.slots, at)
            best, tokens = distribution.greedy(possible)
        if batch.drawn is not None:
            assert at is not None
            tokens = tokens.index_copy(0, batch.drawn.rows, _draw(batch.drawn, possible, at))
        if batch.slots is not None:
            tokens = torch.where(best.isneginf(), fallback, tokens)
        logprobs = None
        if batch.logprob_index is not None:
            index = batch.logprob_index
            logprobs = distribution.token_logprobs(logits[index], tokens[index], batch.logprob_top)
        return Draws(tokens, raw_best.isfinite(), logprobs)

    def _build(self, rows: Rows) -> _Batch:
        params = [self._params[key] for key in rows.keys]
        logprobs = self.logprob_rows(rows.keys)
        drawn = [row for row, one in enumerate(params) if one.temperature > 0]
        adjusted = self._adjustments.concern(rows.slots)
        return _Batch(
            keys=rows.keys.copy(),
            slots=self._tensor(rows.slots, torch.int32) if adjusted else None,
            drawn=self._build_drawn(drawn, [params[row] for row in drawn]),
            logprob_index=(
                self._tensor([row for row, _ in logprobs], torch.int64) if logprobs else None
            ),
            logprob_top=max((top for _, top in logprobs), default=0),
        )

    def _build_drawn(self, rows: list[int], params: list[SamplingParams]) -> _Drawn | None:
        if not rows:
            return None
        streams = distribution.stream_ids(
            self._tensor([one.seed for one in params], torch.int64),
            self._tensor([one.choice for one in params], torch.int64),
        )
        top_k = [one.top_k if one.top_k < self.vocab_size else 0 for one in params]
        return _Drawn(
            self._tensor(rows, torch.int64),
            self._tensor([bounded_temperature(one) for one in params], torch.float32),
            self._tensor(top_k, torch.int32),
            self._tensor([one.top_p for one in params], torch.float64),
            self._tensor([one.min_p for one in params], torch.float32),
            streams,
        )

    def _tensor(self, values: Sequence[float], dtype: torch.dtype) -> Tensor:
        return upload(values, dtype, self.device)


def _draw(drawn: _Drawn, logits: Tensor, at: Tensor) -> Tensor:
    """The tokens [d] of the rows that are drawn, of logits [rows, vocab] at positions at [rows], by
    the operator that draws for a batch without the host: who draws changes no token."""
    rows, device = len(drawn.rows), logits.device
    tokens, slots, remaining, cursor = torch.zeros(4, rows, dtype=torch.int32, device=device)
    out = torch.zeros(1, rows, dtype=torch.int32, device=device)
    stop_ids = torch.zeros(rows, 0, dtype=torch.int32, device=device)
    ops.draw_(
        logits[drawn.rows], tokens, slots, at[drawn.rows], remaining, cursor, out,
        drawn.temperature, drawn.top_k, drawn.top_p, drawn.min_p, drawn.streams, stop_ids,
    )  # fmt: skip
    return out[0].long().clamp(min=0)  # -1 where the logits are not finite


def bounded_temperature(params: SamplingParams) -> float:
    """What float32 cannot hold becomes its nearest positive value."""
    return min(max(params.temperature, MIN_TEMPERATURE), FLOAT_MAX)
