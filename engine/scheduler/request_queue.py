"""RequestQueue: requests that have no slot yet, and which of them is next.

- Priorities: the most urgent level that waits comes first (a lower number is more urgent). So that
  the others do not starve, one of OTHERS_TURN departures is theirs while they wait; it goes to the
  level whose latest departure is the longest ago.
- Within a level, owners are served fairly (start-time fair queueing): whoever has been given least
  is next, in tokens to read and to generate. A departure is charged with its prompt and all that it
  may generate; what it leaves of that is given back when it ends. Who comes after a pause, or after
  nothing but held requests, starts where the others are: that time saves nothing up.
- An owner's requests keep the order of their arrival.

A request whose prefix is being read by another just now, whose state comes from a file, or whose
grammar is being compiled, is *held*: it keeps its place but is passed over until `resume` says that
this is over.
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

OTHERS_TURN = 8
MOST_RETRY_SECONDS = 60.0
UNKNOWN_RETRY_SECONDS = 1.0  # before any request has left the queue
MEMORY_SECONDS = 30.0  # after so long a departure counts for a third
MOST_PACE_SECONDS = 3600.0  # that the mean is said to be
FEW_LEFT = 64  # numbers of some that have left a FifoByKey may stay

T = TypeVar("T")


class DepartureRate:
    """The mean time between departures from the queue while somebody waits, as seen lately.

    Departures come in bursts (a batch ends as one), so time and departures are summed apart; both
    sums decay with the time constant MEMORY_SECONDS.
    """

    def __init__(self) -> None:
        self._seconds = 0.0
        self._departures = 0.0
        self._noted_at = 0.0  # the latest departure, or when the queue was last empty

    def restart(self, now: float) -> None:
        """The queue was empty until now; that time tells nothing."""
        self._noted_at = now

    def note(self, departures: int, now: float) -> None:
        """So many requests left the queue just now."""
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
        """Seconds per departure as of the latest one; 0 when there has been none."""
        return self._seconds / self._departures if self.known else 0.0

    def at(self, now: float) -> float:
        """Seconds per departure, the time since the latest one included. Before the first one, how
        long it has been waited for."""
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

    Items may leave, and come back, in any order. To arrive and to leave is O(1), to come back
    O(log n).
    """

    def __init__(self) -> None:
        self._items: OrderedDict[int, T] = OrderedDict()  # those that have not been away
        self._latest = -1  # of all that ever were among them
        self._back: dict[int, T] = {}  # the others
        self._numbers: list[int] = []  # theirs, as a heap; and of some that have left

    def __len__(self) -> int:
        return len(self._items) + len(self._back)

    def add(self, number: int, item: T) -> None:
        """Adds an item whose number is not in."""
        if number > self._latest:
            self._items[number] = item
            self._latest = number
        else:
            self._back[number] = item
            heapq.heappush(self._numbers, number)

    def discard(self, number: int) -> None:
        """Removes an item, if it is in."""
        if self._items.pop(number, None) is None and self._back.pop(number, None) is not None:
            if len(self._numbers) > 2 * len(self._back) + FEW_LEFT:
                self._numbers = sorted(self._back)  # which is a heap
            while self._numbers and self._numbers[0] not in self._back:
                heapq.heappop(self._numbers)

    def first(self) -> T | None:
        """The item of the least number; None when there is none."""
        if self._back:
            number = self._numbers[0]
            if not self._items or number < next(iter(self._items)):
                return self._back[number]
        return next(iter(self._items.values()), None)


class _OwnerQueue:
    """What waits of one owner at one level."""

    __slots__ = ("ready", "start", "waiting")

    def __init__(self) -> None:
        self.ready: FifoByKey[Sequence] = FifoByKey()  # without those that are held
        self.waiting = 0  # with them
        self.start = 0  # tokens that the owner has been given, as the level counts them


