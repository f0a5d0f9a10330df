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

    Its fields are in one object, not in a record for each group: that would cost the host a sixth
    more for every token that it samples (engine/NOTES.md, "Scheduler").
    """

    __slots__ = (  # noqa: RUF023 - by group
        # Identity.
        "key", "client", "request", "owner", "priority",
        # Limits: what ends it, and how it is sampled.
        "max_tokens", "min_tokens", "stop_ids", "plain", "samples", "top", "mask_cost", "deadline",
        # The text that it reads.
        "text", "prompt_tokens", "lead", "tail_drawn", "loads", "marks",
        # Progress.
        "slot", "handed_over", "over", "position", "is_read", "anchor", "cached_tokens", "drawn",
        "last_token", "tokens", "reports",
        # Its place in a DecodeBatch.
        "row", "since", "last_step",
        # Timing.
        "arrived_at", "started_at", "first_token_at", "last_token_at",
    )  # fmt: skip

    def __init__(
        self,
        key: int,
        client: Hashable,
        request: Request,
        eos_token_ids: tuple[int, ...],
        now: float,
    ) -> None:
        """
        Args:
            key: the engine's own number for it, in order of arrival.
            client: who is told of it.
            request: its prompt stays packed; only the chunk that is read next is ever unpacked.
            eos_token_ids: each of them ends a text of the model.
            now: when it arrived; this and all other times are seconds of the scheduler's clock.
        """
        sampling = request.sampling
        self.key = key
        self.client = client
        self.request = request
        self.owner = request.owner
        self.priority = request.priority

        self.max_tokens = sampling.max_tokens
        self.min_tokens = sampling.min_tokens
        self.stop_ids = stop_ids(sampling, eos_token_ids)
        self.plain = is_plain(sampling, eos_token_ids)  # the device can sample for it by itself
        self.samples = sampling.max_tokens > 0  # a token is sampled after the prompt
        self.top = top_of(sampling)  # best tokens reported with each token; -1: nothing is
        self.mask_cost: MaskCost | None = None  # of its grammar, once that is compiled
        self.deadline = None if request.timeout is None else now + request.timeout

        self.text = request.prompt  # what it reads, packed
        self.prompt_tokens = request.prompt_tokens  # of `text`
        self.lead = 0  # how many of them are the last tokens of the state that it goes on from
        self.tail_drawn = False  # `lead` is one token, which was generated
        self.loads = 0  # how often a cached state was read from a file for it
        self.marks: list[int] = []  # lengths of `text` at which a chunk has to end, rising

        self.slot = -1  # row of the state pool; negative while it waits
        self.handed_over = False  # others may have its slot: what it still draws is under way
        self.over = False  # its terminal event is on its way
        self.position = 0  # tokens of `text` that are read, by the rounds under way at the latest
        self.is_read = False  # all of its text is, by a committed round
        self.anchor = 0  # the position that the multiples of SCAN_CHUNK are counted from
        self.cached_tokens = 0  # of its own prompt, that a cached state had read
        self.drawn = 0  # tokens delivered so far
        self.last_token = -1  # the latest of them, not yet read
        self.tokens = array("i")  # all of them
        self.reports = bytearray()  # their log-probabilities, if told of at the end (`gathers`)

        self.row = -1  # of the batch that it decodes in; -1: of none
        self.since = 0  # the batch's step whose token it does not know yet
        self.last_step = 0  # the batch's step after which it has max_tokens

        self.arrived_at = now
        self.started_at: float | None = None  # its first step was planned
        self.first_token_at: float | None = None
        self.last_token_at = now

    @property
    def needs_host(self) -> bool:
        """Whether the host has a part in sampling for it."""
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
    def skips_prefill(self) -> bool:
        """Whether it has nothing to read but one token, which was generated. A decode step reads
        that, as it would have done where the text was generated: with the same bits."""
        return self.samples and self.tail_drawn and not self.request.prompt

    def skip_prefill(self, now: float) -> None:
        """Counts its text as read, but for the token that its first decode step reads."""
        self.started_at, self.position, self.is_read = now, self.prompt_tokens, True
        (self.last_token,) = unpack_ids(self.text)

    def go_on_from(self, tail: bytes, drawn: bool) -> None:
        """Puts the tokens `tail`, packed, in front of its prompt: the last ones of the text that it
        goes on from, which the state has not read. `drawn`: that is one, which was generated."""
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
        """How `token`, if it is sampled next, ends the sequence; None when it goes on.

        "stop" leaves the token out of the answer, "length" includes it.
        """
        if token in self.stop_ids and self.drawn >= self.min_tokens:
            return "stop"
        return "length" if self.drawn + 1 >= self.max_tokens else None

    def append(self, token: int, report: PackedLogprobs | None, now: float) -> None:
        """Appends a sampled token, and its log-probabilities if asked for, to the answer."""
        if self.first_token_at is None:
            self.first_token_at = now
        self.last_token_at = now
        self.drawn += 1
        self.last_token = token
        self.tokens.append(token)
        self.add_reports(report)

    @property
    def gathers(self) -> bool:
        """Whether log-probabilities are reported when it has ended, not with each token."""
        return self.top >= 0 and not self.request.stream

    def add_reports(self, reports: PackedLogprobs | None) -> None:
        """Adds log-probabilities of sampled tokens to the answer, where it `gathers` them."""
        if reports is not None and self.gathers:
            self.reports += reports.packed

    def extend(self, packed: bytes, now: float) -> None:
        """Appends sampled tokens, packed, to the answer: at least one, none of which ends it."""
        if self.first_token_at is None:
            self.first_token_at = now
        self.last_token_at = now
        self.tokens.frombytes(packed)
        self.drawn = len(self.tokens)
        self.last_token = self.tokens[-1]

    def take_last(self, ids: array[int], now: float) -> tuple[int, FinishReason | None]:
        """Appends sampled tokens up to the one that ends the sequence.

        Returns how many were appended, and the verdict, which is None if none of them ends it.
        """
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
        """The terminal event. `state` is the named state that it has left, `snapshot` that state
        as a file, where either was asked for."""
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
