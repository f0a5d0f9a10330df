"""StoreTimes: how long an engine waits for its shared store, and what it finds there."""

from __future__ import annotations

from typing import Any, Literal, get_args

from engine.cache.shared.store import ABSENT
from engine.errors import EngineError, StoreUnavailable

FetchResult = Literal[
    "memory",  # this engine had the version that the store has
    "store",  # the state was read from the store
    "new",  # there is no such state
    "refused",  # the name was locked by another turn, or there is no room for it
    "unavailable",  # the store did not answer, or its answer made no sense
]
FETCH_RESULTS: tuple[FetchResult, ...] = get_args(FetchResult)


class StoreTimes:
    """Collects seconds until they are taken as fields of Stats."""

    def __init__(self) -> None:
        self._fetches: dict[str, list[float]] = {}
        self._writes: list[float] = []

    def fetched(self, result: FetchResult, seconds: float) -> None:
        """Note that a name was looked up; `seconds` are those that its request has waited."""
        self._fetches.setdefault(result, []).append(seconds)

    def wrote(self, seconds: float) -> None:
        """Note a state that the store has acknowledged, `seconds` after it was given."""
        self._writes.append(seconds)

    def take(self) -> dict[str, Any]:
        """Return what was noted since the last call, as fields of Stats."""
        taken = {"state_fetches": self._fetches, "state_writes": self._writes}
        self._fetches, self._writes = {}, []
        return taken


def result_of(generation: str, was_read: bool) -> FetchResult:
    """Return what a look-up has found: the generation, and whether its content was returned."""
    if generation == ABSENT:
        return "new"
    return "store" if was_read else "memory"


def result_of_error(error: EngineError) -> FetchResult:
    """Return what a look-up has ended with that has failed."""
    return "unavailable" if isinstance(error, StoreUnavailable) else "refused"
