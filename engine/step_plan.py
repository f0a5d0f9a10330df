"""StepPlan and StepResult: everything that one round does, in plain integers, and its result.

A round is what the engine asks of the device at once: prompt chunks, and one or several consecutive
decode steps. The runner executes a plan in this order: `release`, `before`, `admit`, `prefill`,
`after`, then `decode` and `exports`.

A slot is a row of the state pool used by a running sequence. Cached and named states are in further
rows of the same pool, so that forking a state copies one row, or in rows of host memory. A *place*
is a pool row (0 or above), or `~row` of host memory (negative).

Items of which a plan has one per sequence are msgspec.Structs, which are several times faster to
make than frozen dataclasses.
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

MOST_STEPS = 32  # the most decode steps in a round


class Admission(msgspec.Struct, frozen=True, gc=False):
    """Gives a request a slot, with the state at place `source` (None: the initial state)."""

    request: Request
    key: int  # the engine's number for the sequence, unique over all clients
    slot: int
    source: int | None
    cached_tokens: int  # tokens of the text that the state at `source` has read
    # The packed tokens to read, if they differ from the request's prompt: it then begins with the
    # last tokens of the continued text, of which `source` has read `before`.
    text: bytes = b""
    before: int = 0


INITIAL = -(2**62)  # place of the initial state, as the source of a Copy; not a real row


class Copy(msgspec.Struct, frozen=True, gc=False):
    """Copies the state at place `source` over the one at `target`."""

    source: int
    target: int
    # For a copy after a step: the sequence whose last hidden state is stored with the state; -1:
    # none. Copies between stored states take their hidden states along.
    key: int = -1


@dataclass(frozen=True, slots=True)
class Load:
    """Writes a state from outside to a place, packed as by `Store`, with a hidden state or not."""

    target: int
    state: bytes


@dataclass(frozen=True, slots=True)
class Store:
    """Exports the state at a place to the host.

    The bytes are the tensors of the model's StateSpecs, one after the other, then, if `hidden` is
    set, the stored hidden state [d_model] as fp32.
    """

    ticket: int
    source: int
    hidden: bool = False


class PrefillChunk(msgspec.Struct, frozen=True, gc=False):
    """The next prompt tokens of one sequence."""

    key: int
    slot: int
    start: int  # index in the prompt of the first token
    tokens: array[int]  # at least one, except in a chunk with `source`
    # The successor of each token if that is to be scored, else -1; None: nothing is scored.
    targets: array[int] | None
    score_top: int
    sample: bool  # this chunk ends the prompt and a token is sampled after it
    source: int | None = None  # place whose stored hidden state is used; then nothing is read


class DecodeRow(msgspec.Struct, frozen=True, gc=False):
    """One sequence of a decode step."""

    key: int
    slot: int
    # The last sampled token, to be read now; negative: the token that this key's chunk in the same
    # plan samples.
    token: int
    position: int  # number of tokens generated before this step


@dataclass(slots=True)
class StepPlan:
    """Everything that one round does.

    `sampled` of its result has one entry for each chunk with `sample`, and then, unless the plan is
    `plain`, one for each row.

    In a `plain` plan the device keeps a batch and samples for every row without the host. It ends
    rows by itself (at their stop ids and at max_tokens), so it may take several `steps`; it also
    samples the first tokens after the chunks. Without `again` the batch is a new one. With `again`
    the device continues the batch and skips rows that have ended: first the rows in `leave` end,
    then the sequences in `decode` join, at the rows in `at`.

    Plans that may be started before the result of the previous one is known:

    - a plain plan, and one that only reads prompts;
    - a plan that is `apart`: the host takes part in its sampling, but not in that of the plans
      before and after it. Those may be started before its own result is known, too.
    """

    admit: list[Admission] = field(default_factory=list)
    prefill: list[PrefillChunk] = field(default_factory=list)
    # rows to decode; if `plain`, only those that join the batch
    decode: list[DecodeRow] = field(default_factory=list)
    at: list[int] = field(default_factory=list)  # the batch row that each of `decode` takes
    leave: list[int] = field(default_factory=list)  # batch rows that the host has ended
    before: list[Copy | Load] = field(default_factory=list)  # executed in order
    after: list[Copy] = field(default_factory=list)  # snapshots; no two have the same target
    exports: list[Store] = field(default_factory=list)
    # Keys that have ended since the last plan; after a failed step some may be unknown.
    release: list[int] = field(default_factory=list)
    plain: bool = False
    greedy: bool = False  # `plain`, and every row takes the most likely token
    adjusted: bool = False  # `plain`, and some requests have logits processors
    top: int = -1  # `plain`: the largest number of top tokens reported for a row; -1: none
    again: bool = False  # `plain`: continue the device's batch
    apart: bool = False  # see the class's docstring
    steps: int = 1  # decode steps; more than one only if `plain`

    def participants(self) -> list[int]:
        """Return the keys of the sequences in this plan, except rows of a continued batch."""
        keys = [admission.key for admission in self.admit]
        keys += [chunk.key for chunk in self.prefill]
        return keys + [row.key for row in self.decode]

    @property
    def decodes(self) -> bool:
        """Whether the plan has a decode step."""
        return self.plain or bool(self.decode)

    @property
    def empty(self) -> bool:
        """Whether there is nothing to run; there may still be keys to `release`."""
        return not (self.admit or self.prefill or self.decodes or self.before or self.exports)


class Sampled(msgspec.Struct, frozen=True, gc=False):
    """One sampled token, with its log-probabilities if its request asks for them."""

    key: int
    token: int
    report: PackedLogprobs | None
    complete: bool = False  # its request's grammar allows no further token


@dataclass(frozen=True, slots=True)
class Drawn:
    """The tokens sampled for the rows of a plain plan's batch: `StepPlan.steps` for each row."""

    tokens: bytes  # int32 [rows, steps] (token_ids.pack_ids); undefined after a row's end
    # Rows that have ended, now or before, and how many of their tokens are valid. The last valid
    # one may be a stop id.
    ended: dict[int, int]
    # int32 [rows, steps, words], with `StepPlan.top` top tokens each; undefined where a row asked
    # for fewer or has ended.
    reports: NDArray[np.int32] | None = None

    def reports_of(self, rows: int | list[int], tokens: int, top: int) -> PackedLogprobs:
        """Return reports of the first `tokens` tokens of some rows, with `top` top tokens each."""
        assert self.reports is not None
        words = self.reports[rows, :tokens, : words_of_report(top)]
        return PackedLogprobs(top, words.tobytes())


