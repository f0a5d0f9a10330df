"""StepPlan: all that one round does, in plain integers.

A round is what the engine asks of the device at once: prompt chunks, and one decode step or several
in a row. The runner carries a plan out in this order: `release`, `before`, `admit`, `prefill`,
`after`, then `decode` and `exports`.

Slots are rows of the state pool. Cached and named states have further rows of the same pool, so
that forking a state is a copy of one row, or rows of main memory. A *place* is a row of the pool
(0 or above), or `~row` of main memory (negative).

What a plan has one of for each sequence is a msgspec.Struct, which is made several times faster
than a frozen dataclass.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field

import msgspec
import numpy as np
from numpy.typing import NDArray

from engine.errors import EngineError, InvalidRequest, StepFailed
from engine.protocol.logprobs import PackedLogprobs, words_of_report
from engine.protocol.requests import Request

MOST_STEPS = 32  # of a round


class Admission(msgspec.Struct, frozen=True, gc=False):
    """A request gets a slot, and starts from the state at `source`; None: the initial state."""

    request: Request
    key: int  # the engine's own number for the sequence, unique over all clients
    slot: int
    source: int | None
    cached_tokens: int  # tokens of the text that `source` has already read
    # What is read, packed, where that is not the request's prompt alone: it begins with the last
    # tokens of the text that is gone on from, of which `source` has read `before` tokens.
    text: bytes = b""
    before: int = 0


INITIAL = -(2**62)  # the place of the initial state, as the source of a Copy; no row is there


class Copy(msgspec.Struct, frozen=True, gc=False):
    """The state at place `source` is copied over that at `target`."""

    source: int
    target: int
    # Of a copy after a step: the sequence whose chunk's last logits are stored with the state; -1:
    # none are. Copies between places of stored states take their logits along.
    key: int = -1


@dataclass(frozen=True, slots=True)
class Load:
    """A state from outside, packed as `Store` gives it, with or without logits, goes to a place."""

    target: int
    state: bytes


@dataclass(frozen=True, slots=True)
class Store:
    """The state at a place goes to the host, as bytes of fp32: cell [layers, inner], then conv
    [layers, taps - 1, d_model], then, if asked for, the logits [vocab] that are stored with it."""

    ticket: int
    source: int
    logits: bool = False


class PrefillChunk(msgspec.Struct, frozen=True, gc=False):
    """The next prompt tokens of one sequence."""

    key: int
    slot: int
    start: int  # index in the prompt of the first token
    tokens: array[int]  # at least one, but for a chunk with `source`
    # tokens[i]'s successor where it is to be scored, else -1; None when nothing here is scored
    targets: array[int] | None
    score_top: int
    sample: bool  # the chunk ends the prompt and a token is to be drawn after it
    source: int | None = None  # nothing is read: the logits are those kept at this place


class DecodeRow(msgspec.Struct, frozen=True, gc=False):
    """One sequence's next token."""

    key: int
    slot: int
    # The last sampled token, to be read now; negative: that of this key's chunk in the same plan.
    token: int
    position: int  # how many tokens have been drawn before the one that this step draws