class _PriorityLevel:
    """The owners' queues of one priority.

    Owners are ranked when somebody asks who is first, not whenever something changes: while there
    is one alone, never.
    """

    __slots__ = (
        "changed", "clock", "idle", "owing", "queues", "ranking", "ready", "running", "served_at",
        "waiting",
    )  # fmt: skip

    def __init__(self, served_at: int) -> None:
        # By owner: those of whom something waits, or who are ahead of the clock.
        self.queues: dict[str, _OwnerQueue] = {}
        self.ranking: LazyHeap[str] = LazyHeap()  # owners who are ready, by start, then by arrival
        self.changed: set[str] = set()  # owners whose queues have, since they were ranked
        self.owing: LazyHeap[str] = LazyHeap()  # owners of whom nothing waits, by start
        self.idle = 0  # how many these are
        self.clock = 0  # the start of the latest departure
        self.ready = self.waiting = self.running = 0  # sequences; `ready`: not held
        self.served_at = served_at  # departures of the queue at this level's latest

    def queue_of(self, owner: str) -> _OwnerQueue:
        """The owner's queue, in which one more is going to wait."""
        queue = self.queues.get(owner)
        if queue is None:
            queue = self.queues[owner] = _OwnerQueue()
        elif not queue.waiting:
            self.owing.discard(owner)
            self.idle -= 1
        return queue

    def make_ready(self, sequence: Sequence, queue: _OwnerQueue) -> None:
        """It may be the next one of its owner, whose queue this is."""
        if not queue.ready:  # nothing that was held could have left: that saves nothing up
            queue.start = max(queue.start, self.clock)
        queue.ready.add(sequence.key, sequence)
        self.ready += 1
        self.changed.add(sequence.owner)

    def make_unready(self, sequence: Sequence, queue: _OwnerQueue) -> None:
        """It is held from now on, or does not wait any more."""
        queue.ready.discard(sequence.key)
        self.ready -= 1
        self.changed.add(sequence.owner)

    def leave(self, owner: str, queue: _OwnerQueue) -> None:
        """One of the owner's does not wait any more."""
        self.waiting -= 1
        queue.waiting -= 1
        if not queue.waiting:
            self.owing.put(owner, (queue.start, owner))
            self.idle += 1
        if self.idle:
            self.forget()

    def first(self) -> Sequence | None:
        """The next one to leave; None when none is ready."""
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
        """Drops the queues of owners of whom nothing waits and who are not ahead of the clock."""
        while (owner := self.owing.first()) is not None:
            if self.queues[owner].start > self.clock:
                return
            self.owing.discard(owner)
            self.idle -= 1
            self.ranking.discard(owner)
            self.changed.discard(owner)
            del self.queues[owner]


