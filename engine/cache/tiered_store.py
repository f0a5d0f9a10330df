"""TieredStateStore: which row or file holds each cached state, and which state gives way.

Tiers: rows of the device's pool, rows of main memory, files. A place is an integer: a row of the
device's pool, or ~row of main memory. Moves between places are `Copy`s, carried out in their order
before a plan admits anybody.

Invariants:
- A state never changes once it is committed. Whoever needs it pins it: a node of the prefix cache,
  a name, a sequence that starts from it, an export. With the last pin its row is free.
- A committed state with a row is in exactly one of three sets: `_on_device`, `_on_host` (its row
  may be taken: it is only cached, or a file has it) or `_fixed` (its row in main memory may not). A
  cached state without a row is in the fourth, `_on_disk`. One that is only allocated, or has a name
  and lies in a file alone, is in none.
- `written` is part of `files`.
- What only the prefix cache pins may go whenever room is needed. A state with a name keeps a row
  until a file has it (`requires_row`). One that is being exported keeps its row too.
- The owner with the most rows gives way first (`fair_lru`). Owners may not have more states that
  require rows than their part of all rows (`has_quota`).
- A place that the plan being made reads or writes later (`_busy`) goes to no other state in that
  plan, and comes free with the next one.
- The fields of a CachedState are written here alone (tests/test_architecture.py).
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

_NOWHERE = 2**62  # a place: in no row; who asks where a state lies asks `CachedState`
# Of states that only the prefix cache pins, those that leave the device for the sake of others,
# for main memory or, without that, for good: so many for each plan, but a few plans' at once, which
# takes hardly longer. Under a load of new prompts, of which each leaves two, more would cost more
# than they may save; and one that would only take the place of another, as good as it, is not
# stored at all.
MOVED_PER_PLAN = 4
MOVED_AT_ONCE = 16


class CachedState(msgspec.Struct, eq=False):
    """One state, after `position` tokens. To all but TieredStateStore its fields are read-only."""

    position: int  # tokens that it has read
    owner: str = ""
    has_logits: bool = False  # its row has the logits after its last token
    place: int = _NOWHERE
    node: Any = None  # of the prefix cache's tree
    references: int = 0  # pins
    names: int = 0  # that refer to it
    exports: int = 0  # that no plan has yet
    files: AbstractSet[str] = frozenset()  # that hold it, or will
    written: AbstractSet[str] = frozenset()  # those of them that do
    digest: bytes = b""  # of its bytes, as of `snapshot`, once a named state's file has it
    read_error: str = ""  # why no file could be read when that was last tried
    group: FairLru[CachedState] | set[CachedState] | None = None  # the one set that it is in

    @property
    def has_row(self) -> bool:
        return self.place != _NOWHERE

    @property
    def on_device(self) -> bool:
        """It has a row of the device's pool."""
        return 0 <= self.place < _NOWHERE

    @property
    def on_host(self) -> bool:
        """It has a row of main memory."""
        return self.place < 0

    @property
    def only_cached(self) -> bool:
        """Nobody but the prefix cache pins it."""
        return self.node is not None and self.references == 1

    @property
    def requires_row(self) -> bool:
        """It has a name, and no file."""
        return self.names > 0 and not self.written


class _Allowance:
    """Of moves: once it is used up, there are none until it is whole again."""

    def __init__(self) -> None:
        self.left = MOVED_AT_ONCE
        self.used_up = False

    def grow(self) -> None:
        self.left = min(self.left + MOVED_PER_PLAN, MOVED_AT_ONCE)
        self.used_up = self.used_up and self.left < MOVED_AT_ONCE

    def spend(self) -> bool:
        """Whether there is one more."""
        self.used_up = self.used_up or not self.left
        if self.used_up:
            return False
        self.left -= 1
        return True


