"""StateTransfer: moves the bytes of states out of rows, and into rows from files or clients.

The bytes of an exported state arrive with the results of the step whose plan exports it. A state
without a row is read from its file and put into a row by the next plan. Serializing and checking a
large state takes time, so a worker thread does both.

| what | asked for by | runs | told |
| --- | --- | --- | --- |
| export | `export` | in the plan that `fill_plan` fills | `on_exported`, which calls `then` |
| load from a file | `load`, `load_from` | a worker thread | the next `collect` |
| anything else | `run_aside` | a worker thread | `collect` or `wait`, which call `done` |
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from engine.cache.storage import snapshot
from engine.cache.storage.snapshot import StateLayout
from engine.cache.storage.state_store import Parse, StateStore
from engine.cache.storage.worker_threads import Done, Result, Work, WorkerThreads
from engine.cache.tiered_store import CachedState, TieredStateStore
from engine.errors import EngineError, StateMalformed, StateNotFound, StateQuota, StepFailed
from engine.step_plan import StepPlan, Store

log = logging.getLogger(__name__)

# most loads of a state for one request, as others may take its row before it is used
MOST_LOADS = 3
MORE_BYTES = 8192  # a named state's file may be this much larger than a snapshot: it has the name
LANE = "snapshots"  # lane of `WorkerThreads`

Exported = Callable[[bytes | None], None]  # called with a state's bytes; None: it is lost


@dataclass(frozen=True, slots=True)
class _PendingExport:
    state: CachedState  # pinned
    then: Exported
    with_hidden: bool


@dataclass(eq=False, slots=True)
class _PendingLoad:
    """A state on its way from a file to a row; its files are tried one after the other."""

    state: CachedState
    file_store: StateStore
    most: int  # the most bytes of a file
    parse: Parse
    on_lost: Callable[[str], None]  # called with the names of files that are missing or damaged
    files: list[str]  # files still to be tried, the last one first


class StateTransfer:
    """The transfers of an engine; called by the engine's thread only."""

    def __init__(
        self, tiers: TieredStateStore, layout: StateLayout, file_store: StateStore | None
    ) -> None:
        self._tiers = tiers
        self._layout = layout
        self._file_store = file_store
        self._threads = WorkerThreads() if file_store is None else file_store.threads
        self._exports: dict[int, _PendingExport] = {}  # by ticket
        self._next_ticket = 0
        self._unplanned: list[int] = []  # tickets that are not in a plan yet
        self._loading: set[CachedState] = set()
        # states that were loaded, or could not be, not reported yet
        self._loaded: list[CachedState] = []

    @property
    def exporting(self) -> bool:
        """Whether anybody waits for a state to be exported."""
        return bool(self._exports)

    @property
    def pending(self) -> bool:
        """Whether worker threads have work, or results that `collect` has not reported."""
        return (self._threads if self._file_store is None else self._file_store).pending > 0

    @property
    def busy(self) -> bool:
        """Whether steps are needed: for an export, or for worker threads and their results."""
        return bool(self._exports or self._loaded or self.pending)

    def wait(self, seconds: float) -> None:
        """Wait up to `seconds` until a worker thread has finished something."""
        (self._threads if self._file_store is None else self._file_store).wait(seconds)

    def run_aside(self, work: Work, done: Done) -> None:
        """Run `work`, which must not touch any state here, on a worker thread.

        `done` is called as by `WorkerThreads.submit`.
        """
        self._threads.submit(LANE, work, done)

    def close(self) -> None:
        """Wait until everything is written, and accept no more work."""
        if self._file_store is not None:
            self._file_store.close()

    def flush(self) -> None:
        """Wait until everything is written."""
        if self._file_store is not None:
            self._file_store.flush()

    def collect(self) -> list[CachedState]:
        """Call the callbacks of finished work.

        Returns:
            The states that were read from files, or could not be (they have no row then), since the
            last call.
        """
        if self.pending:
            (self._threads if self._file_store is None else self._file_store).collect()
        loaded, self._loaded = self._loaded, []
        return loaded

    # Out of rows.

    def export(self, state: CachedState, then: Exported, with_hidden: bool = False) -> None:
        """Export a state that is in a row, with the next plan.

        Args:
            state: the state.
            then: called by `on_exported` with its bytes (and its hidden state's) when that plan has
                run; with None if the state is lost.
            with_hidden: export the stored hidden state as well.
        """
        self._next_ticket += 1
        self._tiers.begin_export(state)
        pending = _PendingExport(self._tiers.pin(state), then, with_hidden)
        self._exports[self._next_ticket] = pending
        self._unplanned.append(self._next_ticket)

    def fill_plan(self, plan: StepPlan) -> None:
        """Add the initial moves and the exports to a plan that is otherwise complete."""
        plan.before, tickets = self._tiers.take_moves(), self._unplanned
        self._unplanned = []
        for ticket in tickets:
            pending = self._exports[ticket]
            self._tiers.end_export(pending.state)
            if pending.state.has_row:
                plan.exports.append(Store(ticket, pending.state.place, pending.with_hidden))
            else:
                self.on_exported(ticket, None)

    def on_exported(self, ticket: int, content: bytes | None) -> None:
        """Deliver what a plan has exported; None: the plan failed."""
        pending = self._exports.pop(ticket, None)
        if pending is not None:
            pending.then(content)
            self._tiers.release(pending.state)

    # Into rows.

    def import_state(self, state: CachedState, content: bytes) -> bool:
        """Put a state from outside into a row, with the next plan; return False if none is free."""
        if not self._tiers.allocate(state):
            return False
        self._tiers.load_into(state, content)
        return True

    def load(self, state: CachedState, tries: int, param: str) -> None:
        """Load a named state that has no row from its file; `collect` reports when it is done.

        Missing or damaged files are removed from the state. If a file cannot be read now, the
        state's `read_error` says why.

        Args:
            state: the state.
            tries: how many loads the caller has requested before, for one request.
            param: the request parameter that errors name.

        Raises:
            StateNotFound, StateQuota or StepFailed: loading is useless.
        """
        if not state.files or self._file_store is None:
            raise StateNotFound(
                "the state is lost: it was replaced, or its file cannot be read", param=param
            )
        if tries and state.read_error:
            raise StepFailed(f"the state's file cannot be read: {state.read_error}")
        if tries >= MOST_LOADS:
            raise StateQuota("no memory is left to load the state into")
        most = self._layout.most_bytes + MORE_BYTES
        self.load_from(self._file_store, state, most, partial(self._parse, state.digest))

    def _parse(self, digest: bytes, content: bytes) -> bytes:
        found = snapshot.read(content, self._layout)
        if found.digest != digest:
            raise StateMalformed("the file contains another state: it was replaced")
        return found.state

    def load_from(
        self,
        file_store: StateStore,
        state: CachedState,
        most: int,
        parse: Parse,
        on_lost: Callable[[str], None] = lambda name: None,
    ) -> None:
        """Load a state from its files, of any format; like `load`.

        Args:
            file_store: where the files are.
            state: the state.
            most: the most bytes that a file may have.
            parse: returns the state in a file's content or raises EngineError; called by a worker
                thread.
            on_lost: called with the names of files that are missing or damaged.
        """
        if state in self._loading:
            return
        self._loading.add(state)
        self._tiers.note_read_error(state, "")
        files = sorted(state.files, key=lambda file: file in state.written)
        self._read_next(_PendingLoad(state, file_store, most, parse, on_lost, files))

    def _read_next(self, load: _PendingLoad) -> None:
        """Read the last of the remaining files that the state still has."""
        while load.files:
            name = load.files.pop()
            if name in load.state.files:
                load.file_store.read(
                    name, load.most, load.parse, partial(self._on_read, load, name)
                )
                return
        self._end_load(load)

    def _on_read(self, load: _PendingLoad, name: str, content: Result) -> None:
        state = load.state
        if isinstance(content, bytes):
            if state.references and not state.has_row:
                self.import_state(state, content)
            self._end_load(load)
            return
        if isinstance(content, FileNotFoundError | EngineError):
            log.error("the file of a state is lost: %s: %s", name, content)
            self._tiers.remove_file(state, name)
            load.on_lost(name)
        else:
            self._tiers.note_read_error(state, content.strerror or str(content))
            log.error("the file of a state cannot be read: %s", content)
        self._read_next(load)

    def _end_load(self, load: _PendingLoad) -> None:
        self._loading.discard(load.state)
        self._loaded.append(load.state)