class RequestQueue:
    """Who waits, and who is next.

    `most` requests may wait, of `most_tokens` prompt tokens; `refusal` says so before `enqueue`. A
    sequence is enqueued, may be held and resumed, and is dequeued or removed. When one that was
    dequeued has ended, `refund` is called. Times are seconds of any one monotonic clock.
    """

    def __init__(self, most: int = sys.maxsize, most_tokens: int = sys.maxsize) -> None:
        self._most = most
        self._most_tokens = most_tokens
        self._levels: dict[int, _PriorityLevel] = {}  # by priority
        self._held: dict[Hashable, dict[int, Sequence]] = {}  # by what is pending
        self._held_on: dict[int, Hashable] = {}
        self._queued = QueueCounts()  # all of them
        self._departures = 0
        self._since_others = 0  # departures of the most urgent level while others waited
        self._pace = DepartureRate()
        self._refused = 0  # since the latest departure
        self._lasting = 0  # of those that wait, whose answers may have several tokens

    def __len__(self) -> int:
        return self._queued.requests

    @property
    def ready(self) -> int:
        """How many requests wait for nothing but a slot: they are not held."""
        return self._queued.requests - len(self._held_on)

    @property
    def lasting(self) -> int:
        """At least so many of the `ready` ones will decode, beyond their first tokens."""
        return max(0, self._lasting - len(self._held_on))

    @property
    def tokens(self) -> int:
        """Prompt tokens of all requests that wait."""
        return self._queued.tokens

    def of(self, owner: str) -> tuple[int, int]:
        """How many requests of an owner wait, and their prompt tokens."""
        return self._queued.of(owner)

    def refusal(self, owner: str, prompt_tokens: int, free: int, now: float) -> QueueFull | None:
        """Why an owner's next request may not be enqueued, or None.

        Args:
            owner: whose request it is; "" for nobody's.
            prompt_tokens: of the request.
            free: slots that are free. So many of the waiting requests count as running.
            now: seconds; the error's `retry_after` is reckoned from it.
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
        if not tokens:  # the first that waits may have any length
            return None
        kind = queue_policy.refusal(
            taken=tokens, own=own_tokens, more=prompt_tokens, most=most, owner=owner
        )
        if kind is None:
            return None
        return self._refuse(kind, _is_waiting("prompt tokens", tokens, own_tokens, kind), now)

    def enqueue(self, sequence: Sequence, now: float) -> None:
        """Puts a sequence where its key, its order of arrival, puts it in its owner's queue."""
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
        """The next sequence to be dequeued; None when none waits, or all are held."""
        level = self._next_level()
        return None if level is None else level.first()

    def hold(self, sequence: Sequence, awaited: Hashable) -> None:
        """Passes a sequence, which waits and is not held, over until `resume` is called.

        `awaited` is what it waits for: a prefix that is being read, a state that comes from a file,
        or a grammar.
        """
        level = self._levels[sequence.priority]
        level.make_unready(sequence, level.queues[sequence.owner])
        self._held.setdefault(awaited, {})[sequence.key] = sequence
        self._held_on[sequence.key] = awaited

    def resume(self, awaited: Hashable) -> None:
        """Puts the sequences held on `awaited` back where their arrival puts them; there may be
        none."""
        held = self._held.pop(awaited, None)
        if held is None:
            return
        for sequence in held.values():
            del self._held_on[sequence.key]
            level = self._levels[sequence.priority]
            level.make_ready(sequence, level.queues[sequence.owner])

    def dequeue(self, sequence: Sequence, tokens: int) -> None:
        """Takes out the sequence that `first` gave, for a slot.

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
        """A sequence that was dequeued has ended, and used so many `tokens` less than charged."""
        level = self._levels[sequence.priority]
        level.running -= 1
        queue = level.queues.get(sequence.owner) if tokens else None  # without any, nothing moves
        if queue is not None:
            # No further than the clock: that moved on by what was charged, for others too.
            queue.start = max(queue.start - tokens, min(queue.start, level.clock))
            level.changed.add(sequence.owner)
            if not queue.waiting:
                level.owing.put(sequence.owner, (queue.start, sequence.owner))
                level.forget()
        self._tidy(level, sequence.priority)

    def remove(self, sequence: Sequence) -> None:
        """Takes out a sequence that waits, held or not, and gets no slot."""
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
        """It is neither ready nor held."""
        self._lasting -= sequence.max_tokens > 1
        self._queued.remove(sequence.owner, sequence.prompt_tokens)
        level.leave(sequence.owner, queue)
        self._tidy(level, sequence.priority)

    def pace(self, now: float) -> float:
        """Mean seconds from one departure to the next; 0: unknown."""
        return self._pace.at(now) if len(self) else self._pace.at_rest()

    def note_admitted(self, count: int, now: float) -> None:
        """`count` sequences left the queue for a slot just now."""
        self._pace.note(count, now)
        if count:
            self._refused = 0

    def _refuse(self, kind: type[QueueFull], reason: str, now: float) -> QueueFull:
        """One place frees per departure, at the pace seen so far; whoever is refused in between is
        sent further back, so that not all of them return at once."""
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
        """Counts how often in a row others stood back behind the most urgent level."""
        ready = self._ready_levels()
        others_wait = len(ready) > 1 and priority == min(ready)
        self._since_others = self._since_others + 1 if others_wait else 0

    def _ready_levels(self) -> list[int]:
        return [priority for priority, level in self._levels.items() if level.ready]

    def _tidy(self, level: _PriorityLevel, priority: int) -> None:
        if not level.waiting and not level.running:
            del self._levels[priority]


def _is_waiting(what: str, all: int, own: int, kind: type[QueueFull]) -> str:
    """Of what there is too much already: all owners' or, where `kind` says so, this one's."""
    if kind is ShareFull:
        return f"{own} {what} of this key are waiting already"
    return f"{all} {what} are waiting already"
