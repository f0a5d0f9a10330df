"""Sampler: draws one token for every row of a step, each with its own request's parameters.

`engine.distribution` and `ops.draw_` hold the mathematics; here each part is applied to those rows
whose requests use it, which the host knows, in this order: grammar, penalties, logit_bias,
min_tokens, temperature, top_k, top_p, min_p. What a grammar forbids does not exist for the others.
Nothing waits for the device. While the same sequences decode together, their parameters stay on the
device and only the positions go there, and the masks of grammars.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from engine import distribution, ops
from engine.device import upload
from engine.distribution import Logprobs
from engine.messages import Request, SamplingParams, unpack_ids

FLOAT_MAX = torch.finfo(torch.float32).max
MIN_TEMPERATURE = 1e-30  # keeps the quotient defined; draws are greedy long before


class Draws(NamedTuple):
    """One drawn token per row, on the device."""

    tokens: Tensor  # [rows] int64 or int32; meaningless where not finite
    finite: Tensor  # [rows] bool: the row's logits held no NaN and no +infinity
    logprobs: Logprobs | None  # of the rows that `Sampler.logprob_rows` names


class Allowed(NamedTuple):
    """What grammars allow in one step, on the device."""

    rows: Tensor  # [g] of the batch
    bits: Tensor  # [g, words] int32, as `distribution.allow` reads them


class _Penalised(NamedTuple):
    rows: Tensor  # [p] of the batch
    table: Tensor  # [p] rows of the token table
    repetition: Tensor  # [p, 1]
    presence: Tensor  # [p, 1]
    frequency: Tensor  # [p, 1]


class _Biased(NamedTuple):
    rows: Tensor  # [entries] of the batch
    ids: Tensor  # [entries]
    values: Tensor  # [entries]


class _Banned(NamedTuple):
    rows: Tensor  # [entries] of the batch
    ids: Tensor  # [entries]
    until: Tensor  # [entries]: impossible at positions below


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
    penalised: _Penalised | None
    biased: _Biased | None
    banned: _Banned | None
    drawn: _Drawn | None
    logprob_index: Tensor | None  # [l] of the batch
    logprob_top: int


class _Sequence(NamedTuple):
    params: SamplingParams
    table_row: int | None  # None: no penalties


class Sampler:
    """Keeps every sequence's parameters from `admit` until `release`."""

    def __init__(self, vocab_size: int, eos_token_id: int | None, device: torch.device) -> None:
        self.vocab_size = vocab_size
        self.eos_token_id = eos_token_id
        self.device = device
        self._end_of_text: tuple[int, ...] = () if eos_token_id is None else (eos_token_id,)
        self._sequences: dict[int, _Sequence] = {}
        self._table = _TokenTable(vocab_size, device)
        self._batch: _Batch | None = None

    def admit(self, key: int, request: Request) -> None:
        """Notes how the tokens of sequence `key` are to be drawn."""
        params = request.sampling
        row = self._table.take(request.prompt) if _has_penalties(params) else None
        self._sequences[key] = _Sequence(params, row)

    def release(self, keys: Iterable[int]) -> None:
        """Forgets sequences; unknown keys are ignored."""
        for key in keys:
            sequence = self._sequences.pop(key, None)
            if sequence is None:
                continue
            if sequence.table_row is not None:
                self._table.give_back(sequence.table_row)
            if self._batch is not None and key in self._batch.keys:
                self._batch = None

    def logprob_rows(self, keys: Sequence[int]) -> list[tuple[int, int]]:
        """(row, how many best) of the rows whose requests ask for log-probabilities."""
        tops = ((row, self._sequences[key].params.logprobs) for row, key in enumerate(keys))
        return [(row, top) for row, top in tops if top is not None]

    def sample(
        self,
        keys: Sequence[int],
        positions: Sequence[int],
        logits: Tensor,
        allowed: Allowed | None = None,
    ) -> Draws:
        """Draws a token for each row of `logits` [rows, vocab] fp32.

        positions[i] counts the tokens that sequence keys[i] has drawn before. Where no token is
        possible (all are banned), the most likely one of those that the grammar allows is taken.
        """
        if self._batch is None or self._batch.keys != keys:
            self._batch = self._build(list(keys))
        batch = self._batch
        raw_best, tokens = distribution.greedy(logits)
        possible, best = logits, raw_best
        if allowed is not None:
            masked = distribution.allow(logits[allowed.rows], allowed.bits)
            possible = logits.index_copy(0, allowed.rows, masked)
            best, tokens = distribution.greedy(possible)
        fallback = tokens
        at = None
        if batch.banned or batch.drawn:
            at = self._tensor(positions, torch.int64)
        adjusted = self._adjust(batch, possible, at)
        if adjusted is not possible:
            best, tokens = distribution.greedy(adjusted)
        if batch.drawn is not None:
            assert at is not None
            drawn = _draw(batch.drawn, adjusted, at)
            tokens = tokens.index_copy(0, batch.drawn.rows, drawn)
        if adjusted is not possible:
            tokens = torch.where(best.isneginf(), fallback, tokens)
        if batch.penalised is not None:
            self._table.count(batch.penalised.table, tokens[batch.penalised.rows])
        logprobs = None
        if batch.logprob_index is not None:
            index = batch.logprob_index
            logprobs = distribution.token_logprobs(logits[index], tokens[index], batch.logprob_top)
        return Draws(tokens, raw_best.isfinite(), logprobs)

    def _adjust(self, batch: _Batch, logits: Tensor, at: Tensor | None) -> Tensor:
        if batch.penalised is not None:
            rows, table, *penalties = batch.penalised
            penalised = distribution.penalise(
                logits[rows], self._table.in_prompt[table], self._table.answer[table], *penalties
            )
            logits = logits.index_copy(0, rows, penalised)
        if batch.biased is not None:
            logits = distribution.add_bias(logits, *batch.biased)
        if batch.banned is not None:
            assert at is not None
            rows, ids, until = batch.banned
            values = torch.zeros(len(ids), device=self.device)
            values = values.masked_fill(at[rows] < until, -torch.inf)
            logits = distribution.add_bias(logits, rows, ids, values)
        return logits

    def _build(self, keys: list[int]) -> _Batch:
        sequences = [self._sequences[key] for key in keys]
        params = [sequence.params for sequence in sequences]
        logprobs = self.logprob_rows(keys)
        drawn = [row for row, one in enumerate(params) if one.temperature > 0]
        return _Batch(
            keys=keys,
            penalised=self._build_penalised(sequences),
            biased=self._build_biased(params),
            banned=self._build_banned(sequences),
            drawn=self._build_drawn(drawn, [params[row] for row in drawn]),
            logprob_index=(
                self._tensor([row for row, _ in logprobs], torch.int64) if logprobs else None
            ),
            logprob_top=max((top for _, top in logprobs), default=0),
        )

    def _build_penalised(self, sequences: list[_Sequence]) -> _Penalised | None:
        used = [
            (row, one.table_row, one.params)
            for row, one in enumerate(sequences)
            if one.table_row is not None
        ]
        if not used:
            return None
        rows, table, params = zip(*used, strict=True)
        return _Penalised(
            self._tensor(rows, torch.int64),
            self._tensor(table, torch.int64),
            self._column([one.repetition_penalty for one in params]),
            self._column([one.presence_penalty for one in params]),
            self._column([one.frequency_penalty for one in params]),
        )

    def _build_biased(self, params: list[SamplingParams]) -> _Biased | None:
        entries = [
            (row, id, value)
            for row, one in enumerate(params)
            for id, value in one.logit_bias.items()
        ]
        if not entries:
            return None
        rows, ids, values = zip(*entries, strict=True)
        return _Biased(
            self._tensor(rows, torch.int64),
            self._tensor(ids, torch.int64),
            self._column(values).squeeze(-1),
        )

    def _build_banned(self, sequences: list[_Sequence]) -> _Banned | None:
        entries = [
            (row, id, one.params.min_tokens)
            for row, one in enumerate(sequences)
            if one.params.min_tokens
            for id in self._endings(one.params)
        ]
        if not entries:
            return None
        rows, ids, until = zip(*entries, strict=True)
        return _Banned(*(self._tensor(column, torch.int64) for column in (rows, ids, until)))

    def _endings(self, params: SamplingParams) -> list[int]:
        """The tokens of the vocabulary that min_tokens makes impossible; end-of-text, where it is
        ignored, too."""
        ids = {id for id in params.stop_token_ids if 0 <= id < self.vocab_size}
        return sorted(ids.union(self._end_of_text))

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
            self._column([max(one.temperature, MIN_TEMPERATURE) for one in params]).squeeze(-1),
            self._tensor(top_k, torch.int32),
            self._tensor([one.top_p for one in params], torch.float64),
            self._tensor([one.min_p for one in params], torch.float32),
            streams,
        )

    def _column(self, values: Sequence[float]) -> Tensor:
        """fp32 [n, 1]; a parameter that float32 cannot hold becomes its nearest finite value."""
        bounded = [min(max(value, -FLOAT_MAX), FLOAT_MAX) for value in values]
        return self._tensor(bounded, torch.float32).unsqueeze(-1)

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


