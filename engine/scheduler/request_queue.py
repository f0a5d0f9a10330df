"""RequestQueue: requests that have no slot yet, and the order in which they get one.

- Priorities: the most urgent waiting level comes first (a lower number is more urgent). So that
  others do not starve, one of OTHERS_TURN departures goes to another level: the one whose latest
  departure is the longest ago.
- Within a level, owners are served fairly by start-time fair queueing: the owner that was given the
  fewest tokens, to read and to generate, is next. A departure is charged with its prompt and all
  that it may generate; what it does not use is refunded when it ends. An owner that returns after a
  pause, or that had only held requests, starts at the others' level: idle time earns no credit.
- An owner's requests keep their order of arrival.

A request is *held* while another one is reading its prefix, while its state comes from a file or a
shared store, or while its grammar is being compiled. It keeps its place but is passed over until
`resume` is called.
"""

from __future__ import annotations

import heapq
import math
import sys
from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

from engine.errors import QueueFull, ShareFull
from engine.lazy_heap import LazyHeap
from engine.protocol import queue_policy
from engine.protocol.queue_policy import QueueCounts
from engine.sequence import Sequence

OTHERS_TURN = 8  # one of this many departures goes to a less urgent level
MOST_RETRY_SECONDS = 60.0
UNKNOWN_RETRY_SECONDS = 1.0  # used before any request has left the queue
MEMORY_SECONDS = 30.0  # after this time a departure's weight has decayed to 1/e
MOST_PACE_SECONDS = 3600.0  # upper bound of the reported mean
FEW_LEFT = 64  # stale numbers that a FifoByKey always tolerates

T = TypeVar("T")


class DepartureRate:
    """The recent mean time between departures from the queue while requests wait.

    Departures come in bursts, since a batch ends at once. Time and departures are therefore summed
    separately; both sums decay with the time constant MEMORY_SECONDS.
    """

    def __init__(self) -> None:
        self._seconds = 0.0
        self._departures = 0.0
        self._noted_at = 0.0  # time of the latest departure, or when the queue was last empty

    def restart(self, now: float) -> None:
        """Ignore the time until now, during which the queue was empty."""
        self._noted_at = now

    def note(self, departures: int, now: float) -> None:
        """Record that this many requests left the queue just now."""
        if departures == 0:
            return
        self._seconds, self._departures = self._faded(now)
        self._departures += departures
        self._noted_at = now

    @property
    def known(self) -> bool:
        """Whether there has been a departure."""
        return self._departures > 0

    def at_rest(self) -> float:
        """Return seconds per departure as of the latest one; 0 if there was none."""
        return self._seconds / self._departures if self.known else 0.0

    def at(self, now: float) -> float:
        """Return seconds per departure, counting the time since the latest one.

        Before the first departure: the time spent waiting for it.
        """
        seconds, departures = self._faded(now)
        if not self.known:
            return min(seconds, MOST_PACE_SECONDS)
        return min(seconds / max(departures, 1e-9), MOST_PACE_SECONDS)

    def _faded(self, now: float) -> tuple[float, float]:
        passed = max(now - self._noted_at, 0.0)
        fade = math.exp(-passed / MEMORY_SECONDS)
        return self._seconds * fade + passed, self._departures * fade


class FifoByKey(Generic[T]):
    """Items by number, the least first; numbers rise with the items' first arrival.

    Items may leave and come back in any order. Arriving and leaving take O(1), coming back O(log
    n).
    """

    def __init__(self) -> None:
        self._items: OrderedDict[int, T] = OrderedDict()  # items that were never away
        self._latest = -1  # the largest number ever in `_items`
        self._back: dict[int, T] = {}  # items that have come back
        self._numbers: list[int] = []  # heap of the numbers of `_back`, and of some that have left

    def __len__(self) -> int:
        return len(self._items) + len(self._back)

    def add(self, number: int, item: T) -> None:
        """Add an item whose number is not present."""
        if number > self._latest:
            self._items[number] = item
            self._latest = number
        else:
            self._back[number] = item
            heapq.heappush(self._numbers, number)

    def discard(self, number: int) -> None:
        """Remove an item if it is present."""
        if self._items.pop(number, None) is None and self._back.pop(number, None) is not None:
            if len(self._numbers) > 2 * len(self._back) + FEW_LEFT:
                self._numbers = sorted(self._back)  # a sorted list is a heap
            while self._numbers and self._numbers[0] not in self._back:
                heapq.heappop(self._numbers)

    def first(self) -> T | None:
        """Return the item with the least number; None if there is none."""
        if self._back:
            number = self._numbers[0]
            if not self._items or number < next(iter(self._items)):
                return self._back[number]
        return next(iter(self._items.values()), None)


