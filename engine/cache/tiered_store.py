"""TieredStateStore: which row or file has each cached state, and which state is evicted.

Tiers: rows of the device's pool, rows of host memory, files. A place is an integer: a row of the
device's pool, or ~row of host memory. Moves between places are `Copy`s, executed in order before a
plan admits any request.

Invariants:

- A state never changes once it is committed. Each user pins it: a node of the prefix cache, a name,
  a sequence that starts from it, an export. When the last pin is released, its row is free.
- A committed state with a row is in exactly one of three sets: `_on_device`, `_on_host` (its row
  may be taken: it is only cached, or a file has it) or `_fixed` (its row in host memory may not be
  taken). A cached state without a row is in a fourth one, `_on_disk`. A state that is only
  allocated, or that has a name and is only in a file, is in none.
- `written` is part of `files`.
- A state that only the prefix cache pins may be evicted whenever room is needed. A state with a
  name keeps a row until a file has it (`requires_row`), and so does one that is being exported.
- The owner with the most rows loses one first (`fair_lru`). An owner may have no more states that
  require rows than its share of all rows (`has_quota`).
- A place that the plan being made reads or writes later (`_busy`) is given to no other state in
  that plan; it becomes free with the next plan.
- Only this module writes the fields of a CachedState (tests/test_architecture.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from collections.abc import Set as AbstractSet
from itertools import chain
from typing import Any

import msgspec

from engine.cache.fair_lru import FairLru, Weights
from engine.protocol.queue_policy import has_room
from engine.slot_allocator import SlotAllocator
from engine.step_plan import Copy, Load

_NOWHERE = 2**62  # the place of a state without a row
# Bounds on evictions of merely cached states from the device, to host memory or for good: so many
# per plan, but those of a few plans at once, which takes hardly longer. Under a load of new
# prompts, each of which stores two states, more would cost more than they could save. A new state
# that would only replace an equally good one is not stored at all.
MOVED_PER_PLAN = 4
MOVED_AT_ONCE = 16


class CachedState(msgspec.Struct, eq=False):
    """One state, after `position` tokens; only TieredStateStore may write its fields."""

    position: int  # number of tokens that it has read
    owner: str = ""
    has_hidden: bool = False  # whether the hidden state after its last token is stored, too
    place: int = _NOWHERE
    node: Any = None  # node of the prefix cache's tree
    references: int = 0  # number of pins
    names: int = 0  # number of names that refer to it
    exports: int = 0  # exports that are not in a plan yet
    files: AbstractSet[str] = frozenset()  # files that have it, or will
    written: AbstractSet[str] = frozenset()  # those of `files` that are written
    digest: bytes = b""  # hash of its bytes, as in `snapshot`, once a named state's file has it
    read_error: str = ""  # why no file could be read at the last try
    group: FairLru[CachedState] | set[CachedState] | None = None  # the one set that it is in

    @property
    def has_row(self) -> bool:
        """Whether it has a row, on the device or in host memory."""
        return self.place != _NOWHERE

    @property
    def on_device(self) -> bool:
        """Whether it has a row of the device's pool."""
        return 0 <= self.place < _NOWHERE

    @property
    def on_host(self) -> bool:
        """Whether it has a row of host memory."""
        return self.place < 0

    @property
    def only_cached(self) -> bool:
        """Whether nothing but the prefix cache pins it."""
        return self.node is not None and self.references == 1

    @property
    def requires_row(self) -> bool:
        """Whether it has a name but no file."""
        return self.names > 0 and not self.written


class _Allowance:
    """A budget of moves; once it is used up, none are allowed until it is full again."""

    def __init__(self) -> None:
        self.left = MOVED_AT_ONCE
        self.used_up = False

    def grow(self) -> None:
        """Add the moves of one more plan."""
        self.left = min(self.left + MOVED_PER_PLAN, MOVED_AT_ONCE)
        self.used_up = self.used_up and self.left < MOVED_AT_ONCE

    def spend(self) -> bool:
        """Use one move; return whether there was one."""
        self.used_up = self.used_up or not self.left
        if self.used_up:
            return False
        self.left -= 1
        return True


