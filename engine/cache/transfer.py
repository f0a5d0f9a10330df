"""StateTransfer: states on their way out of rows, as bytes, and from outside into them.

A state's bytes come with the results of the round whose plan exports it; those of a state that lies
in no row any more are read from its file, and put in a row by the next plan. What is made of a
state's bytes, or checked, is done aside: large ones take a while.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from engine.cache.storage import snapshot
from engine.cache.storage.file_store import Parse, StateFileStore
from engine.cache.storage.snapshot import StateLayout
from engine.cache.storage.worker_threads import Done, Result, Work, WorkerThreads
from engine.cache.tiered_store import CachedState, TieredStateStore
from engine.errors import EngineError, StateMalformed, StateNotFound, StateQuota, StepFailed
from engine.step_plan import Load, StepPlan, Store

log = logging.getLogger(__name__)

MOST_LOADS = 3  # of one state for one request: others may have taken its row meanwhile
MORE_BYTES = 8192  # that a file on the shelf may have beside a snapshot's: its name
LANE = "snapshots"  # of `WorkerThreads`

Fetched = Callable[[bytes | None], None]


class StateTransfer:
    """`shelf` has the files, if there are any."""

    def __init__(
        self, tiers: TieredStateStore, shape: StateLayout, shelf: StateFileStore | None
    ) -> None:
        self._tiers = tiers
        self._shape = shape
        self._shelf = shelf
        self._aside = WorkerThreads() if shelf is None else shelf.aside
        self._tickets: dict[int, tuple[CachedState, Fetched, bool]] = {}
        self._next_ticket = 0
        self._asked: list[int] = []  # tickets that no plan has yet
        self._loading: set[CachedState] = set()
        self._loaded: list[CachedState] = []

    @property
    def fetching(self) -> bool:
        """Somebody waits for a state to be exported."""
        return bool(self._tickets)

    @property
    def pending(self) -> bool:
        """The disk, or what is done aside, is awaited, or done and nobody has taken note of it."""
        return self._aside.pending > 0

    @property
    def busy(self) -> bool:
        """Somebody waits for a state to be exported or for the disk, or is to be told. So would
        other engines that use the folder, for what is written."""
        return bool(self._tickets or self._loaded or self.pending)

    def wait(self, seconds: float) -> None:
        """For the disk, and for what is done aside."""
        self._aside.wait(seconds)

    def do(self, work: Work, done: Done) -> None:
        """Does what takes a while aside; `done` as of `WorkerThreads`."""
        self._aside.ask(LANE, work, done)

    def close(self) -> None:
        """Returns when what is to be written is."""
        if self._shelf is not None:
            self._shelf.close()

    def flush(self) -> None:
        """As `close`, and there will be more."""
        if self._shelf is not None:
            self._shelf.flush()

    def collect(self) -> list[CachedState]:
        """What has been read from files, or could not be, since this was last called."""
        if self._aside.pending:
            self._aside.collect()
        loaded, self._loaded = self._loaded, []
        return loaded

    def fetch(self, kept: CachedState, then: Fetched, logits: bool = False) -> None:
        """Calls `then` with the bytes of a state that lies in a row, and those of its logits if
        they are wanted; with None if it is lost."""
        self._next_ticket += 1
        kept.wanted += 1
        self._tickets[self._next_ticket] = self._tiers.hold(kept), then, logits
        self._asked.append(self._next_ticket)

    def bring_in(self, kept: CachedState, state: bytes) -> bool:
        """Puts a state that comes from outside in a row; whether there is one."""
        if not self._tiers.put(kept):
            return False
        self._tiers.moves.append(Load(kept.place, state))
        self._tiers.stand(kept)
        return True

    def load(self, kept: CachedState, tries: int, param: str) -> None:
        """Brings a state that lies in no row back from a file; `collect` tells when that is done.
        It loses files that are gone or damaged. Where others cannot be read just now, `trouble`
        says why. Who asks has done so `tries` times before. Raises StateNotFound, StateQuota or
        StepFailed where it is of no use to ask."""
        if not kept.files or self._shelf is None:
            raise StateNotFound(
                "the state is lost: it has been replaced, or its file cannot be read", param=param
            )
        if tries and kept.trouble:
            raise StepFailed(f"the state's file cannot be read: {kept.trouble}")
        if tries >= MOST_LOADS:
            raise StateQuota("no memory is left to bring the state back to")
        most, digest = self._shape.most_bytes + MORE_BYTES, kept.digest
        self.load_from(self._shelf, kept, most, lambda content: self._parse(digest, content))

    def _parse(self, digest: bytes, content: bytes) -> bytes:
        found = snapshot.read(content, self._shape)
        if found.digest != digest:
            raise StateMalformed("the file has another state than it had: it has been replaced")
        return found.state

    def load_from(
        self,
        shelf: StateFileStore,
        kept: CachedState,
        most: int,
        parse: Parse,
        lost: Callable[[str], None] = lambda name: None,
    ) -> None:
        """As `load`, from files of up to `most` bytes, of which `parse`, called aside, gives the
        state or raises EngineError; `lost` is told of those that are gone or damaged."""
        if kept in self._loading:
            return
        self._loading.add(kept)
        kept.trouble = ""
        files = sorted(kept.files, key=lambda file: file in kept.written)

        def bad(name: str) -> None:
            self._tiers.note_lost(kept, name)
            lost(name)

        self._read(shelf, kept, most, parse, bad, files)

    def _read(
        self,
        shelf: StateFileStore,
        kept: CachedState,
        most: int,
        parse: Parse,
        lost: Callable[[str], None],
        files: list[str],
    ) -> None:
        """From the last of the files that can be read."""
        name = files.pop() if files else ""

        def read(state: Result) -> None:
            if isinstance(state, bytes):
                if kept.references and not kept.has_row:
                    self.bring_in(kept, state)
                self._end_load(kept)
                return
            if isinstance(state, FileNotFoundError | EngineError):
                log.error("a file of a state is lost: %s: %s", name, state)
                lost(name)
            else:
                kept.trouble = state.strerror or str(state)
                log.error("a file of a state cannot be read: %s", state)
            rest = [file for file in files if file in kept.files]
            self._read(shelf, kept, most, parse, lost, rest)

        if name:
            shelf.read(name, most, parse, read)
        else:
            self._end_load(kept)

    def _end_load(self, kept: CachedState) -> None:
        self._loading.discard(kept)
        self._loaded.append(kept)

    def take_moves(self, plan: StepPlan) -> None:
        """What was to be copied before the plan's round, and what it is to export."""
        plan.before, tickets = self._tiers.moves, self._asked
        self._tiers.moves, self._asked = [], []
        for ticket in tickets:
            kept, _, logits = self._tickets[ticket]
            kept.wanted -= 1
            if kept.has_row:
                plan.exports.append(Store(ticket, kept.place, logits))
            else:
                self.arrived(ticket, None)

    def arrived(self, ticket: int, state: bytes | None) -> None:
        """What was exported is here; None: it was lost."""
        found = self._tickets.pop(ticket, None)
        if found is not None:
            kept, then, _ = found
            then(state)
            self._tiers.release(kept)
