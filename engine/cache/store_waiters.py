"""StoreWaiters: callbacks that wait for a named state's file to be written or removed.

Each is called once: with the outcome or, before that, with the notice that it is unknown. The disk
operation continues in that case.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass

from engine.cache.resume_point import NamedState
from engine.deadlines import Deadlines
from engine.errors import EngineError
from engine.protocol.state_calls import StateInfo

StoreResult = StateInfo | EngineError | None  # None: the state was deleted
OnStored = Callable[[StoreResult], None]


@dataclass(eq=False)
class Waiter:
    """A callback, called once; until then it can be found by `key`, if it has one."""

    then: OnStored | None
    key: Hashable = None
    due: float | None = None  # when it has waited long enough, by the clock of `overdue`

    def tell(self, result: StoreResult) -> None:
        """Call the callback, unless it was called before."""
        then, self.then = self.then, None
        if then is not None:
            then(result)


@dataclass(eq=False, kw_only=True)
class PendingStore(Waiter):
    """A state on its way to its file, and the callback that waits for it.

    With `must_last` the name gets the state only when the file is written. Otherwise it gets it
    then, or when writing has failed or nobody waits any more.
    """

    named: NamedState
    must_last: bool
    placed: bool = False  # the name refers to it
    digest: bytes = b""  # hash of the state, once its file's content is made


class StoreWaiters:
    """All waiters of an engine."""

    def __init__(self) -> None:
        self._all: dict[Waiter, None] = {}
        self._by_key: dict[Hashable, Waiter] = {}
        self._deadlines: Deadlines[Waiter] = Deadlines()

    def __bool__(self) -> bool:
        return bool(self._all)

    def add(self, waiter: Waiter) -> None:
        """Add a waiter, which waits until `tell`."""
        self._all[waiter] = None
        if waiter.key is not None:
            self._by_key[waiter.key] = waiter
        if waiter.due is not None:
            self._deadlines.put(waiter, waiter.due)

    def tell(self, waiter: Waiter, result: StoreResult) -> None:
        """Answer and remove a waiter; ignored if it does not wait."""
        if waiter not in self._all:
            return
        del self._all[waiter]
        if waiter.key is not None:
            del self._by_key[waiter.key]
        if waiter.due is not None:
            self._deadlines.discard(waiter, waiter.due)
        waiter.tell(result)

    def with_keys(self, keys: Iterable[Hashable]) -> list[Waiter]:
        """Return the waiters with these keys."""
        return [self._by_key[key] for key in keys if key in self._by_key]

    def overdue(self, now: float) -> list[Waiter]:
        """Return the waiters that have waited long enough."""
        return self._deadlines.overdue(now)

    def all(self) -> list[Waiter]:
        """Return all waiters."""
        return list(self._all)