@dataclass(frozen=True, slots=True)
class Scored:
    """Log-probabilities of one chunk's targets, without the -1 entries."""

    key: int
    start: int  # index in the prompt of the first scored token
    reports: PackedLogprobs


@dataclass(slots=True)
class StepResult:
    """The result of a round, for the scheduler."""

    sampled: list[Sampled] = field(default_factory=list)
    drawn: Drawn | None = None  # for a plain plan
    scored: list[Scored] = field(default_factory=list)
    # Keys whose logits contained NaN or infinity. Their requests fail; tokens or scores that the
    # step still reports for them are meaningless.
    non_finite: list[int] = field(default_factory=list)
    # Keys whose grammars reached a point where no token is allowed, and why. Their tokens are
    # meaningless, too.
    rejected: dict[int, str] = field(default_factory=dict)
    exports: dict[int, bytes] = field(default_factory=dict)  # exported bytes, by ticket
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    host_seconds: float = 0.0  # host time spent on the round

    def errors(self) -> Iterator[tuple[int, EngineError]]:
        """Yield the keys whose requests fail, with their errors."""
        for key in self.non_finite:
            yield key, StepFailed("the model's logits are not finite")
        for key, reason in self.rejected.items():
            yield key, InvalidRequest(f"the grammar cannot be met: {reason}", param="grammar")
