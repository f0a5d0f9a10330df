"""AdmissionControl: how many more requests the engines can hold, all in all and of one owner.

An engine holds as many as it has slots and room in its queue, and of one owner no more than leaves
room for others (engine.protocol.queue_policy). Several engines are looked at as one. What one HTTP
request asks for is taken whole or refused whole: its places are reserved before its prompts are
tokenised, so that nobody else takes them meanwhile. With several API processes the others are seen
as of the latest message; an engine's own bound stays the last word.
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
    """For each engine `most_waiting` requests, of `most_tokens` prompt tokens, may wait beside
    those that run. There are to be so many `engines`, though some may be missing just now."""

    def __init__(
        self,
        backend: EngineBackend,
        most_waiting: int,
        most_tokens: int,
        engines: int = 1,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._backend = backend
        self._there = len(backend.clients)
        self._most, self._most_tokens = most_waiting * self._there, most_tokens * self._there
        # What is refused for good, and not until there is room, is more than all of them hold.
        self._engines = engines
        self._each, self._whole_tokens = most_waiting, most_tokens * engines
        self._clock = clock
        self._reserved: dict[str, int] = {}  # by owner: spoken for, not sent yet
        self._all_reserved = 0  # the sum of these
        self._turn = 0.0  # when the latest one that was refused may find room

    def check(self, requests: int, owner: str) -> None:
        """Raises QueueFull where so many more of an owner find no room just now, and ApiError 400
        for more than ever could."""
        slots = self._backend.slots
        taken = self._backend.in_flight + self._all_reserved
        excess = taken + requests - slots
        if excess <= 0:  # they wait for nobody's end
            return
        self._check_capacity(requests, self._engines, owner, "this server holds")
        if self._there < self._engines and requests > slots + most_of_one(self._most, owner):
            raise self._backend.missing(f"an engine without which {requests} prompts find no room")
        queued = max(taken - slots, 0)
        own = min(self._backend.queued.of(owner)[0] + self._reserved.get(owner, 0), queued)
        more = excess - queued
        kind = refusal(taken=queued, own=own, more=more, most=self._most, owner=owner)
        if kind is not None:
            missing = queued + more - self._most
            reason = f"{own} requests of this key wait already"
            if missing > 0:
                reason = (
                    f"the queue is full: {taken} of at most {slots + self._most} requests are "
                    "running or waiting"
                )
            reason = f"{reason}, and there is no room for {requests} more"
            if owner:  # a departure frees a place for all, and one of each owner's turn its own
                own_departures = 1 / max(self._backend.queued.owners, 1)
                surplus = own + more + QUEUE_PART * missing
                missing = max(missing, math.ceil(surplus / (QUEUE_PART + own_departures)))
            raise self._refusal(kind, reason, missing, requests, queued)
        self.check_tokens(1, requests, owner)

    def check_kept(self, requests: int, owner: str) -> None:
        """Raises ApiError 400 for more requests than one engine holds, which go on from states that
        it keeps."""
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
        """Raises QueueFull where requests of so many prompt tokens, which have their places, are
        too many for the queue just now, and ApiError 400 where they would be for an empty one."""
        slots, most = self._backend.slots, most_of_one(self._whole_tokens, owner)
        if requests > max(slots, 1) and tokens > most:
            whose = " of one key" if owner else ""
            raise ApiError(
                400,
                f"{tokens} prompt tokens in {requests} prompts at once (samples and continuations "
                f"count too); where there are more of them than run at once ({slots}), allowed: at "
                f"most {most} prompt tokens{whose} (max_waiting_tokens); send fewer at a time",
                code="too_many_prompt_tokens",
            )
        taken, own = self._backend.waiting_tokens, self._backend.queued.of(owner)[1]
        waiting = self._backend.in_flight + self._all_reserved - slots
        if waiting <= 0 or not tokens:
            return
        if requests == 1 and not taken:  # the first that waits may have any length
            return
        kind = refusal(taken=taken, own=own, more=tokens, most=self._most_tokens, owner=owner)
        if kind is None:
            return
        missing = taken + tokens - self._most_tokens
        reason = f"{taken} prompt tokens wait already"
        if missing <= 0:
            reason = f"{own} prompt tokens of this key wait already"
        if owner:
            missing = max(missing, (own + tokens + QUEUE_PART * missing) // (QUEUE_PART + 1))
        reason = f"{reason}, and there is no room for {tokens} more"
        departures = math.ceil(missing * waiting / max(taken, 1))  # of requests of their mean size
        raise self._refusal(kind, reason, departures, requests, waiting)

    def reserve(self, requests: int, owner: str) -> None:
        """Takes places out of what others may have. Raises as `check`."""
        self.check(requests, owner)
        self.retake(requests, owner)

    def retake(self, requests: int, owner: str) -> None:
        """Takes places whatever others have: who asks has had them just now."""
        self._reserved[owner] = self._reserved.get(owner, 0) + requests
        self._all_reserved += requests

    def release(self, requests: int, owner: str) -> None:
        """Gives reserved places back: the requests have been sent, or never will be."""
        left = self._reserved.pop(owner, 0) - requests
        if left:
            self._reserved[owner] = left
        self._all_reserved -= requests

    def _refusal(
        self, kind: type[QueueFull], reason: str, missing: int, requests: int, queued: int
    ) -> QueueFull:
        """`missing` requests have to leave the queue first, at the pace seen lately. Those that are
        refused are given turns one after the other, so that not all come back at once; but when
        all that waits now has left, there is room for everyone."""
        now, pace = self._clock(), self._backend.pace
        free = now + max(missing, 1) * pace
        emptied = now + max(missing, queued) * pace
        self._turn = min(max(free, self._turn + requests * pace), emptied)
        seconds = min(max(self._turn - now, LEAST_RETRY), MOST_RETRY)
        return kind(f"{reason}; try again in {math.ceil(seconds)} s", retry_after=seconds)