class _TokenTable:
    """Which tokens the prompt and the answer of each penalised sequence hold.

    Rows are [vocab]; the table grows by doubling, from nothing, as requests with penalties come.
    """

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self.in_prompt = torch.zeros(0, vocab_size, dtype=torch.bool, device=device)
        self.answer = torch.zeros(0, vocab_size, dtype=torch.int32, device=device)
        self._free: list[int] = []

    def take(self, prompt: bytes) -> int:
        """A row for a sequence with this prompt (messages.pack_ids) and no answer yet."""
        if not self._free:
            rows = len(self.answer)
            more = max(8, rows)
            # Both or neither: memory may run out in between.
            self.in_prompt, self.answer = _grown(self.in_prompt, more), _grown(self.answer, more)
            self._free = list(range(rows, rows + more))
        row = self._free.pop()
        ids = upload(sorted(set(unpack_ids(prompt))), torch.int64, self.in_prompt.device)
        self.in_prompt[row] = False
        self.in_prompt[row].index_fill_(0, ids, True)
        self.answer[row] = 0
        return row

    def give_back(self, row: int) -> None:
        """Makes a row free for another sequence."""
        self._free.append(row)

    def count(self, rows: Tensor, tokens: Tensor) -> None:
        """tokens[i] was drawn for the sequence of rows[i]."""
        ones = torch.ones(len(rows), dtype=torch.int32, device=rows.device)
        self.answer.index_put_((rows, tokens), ones, accumulate=True)


def _grown(table: Tensor, rows: int) -> Tensor:
    return torch.cat([table, table.new_zeros(rows, table.shape[1])])


def _has_penalties(params: SamplingParams) -> bool:
    return (
        params.repetition_penalty != 1
        or params.presence_penalty != 0
        or params.frequency_penalty != 0
    )
