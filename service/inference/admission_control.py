"""AdmissionControl: decides whether the engines have room for more requests.

An engine holds as many requests as it has slots and places in its queue. One owner (API key name)
gets only a part of the queue, so that others find room (engine.protocol.queue_policy). Several
engines count as one.

An HTTP request is admitted or refused as a whole: its places are reserved before its prompts are
tokenised, so that nobody else takes them meanwhile. Requests of other API processes are known as of
the engine's latest message, so an engine may still refuse what was admitted here.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from engine.client.interface import EngineBackend
from engine.errors import QueueFull
from engine.protocol.queue_policy import QUEUE_PART, most_of_one, refusal
from service.http.errors import ApiError

LEAST_RETRY, MOST_RETRY = 1.0, 60.0  # seconds


class AdmissionControl:
    """Admits requests to the engines of one backend, up to the limits of slots and queue."""

    def __init__(
        self,
        backend: EngineBackend,
        most_waiting: int,
        most_tokens: int,
        engines: int = 1,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Set the limits.

        Args:
            backend: The engines that serve.
            most_waiting: Requests that may wait for each engine, beside those that run.
            most_tokens: Prompt tokens of the requests that may wait for each engine.
            engines: Engines that are meant to serve; some may be missing at the moment.
            clock: The time in seconds.
        """
        self._backend = backend
        self._there = len(backend.clients)
        self._most, self._most_tokens = most_waiting * self._there, most_tokens * self._there
        # A request is refused with 400 only if it is too large for all engines, missing ones too.
        self._engines = engines
        self._each, self._whole_tokens = most_waiting, most_tokens * engines
        self._clock = clock
        self._reserved: dict[str, int] = {}  # by owner: admitted requests that are not sent yet
        self._all_reserved = 0  # the sum over owners
        self._turn = 0.0  # when the latest refused request may find room

    def check(self, requests: int, owner: str) -> None:
        """Check that `requests` more engine requests of an owner find room.

        Raises QueueFull if there is no room at the moment, and ApiError 400 for more than the
        engines can ever hold.
        """
        slots = self._backend.slots
        taken = self._backend.in_flight + self._all_reserved
        excess = taken + requests - slots
        if excess <= 0:  # there are free slots for all of them
            return
        self._check_capacity(requests, self._engines, owner, "this server holds")
        if self._there < self._engines and requests > slots + most_of_one(self._most, owner):
            raise self._backend.missing(f"an engine with room for all {requests} prompts")
        queued = max(taken - slots, 0)
        own = min(self._backend.queued.of(owner)[0] + self._reserved.get(owner, 0), queued)
        more = excess - queued
        kind = refusal(taken=queued, own=own, more=more, most=self._most, owner=owner)
        if kind is not None:
            missing = queued + more - self._most
            reason = f"{own} requests of this key are waiting already"
            if missing > 0:
                reason = (
                    f"the queue is full: {taken} of at most {slots + self._most} requests are "
                    "running or waiting"
                )
            reason = f"{reason}, and there is no room for {requests} more"
            # Each request that leaves frees a place in the whole queue. One of the owner's own
            # leaves once in a round over all owners.
            if owner:
                own_departures = 1 / max(self._backend.queued.owners, 1)
                surplus = own + more + QUEUE_PART * missing
                missing = max(missing, math.ceil(surplus / (QUEUE_PART + own_departures)))
            raise self._refusal(kind, reason, missing, requests, queued)
        self.check_tokens(1, requests, owner)

    def check_kept(self, requests: int, owner: str) -> None:
        """Check that one engine can hold `requests` requests that resume states it keeps.

        Raises ApiError 400 if it can never hold so many.
        """
        self._check_capacity(requests, 1, owner, "the engine that keeps their state holds")

    def _check_capacity(self, requests: int, engines: int, owner: str, who: str) -> None:
        slots = engines * self._backend.slots // self._there
        capacity = slots + most_of_one(engines * self._each, owner)
        if requests > capacity:
            whose = " of one key" if owner else ""
            raise ApiError(
                400,
                f"{requests} prompts at once (samples count too), but {who} "
                f"at most {capacity}{whose}; send fewer at a time",
                code="too_many_prompts",
            )

    def check_tokens(self, tokens: int, requests: int, owner: str) -> None:
        """Check that the queue has room for `tokens` prompt tokens in `requests` admitted requests.

        Raises QueueFull if there is no room at the moment, and ApiError 400 if an empty queue would
        have none.
        """
        slots, most = self._backend.slots, most_of_one(self._whole_tokens, owner)
        if requests > max(slots, 1) and tokens > most:
            whose = " of one key" if owner else ""
            raise ApiError(
                400,
                f"{tokens} prompt tokens in {requests} prompts at once (samples and continuations "
                f"count too); allowed in requests of more than {slots} prompts: at most {most} "
                f"prompt tokens{whose} (max_waiting_tokens); send fewer at a time",
                code="too_many_prompt_tokens",
            )
        taken, own = self._backend.waiting_tokens, self._backend.queued.of(owner)[1]
        waiting = self._backend.in_flight + self._all_reserved - slots
        if waiting <= 0 or not tokens:
            return
        if requests == 1 and not taken:  # the first waiting request may have any length
            return
        kind = refusal(taken=taken, own=own, more=tokens, most=self._most_tokens, owner=owner)
        if kind is None:
            return
        missing = taken + tokens - self._most_tokens
        reason = f"{taken} prompt tokens are waiting already"
        if missing <= 0:
            reason = f"{own} prompt tokens of this key are waiting already"
        if owner:
            missing = max(missing, (own + tokens + QUEUE_PART * missing) // (QUEUE_PART + 1))
        reason = f"{reason}, and there is no room for {tokens} more"
        departures = math.ceil(missing * waiting / max(taken, 1))  # requests of the mean size
        raise self._refusal(kind, reason, departures, requests, waiting)

    def reserve(self, requests: int, owner: str) -> None:
        """Admit `requests` engine requests of an owner and reserve their places.

        Raises what `check` raises.
        """
        self.check(requests, owner)
        self.retake(requests, owner)

    def retake(self, requests: int, owner: str) -> None:
        """Reserve places without a check, for a caller that gave them up just now."""
        self._reserved[owner] = self._reserved.get(owner, 0) + requests
        self._all_reserved += requests

    def release(self, requests: int, owner: str) -> None:
        """Give reserved places back, after the requests were sent or given up."""
        left = self._reserved.pop(owner, 0) - requests
        if left:
            self._reserved[owner] = left
        self._all_reserved -= requests

    def _refusal(
        self, kind: type[QueueFull], reason: str, missing: int, requests: int, queued: int
    ) -> QueueFull:
        """Return the error of a refusal, with the time after which to try again.

        `missing` requests have to leave the queue first, at the recent pace. Refused requests get
        different times one after another, so that they do not all come back at once, but none later
        than when all requests that wait now have left.
        """
        now, pace = self._clock(), self._backend.pace
        free = now + max(missing, 1) * pace
        emptied = now + max(missing, queued) * pace
        self._turn = min(max(free, self._turn + requests * pace), emptied)
        seconds = min(max(self._turn - now, LEAST_RETRY), MOST_RETRY)
        return kind(f"{reason}; try again in {math.ceil(seconds)} s", retry_after=seconds)