class _OwnerQueue:
    """One owner's waiting requests at one priority level."""

    __slots__ = ("ready", "start", "waiting")

    def __init__(self) -> None:
        self.ready: FifoByKey[Sequence] = FifoByKey()  # without those that are held
        self.waiting = 0  # number of requests, including held ones
        self.start = 0  # virtual time: tokens that the owner was given, as the level counts them


class _PriorityLevel:
    """The owners' queues of one priority.

    Owners are ranked only when `first` is called, not at every change; a single owner is never
    ranked.
    """

    __slots__ = (
        "changed", "clock", "idle", "owing", "queues", "ranking", "ready", "running", "served_at",
        "waiting",
    )  # fmt: skip

    def __init__(self, served_at: int) -> None:
        # By owner: those with waiting requests, or ahead of the clock.
        self.queues: dict[str, _OwnerQueue] = {}
        # owners with ready requests, by start, then by arrival
        self.ranking: LazyHeap[str] = LazyHeap()
        self.changed: set[str] = set()  # owners whose queues changed since they were ranked
        self.owing: LazyHeap[str] = LazyHeap()  # owners without waiting requests, by start
        self.idle = 0  # number of owners in `owing`
        self.clock = 0  # start of the latest departure
        self.ready = self.waiting = self.running = 0  # number of sequences; `ready`: not held
        self.served_at = served_at  # value of the queue's departure count at this level's latest

    def queue_of(self, owner: str) -> _OwnerQueue:
        """Return the owner's queue, to which a request is about to be added."""
        queue = self.queues.get(owner)
        if queue is None:
            queue = self.queues[owner] = _OwnerQueue()
        elif not queue.waiting:
            self.owing.discard(owner)
            self.idle -= 1
        return queue

    def make_ready(self, sequence: Sequence, queue: _OwnerQueue) -> None:
        """Let a sequence be a candidate of its owner, whose queue is `queue`."""
        if not queue.ready:  # held requests could not have left, so they earn no credit
            queue.start = max(queue.start, self.clock)
        queue.ready.add(sequence.key, sequence)
        self.ready += 1
        self.changed.add(sequence.owner)

    def make_unready(self, sequence: Sequence, queue: _OwnerQueue) -> None:
        """Remove a sequence from the candidates, because it is held or no longer waits."""
        queue.ready.discard(sequence.key)
        self.ready -= 1
        self.changed.add(sequence.owner)

    def leave(self, owner: str, queue: _OwnerQueue) -> None:
        """Record that one of the owner's requests no longer waits."""
        self.waiting -= 1
        queue.waiting -= 1
        if not queue.waiting:
            self.owing.put(owner, (queue.start, owner))
            self.idle += 1
        if self.idle:
            self.forget()

    def first(self) -> Sequence | None:
        """Return the next sequence to leave; None if none is ready."""
        if len(self.queues) == 1:
            return next(iter(self.queues.values())).ready.first()
        for owner in self.changed:
            first = self.queues[owner].ready.first()
            if first is None:
                self.ranking.discard(owner)
            else:
                self.ranking.put(owner, (self.queues[owner].start, first.key))
        self.changed.clear()
        chosen = self.ranking.first()
        return None if chosen is None else self.queues[chosen].ready.first()

    def forget(self) -> None:
        """Drop the queues of owners without waiting requests that are not ahead of the clock."""
        while (owner := self.owing.first()) is not None:
            if self.queues[owner].start > self.clock:
                return
            self.owing.discard(owner)
            self.idle -= 1
            self.ranking.discard(owner)
            self.changed.discard(owner)
            del self.queues[owner]