class TieredStateStore:
    """Rows for states, and the only writer of a CachedState's fields.

    A state's life: `allocate` a row and `pin` it, plan a copy or a load into the row, `commit` it
    when that copy is part of a plan, `promote` it whenever a plan starts from it, `release` it.
    """

    def __init__(self, device_rows: int, first_row: int, host_rows: int) -> None:
        """The device's rows are `first_row` and the `device_rows` - 1 after it."""
        self.rows = device_rows + host_rows
        # Told of a cached state that has to go, which it detaches and releases.
        self.on_evict: Callable[[CachedState], None] = lambda state: None
        # Told of a cached state without a file that has come to main memory.
        self.on_demoted: Callable[[CachedState], None] = lambda state: None
        self.evictions: Counter[str] = Counter()  # by tier
        self._device = SlotAllocator(device_rows, first_row)
        self._host = SlotAllocator(host_rows)
        self._on_device: FairLru[CachedState] = FairLru()
        self._on_host: FairLru[CachedState] = FairLru()
        self._on_disk: FairLru[CachedState] = FairLru()
        self._fixed: set[CachedState] = set()
        self._requiring_rows = Weights()  # states, by owner
        self._busy: set[int] = set()  # places that the plan being made reads or writes later
        self._freed_busy: list[int] = []  # those of them that are free after the plan
        self._allowance = _Allowance()
        self._crowded = False  # since there was no row for the cache, nothing has come free
        self._moves: list[Copy | Load] = []  # that the next plan begins with

    @property
    def device_used(self) -> int:
        """Rows of the device that are taken."""
        return self._device.used

    @property
    def host_used(self) -> int:
        """Rows of main memory that are taken."""
        return self._host.used

    # Plans.

    def begin_plan(self) -> None:
        """Another plan is being made: what the one before reads and writes is done before it."""
        self._allowance.grow()
        self._crowded = False
        self._busy.clear()
        freed, self._freed_busy = self._freed_busy, []
        for place in freed:
            self._free(place)

    def take_moves(self) -> list[Copy | Load]:
        """Returns the moves that the next plan has to begin with, in order; once."""
        moves, self._moves = self._moves, []
        return moves

    def planned_moves(self) -> Iterable[Copy | Load]:
        """The moves that `take_moves` will return."""
        return iter(self._moves)

    def copy_into(self, state: CachedState, source: int, position: int | None = None) -> None:
        """Plans a copy of the place `source` into the state's row; with `position`, that is how
        many tokens the state has read then."""
        self._moves.append(Copy(source, state.place))
        if position is not None:
            state.position = position

    def load_into(self, state: CachedState, content: bytes) -> None:
        """Plans that the state's row is filled from outside, and commits it."""
        self._moves.append(Load(state.place, content))
        self.commit(state)

    # Rows.

    @property
    def crowded(self) -> bool:
        """There is no row for the prefix cache alone just now."""
        return self._crowded or (
            self._allowance.used_up and self._device.count > 0 and not self._device.free
        )

    def allocate(self, state: CachedState, for_cache: bool = False) -> bool:
        """Finds a row for a new state, evicting others if need be.

        The row is the state's for the plan being made. Others may not move it until it is
        committed, and nothing frees it until it is pinned and released.

        Args:
            for_cache: it is for the prefix cache alone, which gets no row while many are asked for.

        Returns: whether it has a row now.
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
        """Its row holds it, as far as later plans are concerned: it may be moved and evicted."""
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
        """Returns the place to start from in the plan being made, which keeps it for that plan.

        A state in main memory moves to the device if there is a row for it. It must have a row.
        """
        self.touch(state)
        committed = state.group is self._on_host or state.group is self._fixed
        if committed and self._device.count and state.place not in self._busy:
            self._busy.add(state.place)  # it must not become the room for what makes room
            row = self._device_row(for_cache=True)  # evicts nothing for that
            self._busy.discard(state.place)
            if row is not None:
                self._move(state, row)
        self._busy.add(state.place)
        return state.place

    def touch(self, state: CachedState) -> None:
        """Makes it the most recently used of its owner's."""
        if isinstance(state.group, FairLru):
            state.group.touch(state)

    def pin(self, state: CachedState) -> CachedState:
        """One more needs it. Returns it."""
        state.references += 1
        return state

    def release(self, state: CachedState) -> None:
        """One needs it no more. With the last one its row is free."""
        state.references -= 1
        if state.references == 0:
            self.free_row(state)
        else:
            self._crowded = False

    def free_row(self, state: CachedState) -> None:
        """Takes its row, if it has one, and takes it out of its set."""
        self._withdraw(state)
        if state.has_row:
            self._free(state.place)
            state.place = _NOWHERE

    def move_to_disk(self, state: CachedState) -> None:
        """A cached state needs no row: a file has it."""
        self.free_row(state)
        self._enter(state, self._on_disk)

    def evict(self, owner: str) -> bool:
        """Evicts one cached state: the owner's least recently used one, on disk first, or if the
        owner has none another owner's. Returns whether there was one."""
        tiers = ("disk", self._on_disk), ("host", self._on_host), ("device", self._on_device)
        for name, tier in tiers:
            for state in chain(tier.of(owner), tier):
                if state.only_cached and state.place not in self._busy:
                    self.evictions[name] += 1
                    self.on_evict(state)
                    return True
        return False

    def cached_on_device(self) -> Iterable[CachedState]:
        """The prefix cache's states in rows of the device."""
        return (state for state in self._on_device if state.node is not None)

    # What is known of a state beside its row.

    def attach(self, state: CachedState, node: Any) -> None:
        """A node of the prefix cache's tree, of as many tokens as the state has read, has it."""
        state.node, state.position = node, node.length

    def detach(self, state: CachedState) -> None:
        """No node has it any more; the node's pin is still to be released."""
        state.node = None

    def begin_export(self, state: CachedState) -> None:
        """It must keep its row until `end_export`; it has to be pinned besides."""
        state.exports += 1

    def end_export(self, state: CachedState) -> None:
        """A plan reads it, or cannot."""
        state.exports -= 1

    def add_file(self, state: CachedState, file: str) -> None:
        """This file will hold it."""
        state.files |= {file}

    def mark_written(self, state: CachedState, file: str, digest: bytes = b"") -> None:
        """This file holds it, whole; `digest` of its bytes, where that is known."""
        state.files |= {file}
        state.digest = digest or state.digest
        self._crowded = False
        required = state.requires_row
        state.written |= {file}
        self._weigh(state, required)
        if state.group is self._fixed:
            self._enter(state, self._on_host)

    def remove_file(self, state: CachedState, file: str) -> None:
        """This file holds it no more, or never will."""
        required = state.requires_row
        state.files -= {file}
        state.written -= {file}
        self._weigh(state, required)
        if state.group is self._on_host and state.node is None and not state.written:
            self._enter(state, self._fixed)

    def note_read_error(self, state: CachedState, reason: str) -> None:
        """Why its files cannot be read just now; "": that is tried anew."""
        state.read_error = reason

    def add_name(self, state: CachedState) -> None:
        """One more name refers to it, which pins it."""
        required = state.requires_row
        state.names += 1
        self._weigh(self.pin(state), required)

    def remove_name(self, state: CachedState) -> None:
        """One name less refers to it, which releases it."""
        required = state.requires_row
        state.names -= 1
        self._weigh(state, required)
        self.release(state)

    def has_quota(self, owner: str) -> bool:
        """Whether one more state of the owner's may require a row for as long as it has a name."""
        taken, own = self._requiring_rows.total, self._requiring_rows.of.get(owner, 0)
        return has_room(taken=taken, own=own, more=1, most=self.rows, owner=owner)

    # Failed plans.

    def overwritten(self, places: set[int]) -> set[int]:
        """Given places whose contents are lost, returns them with those that planned moves copy
        them to."""
        for move in self._moves:
            if isinstance(move, Copy) and move.source in places:
                places = places | {move.target}
        return places

    def states_in(self, places: set[int]) -> list[CachedState]:
        """The committed states in these rows."""
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
        """It required a row before, or not."""
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
        """A cached state loses its row."""
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