class TieredStateStore:
    """The rows of states, and the only writer of a CachedState's fields.

    The life of a state: `allocate` a row and `pin` it, plan a copy or load into the row, `commit`
    it when that copy is part of a plan, `promote` it whenever a plan starts from it, `release` it.
    """

    def __init__(self, device_rows: int, first_row: int, host_rows: int) -> None:
        """Create with all rows free; the first device row is number `first_row`."""
        self.rows = device_rows + host_rows
        # Called with a cached state to evict; must detach and release it.
        self.on_evict: Callable[[CachedState], None] = lambda state: None
        # Called with a cached state without a file that was moved to host memory.
        self.on_demoted: Callable[[CachedState], None] = lambda state: None
        self.evictions: Counter[str] = Counter()  # by tier
        self._device = SlotAllocator(device_rows, first_row)
        self._host = SlotAllocator(host_rows)
        self._on_device: FairLru[CachedState] = FairLru()
        self._on_host: FairLru[CachedState] = FairLru()
        self._on_disk: FairLru[CachedState] = FairLru()
        self._fixed: set[CachedState] = set()
        self._requiring_rows = Weights()  # number of states that require rows, by owner
        self._busy: set[int] = set()  # places that the plan being made reads or writes later
        self._freed_busy: list[int] = []  # those of `_busy` that become free after the plan
        self._allowance = _Allowance()
        self._crowded = False  # there was no row for the cache, and none has become free since
        self._moves: list[Copy | Load] = []  # moves at the beginning of the next plan

    @property
    def device_used(self) -> int:
        """Rows of the device in use."""
        return self._device.used

    @property
    def host_used(self) -> int:
        """Rows of host memory in use."""
        return self._host.used

    # Plans.

    def begin_plan(self) -> None:
        """Begin another plan; the previous one's reads and writes are executed before it."""
        self._allowance.grow()
        self._crowded = False
        self._busy.clear()
        freed, self._freed_busy = self._freed_busy, []
        for place in freed:
            self._free(place)

    def take_moves(self) -> list[Copy | Load]:
        """Return, once, the moves with which the next plan must begin, in order."""
        moves, self._moves = self._moves, []
        return moves

    def planned_moves(self) -> Iterable[Copy | Load]:
        """Return the moves that `take_moves` will return, without taking them."""
        return iter(self._moves)

    def copy_into(self, state: CachedState, source: int, position: int | None = None) -> None:
        """Plan a copy from place `source` into the state's row.

        `position`, if given, becomes the number of tokens that the state has read.
        """
        self._moves.append(Copy(source, state.place))
        if position is not None:
            state.position = position

    def load_into(self, state: CachedState, content: bytes) -> None:
        """Plan to fill the state's row from outside, and commit the state."""
        self._moves.append(Load(state.place, content))
        self.commit(state)

    # Rows.

    @property
    def crowded(self) -> bool:
        """Whether there is no row for merely cached states at the moment."""
        return self._crowded or (
            self._allowance.used_up and self._device.count > 0 and not self._device.free
        )

    def allocate(self, state: CachedState, for_cache: bool = False) -> bool:
        """Find a row for a new state, evicting others if necessary.

        The row belongs to the state in the plan being made. It cannot be moved before it is
        committed, and is not freed before it was pinned and released.

        Args:
            state: a state without a row.
            for_cache: only the prefix cache wants it; it then gets no row while many are requested.

        Returns:
            Whether it has a row now.
        """
        if for_cache and self.crowded:
            return False
        place = self._device_row(for_cache)
        if place is None and for_cache and self._device.count and not self._allowance.spend():
            self._crowded = True
            return False
        if place is None:
            place = self._host_row()
        if place is None:
            return False
        state.place = place
        self._busy.add(place)
        return True

    def commit(self, state: CachedState) -> None:
        """Mark the state's row as filled for later plans; from now on it may move or be evicted."""
        if state.on_device:
            self._enter(state, self._on_device)
            self._crowded = self._crowded and state.place in self._busy
        elif state.node is not None or state.written:
            self._enter(state, self._on_host)
            if state.node is not None and not state.files:
                self.on_demoted(state)
        else:
            self._enter(state, self._fixed)

    def promote(self, state: CachedState) -> int:
        """Return the place to start from in the plan being made, and keep it for that plan.

        A state in host memory is moved to the device if there is a row for it. The state must have
        a row.
        """
        self.touch(state)
        committed = state.group is self._on_host or state.group is self._fixed
        if committed and self._device.count and state.place not in self._busy:
            self._busy.add(state.place)  # must not be evicted to make room for itself
            row = self._device_row(for_cache=True)  # evicts nothing
            self._busy.discard(state.place)
            if row is not None:
                self._move(state, row)
        self._busy.add(state.place)
        return state.place

    def touch(self, state: CachedState) -> None:
        """Make the state the most recently used of its owner."""
        if isinstance(state.group, FairLru):
            state.group.touch(state)

    def pin(self, state: CachedState) -> CachedState:
        """Add a pin to the state, and return the state."""
        state.references += 1
        return state

    def release(self, state: CachedState) -> None:
        """Remove a pin from the state; when the last one is removed, its row is free."""
        state.references -= 1
        if state.references == 0:
            self.free_row(state)
        else:
            self._crowded = False

    def free_row(self, state: CachedState) -> None:
        """Free the state's row, if it has one, and remove the state from its set."""
        self._withdraw(state)
        if state.has_row:
            self._free(state.place)
            state.place = _NOWHERE

    def move_to_disk(self, state: CachedState) -> None:
        """Free the row of a cached state that a file has."""
        self.free_row(state)
        self._enter(state, self._on_disk)

    def evict(self, owner: str) -> bool:
        """Evict one cached state; return whether there was one.

        It is the owner's least recently used one, on disk first, or another owner's if it has none.
        """
        tiers = ("disk", self._on_disk), ("host", self._on_host), ("device", self._on_device)
        for name, tier in tiers:
            for state in chain(tier.of(owner), tier):
                if state.only_cached and state.place not in self._busy:
                    self.evictions[name] += 1
                    self.on_evict(state)
                    return True
        return False

    def cached_on_device(self) -> Iterable[CachedState]:
        """Return the prefix cache's states in rows of the device."""
        return (state for state in self._on_device if state.node is not None)

    # Everything about a state except its row.

    def attach(self, state: CachedState, node: Any) -> None:
        """Attach the state to a prefix cache node of as many tokens as the state has read."""
        state.node, state.position = node, node.length

    def detach(self, state: CachedState) -> None:
        """Detach the state from its node, whose pin must still be released."""
        state.node = None

    def begin_export(self, state: CachedState) -> None:
        """Make the state keep its row until `end_export`; it must be pinned as well."""
        state.exports += 1

    def end_export(self, state: CachedState) -> None:
        """Record that a plan reads the state, or cannot."""
        state.exports -= 1

    def add_file(self, state: CachedState, file: str) -> None:
        """Record that this file will contain the state."""
        state.files |= {file}

    def mark_written(self, state: CachedState, file: str, digest: bytes = b"") -> None:
        """Record that this file contains the state; `digest` is the hash of its bytes, if known."""
        state.files |= {file}
        state.digest = digest or state.digest
        self._crowded = False
        required = state.requires_row
        state.written |= {file}
        self._weigh(state, required)
        if state.group is self._fixed:
            self._enter(state, self._on_host)

    def remove_file(self, state: CachedState, file: str) -> None:
        """Record that this file does not contain the state any more, or never will."""
        required = state.requires_row
        state.files -= {file}
        state.written -= {file}
        self._weigh(state, required)
        if state.group is self._on_host and state.node is None and not state.written:
            self._enter(state, self._fixed)

    def note_read_error(self, state: CachedState, reason: str) -> None:
        """Record why the state's files cannot be read now; "": reading is tried again."""
        state.read_error = reason

    def add_name(self, state: CachedState) -> None:
        """Count one more name that refers to the state, which pins it."""
        required = state.requires_row
        state.names += 1
        self._weigh(self.pin(state), required)

    def remove_name(self, state: CachedState) -> None:
        """Count one name less that refers to the state, which releases it."""
        required = state.requires_row
        state.names -= 1
        self._weigh(state, required)
        self.release(state)

    def has_quota(self, owner: str) -> bool:
        """Return whether the owner may have one more named state that requires a row."""
        taken, own = self._requiring_rows.total, self._requiring_rows.of.get(owner, 0)
        return has_room(taken=taken, own=own, more=1, most=self.rows, owner=owner)

    # Failed plans.

    def overwritten(self, places: set[int]) -> set[int]:
        """Return `places`, whose contents are lost, and those to which planned moves copy them."""
        for move in self._moves:
            if isinstance(move, Copy) and move.source in places:
                places = places | {move.target}
        return places

    def states_in(self, places: set[int]) -> list[CachedState]:
        """Return the committed states in these rows."""
        groups = (*self._on_device, *self._on_host, *self._fixed) if places else ()
        return [state for state in groups if state.place in places]

    def _enter(self, state: CachedState, group: FairLru[CachedState] | set[CachedState]) -> None:
        if state.group is not group:
            self._withdraw(state)
            state.group = group
            group.add(state)

    def _withdraw(self, state: CachedState) -> None:
        if state.group is not None:
            state.group.discard(state)
            state.group = None

    def _weigh(self, state: CachedState, required: bool) -> None:
        """Update the owner's count of states that require rows; `required`: it did before."""
        if state.requires_row != required:
            self._requiring_rows.add(state.owner, -1 if required else 1)

    def _device_row(self, for_cache: bool = False) -> int | None:
        if self._device.free:
            return self._device.allocate()
        for state in self._on_device:
            if state.place in self._busy:
                continue
            row, only_cached = None, state.only_cached
            if not only_cached or self._allowance.spend():
                row = self._host_row()
            elif for_cache:
                return None
            if row is not None:
                self.evictions["device"] += 1
                self._move(state, row)
            elif only_cached:
                self.evictions["device"] += 1
                row, state.place = state.place, _NOWHERE
                self._drop_row(state)
                return row
            elif state.written and not state.exports:
                self.evictions["device"] += 1
                self.free_row(state)
            else:
                continue
            return self._device.allocate()
        return None

    def _host_row(self) -> int | None:
        if not self._host.count:
            return None
        if not self._host.free:
            for state in self._on_host:
                if state.place in self._busy:
                    continue
                if state.only_cached:
                    self._drop_row(state)
                elif state.written and not state.exports:
                    self.free_row(state)
                else:
                    continue
                self.evictions["host"] += 1
                break
        return ~self._host.allocate() if self._host.free else None

    def _drop_row(self, state: CachedState) -> None:
        """Take a cached state's row: keep its file, or evict it."""
        if state.written:
            self.move_to_disk(state)
        else:
            self.on_evict(state)

    def _move(self, state: CachedState, place: int) -> None:
        self._moves.append(Copy(state.place, place))
        self._withdraw(state)
        self._free(state.place)
        state.place = place
        self.commit(state)

    def _free(self, place: int) -> None:
        if place in self._busy:
            self._freed_busy.append(place)
        elif place >= 0:
            self._device.release(place)
            self._crowded = False
        else:
            self._host.release(~place)
