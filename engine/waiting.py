"""WaitingQueue: requests that have no slot yet, in order of arrival.

A request whose prefix is being read by another just now, or whose grammar is being compiled, is
*held*: it keeps its place but is passed over until `resume` says that this is over.
"""

from __future__ import annotations

from collections import OrderedDict

from engine.messages import Grammar
from engine.sequence import Prefix, Sequence

Awaited = Prefix | Grammar

MOST_RETRY_SECONDS = 60.0
UNKNOWN_RETRY_SECONDS = 1.0  # before any request has left the queue
PACE_WEIGHT = 0.1  # of the latest departures in the running mean


class WaitingQueue:
    """First in, first out, but for those that are held."""

    def __init__(self) -> None:
        self._ready: OrderedDict[int, Sequence] = OrderedDict()  # by key, which is arrival order
        self._held: dict[Awaited, dict[int, Sequence]] = {}  # by what is pending
        self._held_on: dict[int, Awaited] = {}
        self.tokens = 0  # prompt tokens of all of them
        self.pace: float | None = None  # mean seconds from one departure to the next
        self._paced_at = 0.0  # the latest departure, or when the queue was last empty
        self._refused = 0  # since that departure

    def __len__(self) -> int:
        return len(self._ready) + len(self._held_on)

    def add(self, sequence: Sequence, now: float) -> None:
        """Puts a new arrival at the end."""
        if not len(self):
            self._paced_at = now
        self._ready[sequence.key] = sequence
        self.tokens += sequence.prompt_tokens

    def first(self) -> Sequence | None:
        """The first sequence that is not held."""
        return next(iter(self._ready.values()), None)

    def hold(self, sequence: Sequence, awaited: Awaited) -> None:
        """Passes a sequence over until `awaited` is resumed."""
        del self._ready[sequence.key]
        self._held.setdefault(awaited, {})[sequence.key] = sequence
        self._held_on[sequence.key] = awaited

    def resume(self, awaited: Awaited) -> None:
        """Those held on `awaited` are back where their arrival puts them."""
        held = self._held.pop(awaited, None)
        if held is None:
            return
        for key in held:
            del self._held_on[key]
        self._ready = OrderedDict(sorted((*self._ready.items(), *held.items())))

    def remove(self, sequence: Sequence) -> None:
        """Takes a sequence out, held or not."""
        self.tokens -= sequence.prompt_tokens
        awaited = self._held_on.pop(sequence.key, None)
        if awaited is None:
            del self._ready[sequence.key]
            return
        del self._held[awaited][sequence.key]
        if not self._held[awaited]:
            del self._held[awaited]

    def note_admitted(self, count: int, now: float) -> None:
        """`count` sequences left the queue for a slot just now."""
        if count == 0:
            return
        seconds = (now - self._paced_at) / count
        old = seconds if self.pace is None else self.pace
        self.pace = old + PACE_WEIGHT * (seconds - old)
        self._paced_at = now
        self._refused = 0

    def retry_after(self) -> float:
        """When, in seconds from now, a request that is refused now may find room.

        One place frees per departure, at the pace seen so far; whoever is refused in between is
        sent further back, so that not all of them return at once.
        """
        self._refused += 1
        pace = UNKNOWN_RETRY_SECONDS if self.pace is None else self.pace
        return min(self._refused * pace, MOST_RETRY_SECONDS)
