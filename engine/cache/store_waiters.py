"""StoreWaiters: who waits for a named state's file to be written, or to be removed.

Who waits is told once: how it went, or before that, that it is not known. The disk goes on with it
all the same.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass

from engine.cache.resume_point import NamedState
from engine.deadlines import Deadlines
from engine.errors import EngineError
from engine.protocol.state_calls import StateInfo

StoreResult = StateInfo | EngineError | None  # None: of a state that is no more
OnStored = Callable[[StoreResult], None]


@dataclass(eq=False)
class Waiter:
    """`then` is called once; until then it can be found by `key`, where it has one."""

    then: OnStored | None
    key: Hashable = None
    due: float | None = None  # when it has waited long enough, by the clock of `overdue`

    def tell(self, result: StoreResult) -> None:
        """Only what is told first is."""
        then, self.then = self.then, None
        if then is not None:
            then(result)


@dataclass(eq=False, kw_only=True)
class PendingStore(Waiter):
    """A state on its way to its file, and who waits for it.

    With `must_last` its name has it only once the file is there; else then, or when that has
    failed, or is not waited for any longer.
    """

    named: NamedState
    must_last: bool
    placed: bool = False  # its name has it
    digest: bytes = b""  # of the state, once its file's content is made


class StoreWaiters:
    """All of an engine's."""

    def __init__(self) -> None:
        self._all: dict[Waiter, None] = {}
        self._by_key: dict[Hashable, Waiter] = {}
        self._deadlines: Deadlines[Waiter] = Deadlines()

    def __bool__(self) -> bool:
        return bool(self._all)

    def add(self, waiter: Waiter) -> None:
        """It waits until `tell`."""
        self._all[waiter] = None
        if waiter.key is not None:
            self._by_key[waiter.key] = waiter
        if waiter.due is not None:
            self._deadlines.put(waiter, waiter.due)

    def tell(self, waiter: Waiter, result: StoreResult) -> None:
        """Tells a waiter, which waits no longer. Ignores one that does not wait."""
        if waiter not in self._all:
            return
        del self._all[waiter]
        if waiter.key is not None:
            del self._by_key[waiter.key]
        if waiter.due is not None:
            self._deadlines.discard(waiter, waiter.due)
        waiter.tell(result)

    def with_keys(self, keys: Iterable[Hashable]) -> list[Waiter]:
        """Those with these keys."""
        return [self._by_key[key] for key in keys if key in self._by_key]

    def overdue(self, now: float) -> list[Waiter]:
        """Those that have waited long enough."""
        return self._deadlines.overdue(now)

    def all(self) -> list[Waiter]:
        """Those that wait."""
        return list(self._all)
