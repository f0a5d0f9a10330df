"""TieredStateStore: where kept states lie: rows of the device's pool, then rows of main memory,
then files.

A kept state never changes once it stands, so whoever needs it holds a reference: a node of the
prefix cache, a name, a sequence that starts from it. What only the cache holds may go whenever room
is needed; what has a name stays until its name goes, but needs no row while a file has it. Who has
the most gives way first (`fair_lru`), and no owner's named states take rows that none is left of.

Places are integers: a row of the device's pool, or ~row of main memory. Moves between them are
`Copy`s, carried out in their order before a round admits anybody. A row that a round admits from is
not given to another state within that round.
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
# Of states that only the prefix cache holds, those that leave the device for the sake of others,
# for main memory or, without that, for good: so many for each plan, but a few plans' at once, which
# takes hardly longer. Under a load of new prompts, of which each leaves two, more would cost more
# than they may save; and one that would only take the place of another, as good as it, is not kept
# at all.
MOVED_PER_PLAN = 4
MOVED_AT_ONCE = 16


class CachedState(msgspec.Struct, eq=False):
    """One state, after `position` tokens."""

    position: int
    owner: str = ""
    place: int = _NOWHERE
    references: int = 0
    whole: bool = False  # read from the beginning in whole chunks: as a miss would read it
    logits: bool = False  # its row holds those after its last token
    node: Any = None  # of the prefix cache
    among: FairLru[CachedState] | set[CachedState] | None = (
        None  # those of the tier that it is counted with
    )
    files: AbstractSet[str] = frozenset()  # that hold it, or will
    written: AbstractSet[str] = frozenset()  # those of them that do
    digest: bytes = b""  # of the state, as of `snapshot`, where a file has it or will
    trouble: str = ""  # why none could be read when this was last tried
    names: int = 0  # that refer to it
    pinned: bool = False  # it has names, and no file: it needs its row
    wanted: int = 0  # exports that no plan has yet: until then it stays in a row

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
        """Nobody but the prefix cache holds it."""
        return self.node is not None and self.references == 1


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
    """`forget` is told of a cached state that has to go, and releases it; the cache sets it."""

    def __init__(self, device_rows: int, first_row: int, host_rows: int) -> None:
        self.rows = device_rows + host_rows
        self._device = SlotAllocator(device_rows, first_row)
        self._host = SlotAllocator(host_rows)
        self._on_device: FairLru[CachedState] = FairLru()
        self._on_host: FairLru[CachedState] = FairLru()  # those that may lose their row
        self._on_disk: FairLru[CachedState] = FairLru()  # cached states that only a file has
        self._fixed: set[CachedState] = set()  # the others in main memory
        self.on_host: Callable[[CachedState], None] = lambda kept: None  # told of cached ones there
        self._pinned = Weights()
        self.forget: Callable[[CachedState], None] = lambda kept: None
        self._busy: set[int] = set()  # places that the plan being made reads or writes later
        self._allowance = _Allowance()
        self._crowded = False  # since there was no row for the cache, nothing has come free
        self._late: list[int] = []  # those of them that nobody needs after it
        self.moves: list[Copy | Load] = []  # that the next plan has to begin with
        self.evictions: Counter[str] = Counter()

    @property
    def device_used(self) -> int:
        return self._device.used

    @property
    def host_used(self) -> int:
        return self._host.used

    def begin_plan(self) -> None:
        """What the plan before this one reads and writes is done by the time this one begins."""
        self._allowance.grow()
        self._crowded = False
        self._busy.clear()
        late, self._late = self._late, []
        for place in late:
            self._give_back(place)

    @property
    def crowded(self) -> bool:
        """For the cache alone there is no row just now."""
        return self._crowded or (
            self._allowance.used_up and self._device.count > 0 and not self._device.free
        )

    def put(self, kept: CachedState, for_cache: bool = False) -> bool:
        """Finds a row for a new state, that nothing has been copied to yet; whether there is one.
        It stands, for others to be moved, once `stand` says so. For the cache alone there may be
        none at times when many are looked for."""
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
        kept.place = place
        self._busy.add(place)
        return True

    def stand(self, kept: CachedState) -> None:
        """Its row holds it, as far as later plans are concerned."""
        if kept.on_device:
            self._enter(kept, self._on_device)
            self._crowded = self._crowded and kept.place in self._busy
        elif kept.node is not None or kept.written:
            self._enter(kept, self._on_host)
            if kept.node is not None and not kept.files:
                self.on_host(kept)
        else:
            self._enter(kept, self._fixed)

    def _enter(self, kept: CachedState, among: FairLru[CachedState] | set[CachedState]) -> None:
        if kept.among is not among:
            self._withdraw(kept)
            kept.among = among
            among.add(kept)

    def _withdraw(self, kept: CachedState) -> None:
        if kept.among is not None:
            kept.among.discard(kept)
            kept.among = None

    def rest(self, kept: CachedState) -> None:
        """A cached state needs no row: a file has it."""
        self.vacate(kept)
        self._enter(kept, self._on_disk)

    def cached_on_device(self) -> Iterable[CachedState]:
        return (kept for kept in self._on_device if kept.node is not None)

    def note_written(self, kept: CachedState, file: str) -> None:
        """This file of it is whole."""
        kept.written |= {file}
        self._crowded = False
        self._weigh(kept)
        if kept.among is self._fixed:
            self._enter(kept, self._on_host)

    def note_lost(self, kept: CachedState, file: str) -> None:
        """This file has it no more, or never will."""
        kept.files -= {file}
        kept.written -= {file}
        self._weigh(kept)
        if kept.among is self._on_host and kept.node is None and not kept.written:
            self._enter(kept, self._fixed)

    def note_name(self, kept: CachedState, more: int = 1) -> None:
        """One more name refers to it, or one less."""
        kept.names += more
        self._weigh(kept)

    def has_part(self, owner: str) -> bool:
        """Whether one more state of the owner's may need a row for as long as it has a name."""
        taken, own = self._pinned.total, self._pinned.of.get(owner, 0)
        return has_room(taken=taken, own=own, more=1, most=self.rows, owner=owner)

    def _weigh(self, kept: CachedState) -> None:
        pinned = kept.names > 0 and not kept.written
        if pinned != kept.pinned:
            self._pinned.add(kept.owner, 1 if pinned else -1)
            kept.pinned = pinned

    def use(self, kept: CachedState) -> int:
        """The place to admit from, in the plan being made. What is much used comes to the device.
        Its state is in a row."""
        self.touch(kept)
        stands = kept.among is self._on_host or kept.among is self._fixed
        if stands and self._device.count and kept.place not in self._busy:
            self._busy.add(kept.place)  # it must not become the room for what makes room
            row = self._device_row(for_cache=True)  # forgets nothing for that
            self._busy.discard(kept.place)
            if row is not None:
                self._move(kept, row)
        self._busy.add(kept.place)
        return kept.place

    def touch(self, kept: CachedState) -> None:
        """It was used."""
        if isinstance(kept.among, FairLru):
            kept.among.touch(kept)

    def hold(self, kept: CachedState) -> CachedState:
        """One more holds it."""
        kept.references += 1
        return kept

    def release(self, kept: CachedState) -> None:
        """One holds it no more; with the last one it goes."""
        kept.references -= 1
        if kept.references == 0:
            self.vacate(kept)
        else:
            self._crowded = False

    def vacate(self, kept: CachedState) -> None:
        """It needs no row any more."""
        self._withdraw(kept)
        if kept.has_row:
            self._give_back(kept.place)
            kept.place = _NOWHERE

    def make_room(self, owner: str) -> bool:
        """Forgets the owner's cached state that was used the longest ago, or if there is none
        another one's."""
        tiers = ("disk", self._on_disk), ("host", self._on_host), ("device", self._on_device)
        for name, tier in tiers:
            for kept in chain(tier.of(owner), tier):
                if kept.only_cached and kept.place not in self._busy:
                    self.evictions[name] += 1
                    self.forget(kept)
                    return True
        return False

    def tainted(self, places: set[int]) -> set[int]:
        """These rows, which hold nothing that can be relied on any more, and those that they are
        about to be copied to."""
        for move in self.moves:
            if isinstance(move, Copy) and move.source in places:
                places = places | {move.target}
        return places

    def lost(self, places: set[int]) -> list[CachedState]:
        """The states in these rows."""
        tiers = (*self._on_device, *self._on_host, *self._fixed) if places else ()
        return [kept for kept in tiers if kept.place in places]

    def _device_row(self, for_cache: bool = False) -> int | None:
        if self._device.free:
            return self._device.allocate()
        for kept in self._on_device:
            if kept.place in self._busy:
                continue
            row, only_cached = None, kept.only_cached
            if not only_cached or self._allowance.spend():
                row = self._host_row()
            elif for_cache:
                return None
            if row is not None:
                self.evictions["device"] += 1
                self._move(kept, row)
            elif only_cached:
                self.evictions["device"] += 1
                row, kept.place = kept.place, _NOWHERE
                self._give_way(kept)
                return row
            elif kept.written and not kept.wanted:
                self.evictions["device"] += 1
                self.vacate(kept)
            else:
                continue
            return self._device.allocate()
        return None

    def _give_way(self, kept: CachedState) -> None:
        """A cached state loses its row."""
        if kept.written:
            self.rest(kept)
        else:
            self.forget(kept)

    def _host_row(self) -> int | None:
        if not self._host.count:
            return None
        if not self._host.free:
            for kept in self._on_host:
                if kept.place in self._busy:
                    continue
                if kept.only_cached:
                    self._give_way(kept)
                elif kept.written and not kept.wanted:
                    self.vacate(kept)
                else:
                    continue
                self.evictions["host"] += 1
                break
        return ~self._host.allocate() if self._host.free else None

    def _move(self, kept: CachedState, place: int) -> None:
        self.moves.append(Copy(kept.place, place))
        self._withdraw(kept)
        self._give_back(kept.place)
        kept.place = place
        self.stand(kept)

    def _give_back(self, place: int) -> None:
        if place in self._busy:
            self._late.append(place)
        elif place >= 0:
            self._device.release(place)
            self._crowded = False
        else:
            self._host.release(~place)
