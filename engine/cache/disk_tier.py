"""DiskTier: cached states on disk, where what leaves main memory can be had again, and what a
restart finds.

A state is written when it comes to main memory from the device, so that it may lose its row at any
time; at the end, those on the device too. Short texts are not written: they are read again as
quickly as a file. Nor is more than WRITES_PER_SECOND: under a load of new prompts the others are
forgotten as if there were no disk. In memory remains the text, in the prefix cache's trie, whose
bound counts it; on disk, `most_bytes` do, and the least recently used of whoever has the most
files goes.

Two engines use a folder for the time of a reload. A file's name says what text it stands after, so
each may read what the other has written, and if a file is gone the prompt is read; but only the
older engine adds to them and has the count. The other one counts anew when it is alone, and takes
over what has come since, some files with every round.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable

from engine.cache.fair_lru import FairLru
from engine.cache.prefix_cache import PrefixCache
from engine.cache.storage import prefix_file
from engine.cache.storage.file_store import StateFileStore
from engine.cache.storage.prefix_file import Head
from engine.cache.storage.snapshot import StateLayout
from engine.cache.storage.state_folder import PREFIX_FOLDER
from engine.cache.storage.worker_threads import Result
from engine.cache.tiered_store import CachedState, TieredStateStore
from engine.cache.transfer import StateTransfer
from engine.errors import ConfigError, StateMalformed
from engine.protocol.token_ids import ID_BYTES
from engine.safetensors_container import LENGTH_BYTES, MAX_HEADER_BYTES

log = logging.getLogger(__name__)

LEAST_TOKENS = 256  # of a text that is written
WRITES_PER_SECOND = 100.0
MOST_PENDING = 64  # things that the shelf has still to do
HEADER = 512  # about what a file's has, in bytes
TAKEN_OVER = 16  # files of a former engine with a round


class DiskTier:
    """The third tier of `cache`; `shelf` None: there is none."""

    def __init__(
        self,
        tiers: TieredStateStore,
        cache: PrefixCache,
        traffic: StateTransfer,
        shape: StateLayout,
        shelf: StateFileStore | None,
        variant: str,
        most_bytes: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._tiers = tiers
        self._cache = cache
        self._traffic = traffic
        self._shape = shape
        self._shelf = shelf if most_bytes else None
        self._variant = variant
        self._most_bytes = most_bytes
        self._clock = clock
        self._next = 0.0  # when another may be written
        self._writing: set[CachedState] = set()
        self._sizes: dict[CachedState, int] = {}  # of files, in bytes
        self._order: FairLru[CachedState] = FairLru()  # of them
        self.bytes = 0
        self._is_mine = False  # no older engine uses the folder any more
        self._left: list[str] = []  # that is still to be taken over; the latest first
        if self._shelf is not None:
            tiers.on_host = self.offer
            cache.on_forgotten = self._forgotten
            self._look_around(self._shelf)
            self._take_over(self._shelf, len(self._left))

    def collect(self) -> None:
        """Takes over more of what a former engine has left."""
        if self._shelf is not None:
            if not self._is_mine and self._shelf.lock.alone:
                try:
                    self._look_around(self._shelf)
                except ConfigError as error:
                    log.error("%s", error.message)  # the next round tries again
            self._take_over(self._shelf, TAKEN_OVER)

    def offer(self, kept: CachedState) -> None:
        """A cached state has come to main memory."""
        now, shelf = self._clock(), self._shelf
        if shelf is None or not self._is_mine or now < self._next or shelf.pending >= MOST_PENDING:
            return
        if self._write(shelf, kept):
            self._next = now + 1 / WRITES_PER_SECOND

    def save_all(self) -> None:
        """Nothing more will come: what the device alone has is written too."""
        if self._shelf is not None and self._is_mine:
            for kept in list(self._tiers.cached_on_device()):
                self._write(self._shelf, kept)

    def fetch(self, kept: CachedState) -> None:
        """Brings a state that a file alone has back to a row, where that can be;
        `StateTransfer.collect` tells when. A file that is damaged goes."""
        if self._shelf is not None:
            most = LENGTH_BYTES + MAX_HEADER_BYTES + kept.position * ID_BYTES
            most += self._shape.bytes + 4 * self._shape.vocab_size
            self._order.touch(kept)
            logits = kept.logits
            self._traffic.load_from(
                self._shelf,
                kept,
                most,
                lambda content: self._parse(logits, content),
                self._shelf.delete,  # nobody can want it
            )

    def _parse(self, logits: bool, content: bytes) -> bytes:
        state = prefix_file.parse(content, self._variant, self._shape)
        if len(state) != self._shape.bytes + (4 * self._shape.vocab_size if logits else 0):
            raise StateMalformed("the file is another one than it was")
        return state

    def used(self, kept: CachedState) -> None:
        """Somebody has started from it."""
        self._order.touch(kept)

    def _write(self, shelf: StateFileStore, kept: CachedState) -> bool:
        if kept.position < LEAST_TOKENS or kept.files or kept in self._writing:
            return False
        scope = None if kept.node is None else kept.node.trie.scope
        if scope is None or scope[2] is not None:  # what follows a named state is short-lived
            return False
        self._writing.add(kept)

        def fetched(state: bytes | None) -> None:
            node = kept.node
            if state is None or node is None:
                self._writing.discard(kept)
                return
            head = Head(scope[0], scope[1], node.text(), kept.logits, 0)
            name = self._name(head)
            kept.files |= {name}
            shelf.write(
                name, lambda: prefix_file.write(head, state, self._variant), lambda result:
                self._written(shelf, kept, name, result)
            )  # fmt: skip

        self._traffic.fetch(kept, fetched, logits=kept.logits)
        return True

    def _written(self, shelf: StateFileStore, kept: CachedState, name: str, result: Result) -> None:
        self._writing.discard(kept)
        if not isinstance(result, bytes):
            self._tiers.note_lost(kept, name)
        elif name in kept.files:
            self._tiers.note_written(kept, name)
            size = HEADER + kept.position * ID_BYTES + self._shape.bytes
            self._count(kept, size + (4 * self._shape.vocab_size if kept.logits else 0))
            self._trim()

    def _count(self, kept: CachedState, size: int) -> None:
        self._sizes[kept] = size
        self._order.add(kept)
        self.bytes += size

    def _trim(self) -> None:
        while self.bytes > self._most_bytes:
            kept = next(iter(self._order))
            self._tiers.evictions["disk"] += 1
            self._drop(kept)

    def _drop(self, kept: CachedState) -> None:
        """Its file goes, and with it what lies nowhere else."""
        self._forgotten(kept)
        if kept.node is not None and not kept.has_row:
            self._cache.forget(kept)

    def _forgotten(self, kept: CachedState) -> None:
        self.bytes -= self._sizes.pop(kept, 0)
        self._order.discard(kept)
        for name in list(kept.files):
            self._tiers.note_lost(kept, name)
            if self._shelf is not None:
                self._shelf.delete(name)

    def _name(self, head: Head) -> str:
        digest = hashlib.blake2b(head.text, digest_size=24).hexdigest()
        return (
            f"{PREFIX_FOLDER}/{StateFileStore.name(self._variant, head.owner, head.salt, digest)}"
        )

    def _look_around(self, shelf: StateFileStore) -> None:
        """What is there that is not known, and what is not there any more? Raises ConfigError."""
        alone = shelf.lock.alone  # asked first: what an older engine writes last is found
        found = shelf.names(self._variant, PREFIX_FOLDER)
        found.sort(key=lambda one: one[1].st_mtime, reverse=True)
        known = {name: kept for kept in self._sizes for name in kept.files}
        self._left = [name for name, _ in found if known.pop(name, None) is None]
        self._is_mine = alone
        for kept in known.values():
            self._drop(kept)

    def _take_over(self, shelf: StateFileStore, most: int) -> None:
        """Up to so many files, the least recently written first."""
        for _ in range(min(most, len(self._left))):
            name = self._left.pop()
            if not shelf.changing(name):
                self._take_in(shelf, name)
        if self._is_mine:
            self._trim()

    def _take_in(self, shelf: StateFileStore, name: str) -> None:
        most = self._most_bytes
        try:
            content, status = shelf.look(
                name, most, lambda file: prefix_file.read_head(file, most)
            )  # fmt: skip
            head = prefix_file.parse_head(content, self._variant, self._shape)
            if self._name(head) != name or head.bytes != status.st_size:
                raise StateMalformed("the file has another name or size than it should")
        except OSError as error:
            log.warning("%s: cannot be read, and is left alone: %s", name, error)
            return
        except StateMalformed as error:
            log.warning("%s: not taken over: %s", name, error.message)
            shelf.delete(name)  # nobody can want it
            return
        kept = CachedState(
            len(head.text) // ID_BYTES, head.owner, logits=head.with_logits, files={name},
            written={name},
        )  # fmt: skip
        there = self._cache.restore((head.owner, head.salt, None), head.text, kept)
        if there is kept:
            self._count(kept, head.bytes)
        elif name not in there.files:
            shelf.delete(name)  # the text has been read again meanwhile
