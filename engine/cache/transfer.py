"""StateTransfer: states' bytes out of rows, and into rows from files or clients.

A state's bytes come with the results of the step whose plan exports it. Those of a state in no row
are read from its file, and put in a row by the next plan. Serializing and checking a state takes a
while where it is large, so a worker thread does both.

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
from engine.cache.storage.file_store import Parse, StateFileStore
from engine.cache.storage.snapshot import StateLayout
from engine.cache.storage.worker_threads import Done, Result, Work, WorkerThreads
from engine.cache.tiered_store import CachedState, TieredStateStore
from engine.errors import EngineError, StateMalformed, StateNotFound, StateQuota, StepFailed
from engine.step_plan import StepPlan, Store

log = logging.getLogger(__name__)

MOST_LOADS = 3  # of one state for one request: others may have taken its row meanwhile
MORE_BYTES = 8192  # that a named state's file may have beside a snapshot's: its name
LANE = "snapshots"  # of `WorkerThreads`

Exported = Callable[[bytes | None], None]  # told a state's bytes; None: it is lost


@dataclass(frozen=True, slots=True)
class _PendingExport:
    state: CachedState  # pinned
    then: Exported
    with_logits: bool


@dataclass(eq=False, slots=True)
class _PendingLoad:
    """A state on its way from a file to a row, tried file by file."""

    state: CachedState
    file_store: StateFileStore
    most: int  # bytes of a file
    parse: Parse
    on_lost: Callable[[str], None]  # told of files that are gone or damaged
    files: list[str]  # still to be tried, the last one first


class StateTransfer:
    """One per engine; called by the engine's thread alone."""

    def __init__(
        self, tiers: TieredStateStore, layout: StateLayout, file_store: StateFileStore | None
    ) -> None:
        self._tiers = tiers
        self._layout = layout
        self._file_store = file_store
        self._threads = WorkerThreads() if file_store is None else file_store.threads
        self._exports: dict[int, _PendingExport] = {}  # by ticket
        self._next_ticket = 0
        self._unplanned: list[int] = []  # tickets that no plan has yet
        self._loading: set[CachedState] = set()
        self._loaded: list[CachedState] = []  # or could not be; not told yet

    @property
    def exporting(self) -> bool:
        """Somebody waits for a state to be exported."""
        return bool(self._exports)

    @property
    def pending(self) -> bool:
        """A worker thread has something to do, or has done what `collect` has not told yet."""
        return self._threads.pending > 0

    @property
    def busy(self) -> bool:
        """Steps are needed: for an export, for what a worker thread does, or to tell of that."""
        return bool(self._exports or self._loaded or self.pending)

    def wait(self, seconds: float) -> None:
        """Waits until a worker thread has done something, for so long at most."""
        self._threads.wait(seconds)

    def run_aside(self, work: Work, done: Done) -> None:
        """Has a worker thread do something that touches no state here; `done` as of
        `WorkerThreads.submit`."""
        self._threads.submit(LANE, work, done)

    def close(self) -> None:
        """Returns when what is to be written is; there will be no more."""
        if self._file_store is not None:
            self._file_store.close()

    def flush(self) -> None:
        """Returns when what is to be written is."""
        if self._file_store is not None:
            self._file_store.flush()

    def collect(self) -> list[CachedState]:
        """Calls what worker threads are done for. Returns the states that have been read from
        files, or could not be (they have no row then), since this was last called."""
        if self._threads.pending:
            self._threads.collect()
        loaded, self._loaded = self._loaded, []
        return loaded

    # Out of rows.

    def export(self, state: CachedState, then: Exported, with_logits: bool = False) -> None:
        """Exports a state that lies in a row, with the next plan.

        Args:
            then: called with its bytes (and those of its logits) when that plan has run, in
                `on_exported`; with None if it is lost.
        """
        self._next_ticket += 1
        self._tiers.begin_export(state)
        pending = _PendingExport(self._tiers.pin(state), then, with_logits)
        self._exports[self._next_ticket] = pending
        self._unplanned.append(self._next_ticket)

    def fill_plan(self, plan: StepPlan) -> None:
        """Gives a plan, once it is made, the moves that it begins with and what it exports."""
        plan.before, tickets = self._tiers.take_moves(), self._unplanned
        self._unplanned = []
        for ticket in tickets:
            pending = self._exports[ticket]
            self._tiers.end_export(pending.state)
            if pending.state.has_row:
                plan.exports.append(Store(ticket, pending.state.place, pending.with_logits))
            else:
                self.on_exported(ticket, None)

    def on_exported(self, ticket: int, content: bytes | None) -> None:
        """What a plan has exported is here; None: the plan failed."""
        pending = self._exports.pop(ticket, None)
        if pending is not None:
            pending.then(content)
            self._tiers.release(pending.state)

    # Into rows.

    def import_state(self, state: CachedState, content: bytes) -> bool:
        """Puts a state that comes from outside in a row, with the next plan. Returns whether there
        is one."""
        if not self._tiers.allocate(state):
            return False
        self._tiers.load_into(state, content)
        return True

    def load(self, state: CachedState, tries: int, param: str) -> None:
        """Brings a named state that lies in no row back from its file; `collect` tells when.

        Files that are gone or damaged are the state's no more. Where a file cannot be read just
        now, the state's `read_error` says why.

        Args:
            tries: how often who asks has done so before, for one request.
            param: the request's parameter that errors name.

        Raises: StateNotFound, StateQuota or StepFailed where it is of no use to ask.
        """
        if not state.files or self._file_store is None:
            raise StateNotFound(
                "the state is lost: it has been replaced, or its file cannot be read", param=param
            )
        if tries and state.read_error:
            raise StepFailed(f"the state's file cannot be read: {state.read_error}")
        if tries >= MOST_LOADS:
            raise StateQuota("no memory is left to bring the state back to")
        most = self._layout.most_bytes + MORE_BYTES
        self.load_from(self._file_store, state, most, partial(self._parse, state.digest))

    def _parse(self, digest: bytes, content: bytes) -> bytes:
        found = snapshot.read(content, self._layout)
        if found.digest != digest:
            raise StateMalformed("the file has another state than it had: it has been replaced")
        return found.state

    def load_from(
        self,
        file_store: StateFileStore,
        state: CachedState,
        most: int,
        parse: Parse,
        on_lost: Callable[[str], None] = lambda name: None,
    ) -> None:
        """As `load`, from files of any format.

        Args:
            most: bytes that a file may have.
            parse: gives the state of a file's content or raises EngineError; called by a worker
                thread.
            on_lost: told of files that are gone or damaged.
        """
        if state in self._loading:
            return
        self._loading.add(state)
        self._tiers.note_read_error(state, "")
        files = sorted(state.files, key=lambda file: file in state.written)
        self._read_next(_PendingLoad(state, file_store, most, parse, on_lost, files))

    def _read_next(self, load: _PendingLoad) -> None:
        """From the last of the files that the state still has."""
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
            log.error("a file of a state is lost: %s: %s", name, content)
            self._tiers.remove_file(state, name)
            load.on_lost(name)
        else:
            self._tiers.note_read_error(state, content.strerror or str(content))
            log.error("a file of a state cannot be read: %s", content)
        self._read_next(load)

    def _end_load(self, load: _PendingLoad) -> None:
        self._loading.discard(load.state)
        self._loaded.append(load.state)