class RequestQueue:
    """The bounded queue of waiting requests, and the choice of the next one.

    At most `most` requests with `most_tokens` prompt tokens may wait; check `refusal` before
    `enqueue`. A sequence is enqueued, may be held and resumed, and is dequeued or removed. Call
    `refund` when a dequeued one has ended. Times are seconds of any one monotonic clock.
    """

    def __init__(self, most: int = sys.maxsize, most_tokens: int = sys.maxsize) -> None:
        self._most = most
        self._most_tokens = most_tokens
        self._levels: dict[int, _PriorityLevel] = {}  # by priority
        # held sequences by key, by what they wait for
        self._held: dict[Hashable, dict[int, Sequence]] = {}
        self._held_on: dict[int, Hashable] = {}  # what each held sequence waits for, by key
        self._queued = QueueCounts()  # counts of all waiting requests
        self._departures = 0
        self._since_others = 0  # departures of the most urgent level in a row while others waited
        self._pace = DepartureRate()
        self._refused = 0  # refusals since the latest departure
        self._lasting = 0  # waiting requests whose answers may have several tokens

    def __len__(self) -> int:
        return self._queued.requests

    @property
    def ready(self) -> int:
        """Requests that wait for nothing but a slot: they are not held."""
        return self._queued.requests - len(self._held_on)

    @property
    def lasting(self) -> int:
        """A lower bound of the `ready` requests that will decode beyond their first token."""
        return max(0, self._lasting - len(self._held_on))

    @property
    def tokens(self) -> int:
        """Prompt tokens of all waiting requests."""
        return self._queued.tokens

    def of(self, owner: str) -> tuple[int, int]:
        """Return (waiting requests, their prompt tokens) of an owner."""
        return self._queued.of(owner)

    def refusal(self, owner: str, prompt_tokens: int, free: int, now: float) -> QueueFull | None:
        """Return the error with which an owner's next request must be refused, or None.

        Args:
            owner: the request's owner; "" for none.
            prompt_tokens: length of its prompt.
            free: free slots; that many waiting requests count as running.
            now: seconds; the error's `retry_after` is relative to it.
        """
        taken = self._queued.requests - free
        if taken < 0:
            return None
        own, own_tokens = self.of(owner)
        own = min(own, taken)
        kind = queue_policy.refusal(taken=taken, own=own, more=1, most=self._most, owner=owner)
        if kind is not None:
            reason = _is_waiting("requests", len(self), own, kind)
            return self._refuse(kind, reason, now)
        tokens, most = self.tokens, self._most_tokens
        if not tokens:  # the first waiting request may have any length
            return None
        kind = queue_policy.refusal(
            taken=tokens, own=own_tokens, more=prompt_tokens, most=most, owner=owner
        )
        if kind is None:
            return None
        return self._refuse(kind, _is_waiting("prompt tokens", tokens, own_tokens, kind), now)

    def enqueue(self, sequence: Sequence, now: float) -> None:
        """Add a sequence to its owner's queue; its key is its order of arrival."""
        if not self._queued.requests:
            self._pace.restart(now)
        level = self._levels.get(sequence.priority)
        if level is None:
            level = self._levels[sequence.priority] = _PriorityLevel(self._departures)
        queue = level.queue_of(sequence.owner)
        queue.waiting += 1
        level.waiting += 1
        self._lasting += sequence.max_tokens > 1
        level.make_ready(sequence, queue)
        self._queued.add(sequence.owner, sequence.prompt_tokens)

    def first(self) -> Sequence | None:
        """Return the next sequence to be dequeued; None if none waits or all are held."""
        level = self._next_level()
        return None if level is None else level.first()

    def hold(self, sequence: Sequence, awaited: Hashable) -> None:
        """Pass over a waiting sequence until `resume` is called.

        `awaited` is what it waits for: a prefix being read, a state from a file, or a grammar.
        """
        level = self._levels[sequence.priority]
        level.make_unready(sequence, level.queues[sequence.owner])
        self._held.setdefault(awaited, {})[sequence.key] = sequence
        self._held_on[sequence.key] = awaited

    def resume(self, awaited: Hashable) -> None:
        """Put the sequences held on `awaited`, if any, back in their order of arrival."""
        held = self._held.pop(awaited, None)
        if held is None:
            return
        for sequence in held.values():
            del self._held_on[sequence.key]
            level = self._levels[sequence.priority]
            level.make_ready(sequence, level.queues[sequence.owner])

    def dequeue(self, sequence: Sequence, tokens: int) -> None:
        """Remove the sequence that `first` returned, because it gets a slot.

        Its owner is charged `tokens`: what it has to read and may generate.
        """
        if len(self._levels) > 1:
            self._count_turn(sequence.priority)
        else:
            self._since_others = 0
        level = self._levels[sequence.priority]
        queue = level.queues[sequence.owner]
        self._departures += 1
        level.served_at = self._departures
        level.clock = max(level.clock, queue.start)
        level.running += 1
        queue.start += tokens
        level.make_unready(sequence, queue)
        self._forget(sequence, level, queue)

    def refund(self, sequence: Sequence, tokens: int) -> None:
        """Return to the owner the `tokens` that an ended sequence was charged but did not use."""
        level = self._levels[sequence.priority]
        level.running -= 1
        # a refund of 0 changes nothing
        queue = level.queues.get(sequence.owner) if tokens else None
        if queue is not None:
            # Not below the clock, which has advanced by the charge for other owners too.
            queue.start = max(queue.start - tokens, min(queue.start, level.clock))
            level.changed.add(sequence.owner)
            if not queue.waiting:
                level.owing.put(sequence.owner, (queue.start, sequence.owner))
                level.forget()
        self._tidy(level, sequence.priority)

    def remove(self, sequence: Sequence) -> None:
        """Remove a waiting sequence, held or not, that gets no slot."""
        level = self._levels[sequence.priority]
        queue = level.queues[sequence.owner]
        awaited = self._held_on.pop(sequence.key, None)
        if awaited is None:
            level.make_unready(sequence, queue)
        else:
            del self._held[awaited][sequence.key]
            if not self._held[awaited]:
                del self._held[awaited]
        self._forget(sequence, level, queue)

    def _forget(self, sequence: Sequence, level: _PriorityLevel, queue: _OwnerQueue) -> None:
        """Remove a sequence that is neither ready nor held from all counts."""
        self._lasting -= sequence.max_tokens > 1
        self._queued.remove(sequence.owner, sequence.prompt_tokens)
        level.leave(sequence.owner, queue)
        self._tidy(level, sequence.priority)

    def pace(self, now: float) -> float:
        """Return the mean seconds between two departures; 0: unknown."""
        return self._pace.at(now) if len(self) else self._pace.at_rest()

    def note_admitted(self, count: int, now: float) -> None:
        """Record that `count` sequences just left the queue for a slot."""
        self._pace.note(count, now)
        if count:
            self._refused = 0

    def _refuse(self, kind: type[QueueFull], reason: str, now: float) -> QueueFull:
        """Make the error for a refusal, with an estimate of when to retry.

        One place becomes free per departure, at the recent pace. Each further refusal gets a later
        time, so that clients do not all return at once.
        """
        self._refused += 1
        pace = self.pace(now)
        if not self._pace.known:
            pace = max(pace, UNKNOWN_RETRY_SECONDS)
        seconds = min(self._refused * pace, MOST_RETRY_SECONDS)
        message = f"{reason}; try again in {max(1, math.ceil(seconds))} s"
        return kind(message, retry_after=seconds)

    def _next_level(self) -> _PriorityLevel | None:
        if len(self._levels) == 1:
            return next(iter(self._levels.values()))
        ready = self._ready_levels()
        if not ready:
            return None
        urgent = min(ready)
        if len(ready) == 1 or self._since_others < OTHERS_TURN - 1:
            return self._levels[urgent]
        others = [self._levels[priority] for priority in ready if priority != urgent]
        return min(others, key=lambda level: level.served_at)

    def _count_turn(self, priority: int) -> None:
        """Count how many times in a row others were passed over for the most urgent level."""
        ready = self._ready_levels()
        others_wait = len(ready) > 1 and priority == min(ready)
        self._since_others = self._since_others + 1 if others_wait else 0

    def _ready_levels(self) -> list[int]:
        return [priority for priority, level in self._levels.items() if level.ready]

    def _tidy(self, level: _PriorityLevel, priority: int) -> None:
        if not level.waiting and not level.running:
            del self._levels[priority]


def _is_waiting(what: str, all: int, own: int, kind: type[QueueFull]) -> str:
    """Describe what is full: the whole queue or, if `kind` is ShareFull, this owner's share."""
    if kind is ShareFull:
        return f"{own} {what} of this key are waiting already"
    return f"{all} {what} are waiting already"
