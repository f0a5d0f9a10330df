"""Sequence: one request's progress through the engine, and the rule by which it finishes.

A token that ends the text (end-of-text, or one of stop_token_ids) is not part of the answer. It is
neither delivered nor counted, so completion_tokens is the number of delivered tokens.
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
    """The scheduler's record of one request, from its arrival to its terminal event.

    All fields are in one object rather than one object per group, which would cost the host a sixth
    more time per sampled token (engine/NOTES.md, "Scheduler").
    """

    __slots__ = (  # noqa: RUF023 - by group
        # Identity.
        "key", "client", "request", "owner", "priority",
        # Limits: when it ends, and how it is sampled.
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
        """Create the record of a request that has just arrived.

        Args:
            key: the engine's own number for it, in order of arrival.
            client: receives its events.
            request: its prompt stays packed; only the chunk that is read next is ever unpacked.
            eos_token_ids: the tokens that end a text of the model.
            now: time of arrival, in seconds of the scheduler's clock, like all other times.
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
        # the device can sample for it without the host
        self.plain = is_plain(sampling, eos_token_ids)
        self.samples = sampling.max_tokens > 0  # it samples at least one token after the prompt
        self.top = top_of(sampling)  # top tokens reported with each token; -1: no log-probabilities
        self.mask_cost: MaskCost | None = None  # cost of its grammar's masks, once compiled
        self.deadline = None if request.timeout is None else now + request.timeout

        self.text = request.prompt  # the tokens that it reads, packed
        self.prompt_tokens = request.prompt_tokens  # number of tokens in `text`
        self.lead = 0  # tokens in front of the prompt that the state it continues has not read
        self.tail_drawn = False  # `lead` is one token, which was generated
        self.loads = 0  # number of times a cached state was read from a file for it
        self.marks: list[int] = []  # lengths of `text` at which a chunk must end, ascending

        self.slot = -1  # row of the state pool; negative while it waits
        # Whether its slot may be reused, because its remaining tokens are in flight.
        self.handed_over = False
        self.over = False  # whether its terminal event has been made
        self.position = 0  # tokens of `text` read, including rounds in flight
        self.is_read = False  # a committed round has read all of `text`
        self.anchor = 0  # position from which multiples of SCAN_CHUNK are counted
        self.cached_tokens = 0  # tokens of its own prompt covered by a cached state
        self.drawn = 0  # number of tokens delivered
        self.last_token = -1  # the latest delivered token, not yet read
        self.tokens = array("i")  # all delivered tokens
        self.reports = bytearray()  # their log-probabilities, if reported at the end (`gathers`)

        self.row = -1  # its row in the decode batch; -1: none
        self.since = 0  # the batch's step from which its tokens are not known yet
        self.last_step = 0  # the batch's step after which it has max_tokens

        self.arrived_at = now
        self.started_at: float | None = None  # when its first step was planned
        self.first_token_at: float | None = None
        self.last_token_at = now

    @property
    def needs_host(self) -> bool:
        """Whether the host takes part in sampling for it."""
        return self.samples and not self.plain

    @property
    def remaining(self) -> int:
        """Prompt tokens still to be read."""
        return self.prompt_tokens - self.position

    @property
    def unspent(self) -> int:
        """Tokens that it may still read and generate."""
        left = self.prompt_tokens - self.position
        return left + self.max_tokens - self.request.run_on - self.drawn

    @property
    def cacheable_tokens(self) -> int:
        """The longest part of the prompt that a cached state may cover.

        The last token must be read, because the first draw needs its logits. So must the token
        before the first scored one.
        """
        limit = self.prompt_tokens - 1
        return min(limit, self.lead + self.request.score_from - 1) if self.request.score else limit

    @property
    def cache_points(self) -> tuple[int, ...]:
        """Lengths of `text` that its request named for caching."""
        points = self.request.cache_points
        return tuple(self.lead + point for point in points) if self.lead else points

    @property
    def resumable(self) -> bool:
        """Whether it may begin with the hidden state of a cached state of its whole prompt."""
        return self.samples and not self.request.score and self.request.keep is None

    @property
    def skips_prefill(self) -> bool:
        """Whether all it has to read is one token, which was generated.

        A decode step reads that token, as it would have where the text was generated, with bitwise
        equal results.
        """
        return self.samples and self.tail_drawn and not self.request.prompt

    def skip_prefill(self, now: float) -> None:
        """Mark its text as read, except for the token that its first decode step reads."""
        self.started_at, self.position, self.is_read = now, self.prompt_tokens, True
        (self.last_token,) = unpack_ids(self.text)

    def go_on_from(self, tail: bytes, drawn: bool) -> None:
        """Put the packed tokens `tail` in front of its prompt.

        They are the last tokens of the text that it continues, which the state has not read.
        `drawn`: `tail` is a single generated token.
        """
        self.tail_drawn = drawn
        self.text, self.lead = tail + self.request.prompt, len(tail) // ID_BYTES
        self.prompt_tokens = self.lead + self.request.prompt_tokens

    def prompt_slice(self, start: int, stop: int) -> array[int]:
        """Return tokens `start` to `stop` (exclusive) of its text, unpacked."""
        return unpack_ids(self.text[start * ID_BYTES : stop * ID_BYTES])

    def targets(self, start: int, stop: int) -> array[int] | None:
        """Return the tokens to score after each token from `start` to `stop`; -1 for none.

        None if no token in this range has a successor to score.
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
        """Return the prompt length at which the next chunk must end at the latest."""
        for mark in self.marks:
            if mark > self.position:
                return mark
        return self.prompt_tokens

    def verdict(self, token: int) -> FinishReason | None:
        """Return how sampling `token` next would end the sequence; None if it goes on.

        "stop" leaves the token out of the answer, "length" includes it.
        """
        if token in self.stop_ids and self.drawn >= self.min_tokens:
            return "stop"
        return "length" if self.drawn + 1 >= self.max_tokens else None

    def append(self, token: int, report: PackedLogprobs | None, now: float) -> None:
        """Append a sampled token, and its log-probabilities if requested, to the answer."""
        if self.first_token_at is None:
            self.first_token_at = now
        self.last_token_at = now
        self.drawn += 1
        self.last_token = token
        self.tokens.append(token)
        self.add_reports(report)

    @property
    def gathers(self) -> bool:
        """Whether log-probabilities are reported at its end rather than with each token."""
        return self.top >= 0 and not self.request.stream

    def add_reports(self, reports: PackedLogprobs | None) -> None:
        """Add log-probabilities of sampled tokens, if they are reported at the end (`gathers`)."""
        if reports is not None and self.gathers:
            self.reports += reports.packed

    def extend(self, packed: bytes, now: float) -> None:
        """Append packed sampled tokens to the answer: at least one, none of which ends it."""
        if self.first_token_at is None:
            self.first_token_at = now
        self.last_token_at = now
        self.tokens.frombytes(packed)
        self.drawn = len(self.tokens)
        self.last_token = self.tokens[-1]

    def take_last(self, ids: array[int], now: float) -> tuple[int, FinishReason | None]:
        """Append sampled tokens up to the one that ends the sequence.

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
        """Make the terminal event.

        `state` is the named state that was kept and `snapshot` that state as a file, where
        requested.
        """
        started = now if self.started_at is None else self.started_at
        prefill = decode = None
        if self.first_token_at is not None:
            prefill = self.first_token_at - started
            decode = self.last_token_at - self.first_token_at
        elif self.is_read:  # it had nothing to generate, or ended at once
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
