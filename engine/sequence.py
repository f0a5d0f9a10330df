"""Sequence: one request's progress through the engine, and the rule by which it finishes.

A token that ends the text (end-of-text, or one of stop_token_ids) is not part of the answer: it
is neither delivered nor counted, so that completion_tokens is the number of delivered tokens.
"""

from __future__ import annotations

from array import array
from collections.abc import Hashable
from typing import TYPE_CHECKING

from engine.protocol.events import Finished, Timing
from engine.protocol.logprobs import PackedLogprobs
from engine.protocol.requests import FinishReason, Request
from engine.protocol.sampling_params import is_plain, stop_ids, top_of
from engine.protocol.state_calls import StateInfo
from engine.protocol.token_ids import ID_BYTES, unpack_ids

if TYPE_CHECKING:
    from engine.structured_output.masks import MaskCost


class Sequence:
    """What the scheduler knows of one request, from its arrival to its terminal event.

    `key` is the engine's own number for it, in order of arrival. The prompt stays packed; only
    the chunk that is read next is ever unpacked.
    """

    __slots__ = (
        "anchor",
        "arrived_at",
        "cached_tokens",
        "client",
        "deadline",
        "drawn",
        "first_token_at",
        "handed_over",
        "is_read",
        "key",
        "last_step",
        "last_token",
        "last_token_at",
        "lead",
        "loads",
        "marks",
        "mask_cost",
        "max_tokens",
        "min_tokens",
        "over",
        "owner",
        "plain",
        "position",
        "priority",
        "prompt_tokens",
        "reports",
        "request",
        "row",
        "samples",
        "since",
        "slot",
        "started_at",
        "stop_ids",
        "tail_drawn",
        "text",
        "tokens",
        "top",
    )

    def __init__(
        self,
        key: int,
        client: Hashable,
        request: Request,
        eos_token_ids: tuple[int, ...],
        now: float,
    ) -> None:
        sampling = request.sampling
        self.key = key
        self.client = client
        self.request = request
        self.owner = request.owner
        self.priority = request.priority
        self.text = request.prompt  # what it reads, packed
        self.prompt_tokens = request.prompt_tokens  # of `text`
        self.lead = 0  # how many of them are the last ones of the state that it goes on from
        self.loads = 0  # how often a cached state was read from a file for it
        self.samples = sampling.max_tokens > 0  # a token is drawn after the prompt
        self.marks: list[int] = []  # lengths of `text` at which a chunk has to end, rising
        self.tail_drawn = False  # `lead` is one token, which was generated
        self.mask_cost: MaskCost | None = None  # of its grammar, once that is compiled
        self.max_tokens = sampling.max_tokens
        self.min_tokens = sampling.min_tokens
        self.stop_ids = stop_ids(sampling, eos_token_ids)
        self.plain = is_plain(sampling, eos_token_ids)
        self.top = top_of(sampling)
        self.deadline = None if request.timeout is None else now + request.timeout

        self.over = False  # its terminal event is on its way
        self.slot = -1  # negative while it waits
        self.handed_over = False  # others may have its slot: what it still draws is under way
        self.position = 0  # prompt tokens that have been read, or are by the rounds under way
        self.is_read = False  # its text has been
        self.anchor = 0  # the position that the multiples of SCAN_CHUNK are counted from
        self.cached_tokens = 0
        self.drawn = 0  # tokens delivered so far
        self.last_token = -1  # the latest of them, not yet read
        self.tokens = array("i")  # all of them
        self.reports = bytearray()  # of all of them, where they are not told of one by one

        self.row = -1  # of the batch that it decodes in
        self.since = 0  # the batch's step whose token it does not know yet
        self.last_step = 0  # the batch's step after which it has max_tokens

        self.arrived_at = now
        self.started_at: float | None = None  # of its first step
        self.first_token_at: float | None = None
        self.last_token_at = now

    @property
    def needs_host(self) -> bool:
        """Whether the host has a part in its draws."""
        return self.samples and not self.plain

    @property
    def remaining(self) -> int:
        """Prompt tokens still to be read."""
        return self.prompt_tokens - self.position

    @property
    def unspent(self) -> int:
        """Tokens that it could still read and generate."""
        left = self.prompt_tokens - self.position
        return left + self.max_tokens - self.request.run_on - self.drawn

    @property
    def cacheable_tokens(self) -> int:
        """How much of the prompt a shared state may cover at most.

        The last token has to be read, since the first draw needs its logits, and so has the one
        before the first scored token.
        """
        limit = self.prompt_tokens - 1
        return min(limit, self.lead + self.request.score_from - 1) if self.request.score else limit

    @property
    def cache_points(self) -> tuple[int, ...]:
        """Lengths of `text` that its request has named."""
        points = self.request.cache_points
        return tuple(self.lead + point for point in points) if self.lead else points

    @property
    def resumable(self) -> bool:
        """Whether it may begin with the logits that a cached state of its whole prompt has."""
        return self.samples and not self.request.score and self.request.keep is None

    @property
    def begins_drawn(self) -> bool:
        """It has nothing to read but a token that was generated: it goes on with the steps that
        brought that."""
        return self.samples and self.tail_drawn and not self.request.prompt

    def begin_drawn(self, now: float) -> None:
        """It decodes at once (`begins_drawn`)."""
        self.started_at, self.position, self.is_read = now, self.prompt_tokens, True
        (self.last_token,) = unpack_ids(self.text)

    def go_on_from(self, tail: bytes, drawn: bool) -> None:
        """Puts tokens that are to be read in front of its prompt; `drawn`: one, which was
        generated."""
        self.tail_drawn = drawn
        self.text, self.lead = tail + self.request.prompt, len(tail) // ID_BYTES
        self.prompt_tokens = self.lead + self.request.prompt_tokens

    def prompt_slice(self, start: int, stop: int) -> array[int]:
        """Tokens `start` to `stop` of its text, unpacked."""
        return unpack_ids(self.text[start * ID_BYTES : stop * ID_BYTES])

    def targets(self, start: int, stop: int) -> array[int] | None:
        """For each prompt token its successor where that is to be scored, else -1.

        None when no token from `start` to `stop` has a successor to score.
        """
        if not self.request.score:
            return None
        first = max(start + 1, self.request.score_from + self.lead)
        last = min(stop, self.prompt_tokens - 1)
        if first > last:
            return None
        targets = array("i", [-1]) * (first - start - 1)
        targets.extend(self.prompt_slice(first, last + 1))
        targets.extend([-1] * (stop - last))
        return targets

    def next_mark(self) -> int:
        """The prompt length at which the next chunk has to end at the latest."""
        for mark in self.marks:
            if mark > self.position:
                return mark
        return self.prompt_tokens

    def verdict(self, token: int) -> FinishReason | None:
        """How `token`, if it is drawn next, ends the sequence; None when it goes on.

        "stop" leaves the token out of the answer, "length" includes it.
        """
        if token in self.stop_ids and self.drawn >= self.min_tokens:
            return "stop"
        return "length" if self.drawn + 1 >= self.max_tokens else None

    def append(self, token: int, report: PackedLogprobs | None, now: float) -> None:
        """Takes a drawn token into the answer."""
        if self.first_token_at is None:
            self.first_token_at = now
        self.last_token_at = now
        self.drawn += 1
        self.last_token = token
        self.tokens.append(token)
        self.note(report)

    @property
    def gathers(self) -> bool:
        """Log-probabilities are told of when it has ended."""
        return self.top >= 0 and not self.request.stream

    def note(self, reports: PackedLogprobs | None) -> None:
        """Takes log-probabilities of drawn tokens into the answer, where they are told of then."""
        if reports is not None and self.gathers:
            self.reports += reports.packed

    def extend(self, packed: bytes, now: float) -> None:
        """Takes drawn tokens into the answer, at least one, none of which ends it."""
        if self.first_token_at is None:
            self.first_token_at = now
        self.last_token_at = now
        self.tokens.frombytes(packed)
        self.drawn = len(self.tokens)
        self.last_token = self.tokens[-1]

    def take_last(self, ids: array[int], now: float) -> tuple[int, FinishReason | None]:
        """Takes drawn tokens up to the one that ends the sequence: (how many, the verdict)."""
        if self.stop_ids.isdisjoint(ids):
            taken = min(len(ids), self.max_tokens - self.drawn)
            if taken > 0:
                self.extend(ids[:taken].tobytes(), now)
            return taken, "length" if self.drawn >= self.max_tokens else None
        for taken, token in enumerate(ids):
            verdict = self.verdict(token)
            if verdict == "stop":
                return taken, verdict
            self.append(token, None, now)
            if verdict is not None:
                return taken + 1, verdict
        return len(ids), None

    def finished(
        self,
        reason: FinishReason,
        now: float,
        state: StateInfo | None = None,
        snapshot: bytes = b"",
    ) -> Finished:
        """The terminal event; `state` and `snapshot` say what is kept of it."""
        started = now if self.started_at is None else self.started_at
        prefill = decode = None
        if self.first_token_at is not None:
            prefill = self.first_token_at - started
            decode = self.last_token_at - self.first_token_at
        elif self.is_read:  # nothing to generate, or it ended at once
            prefill = now - started
        return Finished(
            request=self.request.id,
            reason=reason,
            prompt_tokens=self.prompt_tokens - self.lead,
            cached_tokens=self.cached_tokens,
            completion_tokens=self.drawn,
            timing=Timing(started - self.arrived_at, prefill, decode),
            answer=b"" if self.request.stream else self.tokens.tobytes(),
            reports=PackedLogprobs(self.top, bytes(self.reports)) if self.gathers else None,
            state=state,
            snapshot=snapshot,
        )