@dataclass(slots=True)
class StepPlan:
    """One round. `sampled` of its result has one entry per chunk with `sample`, and then, unless
    the plan is `plain`, one per row.

    In a `plain` plan a batch decodes that the device keeps: it draws for every row without the host
    and ends rows by itself (at their stop ids and their max_tokens), so that it may take several
    `steps`, and draws the first tokens of the chunks too. Without `again` the batch is a new one.
    With it, the device goes on where it is and passes over the rows that have ended: those in
    `leave` end first, then those of `decode` come in, at the rows `at`. A plain plan may be started
    before the result of the one before it is known, and so may one that only reads. In the draws of
    one that is `apart` the host has a part, but none in those of the plans around it: it may be
    started before the result of these is known, and they before its own.
    """

    admit: list[Admission] = field(default_factory=list)
    prefill: list[PrefillChunk] = field(default_factory=list)
    decode: list[DecodeRow] = field(default_factory=list)  # `plain`: those that join the batch
    at: list[int] = field(default_factory=list)  # the row of the batch that each of these takes
    leave: list[int] = field(default_factory=list)  # rows of the batch that the host has ended
    before: list[Copy | Load] = field(default_factory=list)  # one after the other
    after: list[Copy] = field(default_factory=list)  # snapshots; no two to one place
    exports: list[Store] = field(default_factory=list)
    # Keys that ended since the last plan; after a step that failed some may be unknown.
    release: list[int] = field(default_factory=list)
    plain: bool = False
    greedy: bool = False  # `plain`, and every row draws the best token
    adjusted: bool = False  # `plain`, and requests have logits processors
    top: int = -1  # `plain`: the most best tokens that are reported of one; -1: nothing is
    again: bool = False
    apart: bool = False
    steps: int = 1  # of those that decode; more than one only where `plain`

    def participants(self) -> list[int]:
        """The keys of the sequences that take part, but for those of the batch that goes on."""
        keys = [admission.key for admission in self.admit]
        keys += [chunk.key for chunk in self.prefill]
        return keys + [row.key for row in self.decode]

    @property
    def decodes(self) -> bool:
        """Sequences read what was drawn for them, as far as they have not ended meanwhile."""
        return self.plain or bool(self.decode)

    @property
    def empty(self) -> bool:
        """Nothing to do; bookkeeping (`release`) may still be there."""
        return not (self.admit or self.prefill or self.decodes or self.before or self.exports)


class Sampled(msgspec.Struct, frozen=True, gc=False):
    """One drawn token, with its log-probabilities where its request asks for them."""

    key: int
    token: int
    report: PackedLogprobs | None
    complete: bool = False  # its request's grammar lets nothing follow


@dataclass(frozen=True, slots=True)
class Drawn:
    """What the rows of a plain plan's batch drew: `StepPlan.steps` tokens each, but for those in
    `ended`."""

    tokens: bytes  # int32 [rows, steps] (token_ids.pack_ids); rubbish after the end of a row
    # The rows that have ended, now or before, and how many of the tokens are theirs. The last of
    # these may be a stop id.
    ended: dict[int, int]
    # int32 [rows, steps, words], of `StepPlan.top` best tokens each; rubbish where a row asked for
    # less or has ended.
    reports: NDArray[np.int32] | None = None

    def reports_of(self, rows: int | list[int], tokens: int, top: int) -> PackedLogprobs:
        """Of the first `tokens` tokens of a row or of each of some, which asked for `top` best
        tokens."""
        assert self.reports is not None
        words = self.reports[rows, :tokens, : words_of_report(top)]
        return PackedLogprobs(top, words.tobytes())


@dataclass(frozen=True, slots=True)
class Scored:
    """Log-probabilities of the targets of one chunk, without the -1 entries."""

    key: int
    start: int  # index in the prompt of the first scored token
    reports: PackedLogprobs


@dataclass(slots=True)
class StepResult:
    """What a round gives back to the scheduler."""

    sampled: list[Sampled] = field(default_factory=list)
    drawn: Drawn | None = None  # of a plain plan
    scored: list[Scored] = field(default_factory=list)
    # Keys whose logits held NaN or infinity. What the step drew for them means nothing (it is in
    # `sampled`, `drawn` or `scored` nevertheless); their requests fail.
    non_finite: list[int] = field(default_factory=list)
    # Keys whose grammars led to where no token goes on, and why. What was drawn for them means
    # nothing either.
    rejected: dict[int, str] = field(default_factory=dict)
    exports: dict[int, bytes] = field(default_factory=dict)  # by ticket
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    host_seconds: float = 0.0  # that the host was busy with it

    def errors(self) -> Iterator[tuple[int, EngineError]]:
        """The keys whose requests fail, with their errors."""
        for key in self.non_finite:
            yield key, StepFailed("the model's logits are not finite")
        for key, reason in self.rejected.items():
            yield key, InvalidRequest(f"the grammar cannot be met: {reason}", param="grammar")
