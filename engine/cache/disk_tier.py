"""DiskTier: the prefix cache's states on disk, for what leaves main memory and for a restart.

A state is written when it comes to main memory from the device, so that it may lose its row at any
time; at the end, those on the device too. Short texts are not written: they are read again as
quickly as a file. Nor are more than WRITES_PER_SECOND: under a load of new prompts the others are
evicted as if there were no disk. The text remains in memory, in the prefix cache's tree, whose
bound counts it. On disk `disk_cache_bytes` is the bound, and the least recently used file of the
owner with the most goes.

Two engines use a folder for the time of a reload. A file's name says what text its state has read,
so each may read what the other has written, and if a file is gone the prompt is read; but only the
older engine adds files and counts them. The other one counts anew when it is alone, and takes over
what has come since, some files with every step.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable
from functools import partial

from engine.cache.cache_config import CacheConfig
from engine.cache.fair_lru import FairLru
from engine.cache.prefix_cache import PrefixCache, Scope
from engine.cache.storage import prefix_file
from engine.cache.storage.file_store import StateFileStore
from engine.cache.storage.prefix_file import Head
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
MOST_PENDING = 64  # reads and writes that wait for the disk
HEADER = 512  # bytes: about what a file's has
TAKEN_OVER = 16  # files of a former engine with a step


class DiskTier:
    """The files of `cache`'s states; without a `file_store` and `disk_cache_bytes` there are none.

    Files are added on demotion (`tiers.on_demoted`) and removed on eviction (`cache.on_evicted`).
    """

    def __init__(
        self,
        config: CacheConfig,
        tiers: TieredStateStore,
        cache: PrefixCache,
        transfer: StateTransfer,
        file_store: StateFileStore | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`clock` is in seconds."""
        self._tiers = tiers
        self._cache = cache
        self._transfer = transfer
        self._layout = config.layout
        self._file_store = file_store if config.disk_cache_bytes else None
        self._variant = config.variant
        self._most_bytes = config.disk_cache_bytes
        self._clock = clock
        self._next_write = 0.0  # when another state may be written, by `clock`
        self._writing: set[CachedState] = set()
        self._sizes: dict[CachedState, int] = {}  # of files, in bytes
        self._order: FairLru[CachedState] = FairLru()  # of them
        self.bytes = 0
        self.errors = 0  # files that could not be written or removed
        self._is_mine = False  # no older engine uses the folder any more
        self._left: list[str] = []  # files still to be taken over, the latest first
        if self._file_store is not None:
            tiers.on_demoted = self.offer
            cache.on_evicted = self._on_evicted
            self._reconcile(self._file_store)
            self._take_over(self._file_store, len(self._left))

    def collect(self) -> None:
        """Takes over more of the files that a former engine has left; called with every step."""
        if self._file_store is not None:
            if not self._is_mine and self._file_store.lock.alone:
                try:
                    self._reconcile(self._file_store)
                except ConfigError as error:
                    log.error("%s", error.message)  # the next step tries again
            self._take_over(self._file_store, TAKEN_OVER)

    def offer(self, state: CachedState) -> None:
        """A cached state has come to main memory: it is written, unless there is too much to do."""
        now, file_store = self._clock(), self._file_store
        if file_store is None or not self._is_mine or now < self._next_write:
            return
        if file_store.pending < MOST_PENDING and self._write(file_store, state):
            self._next_write = now + 1 / WRITES_PER_SECOND

    def write_all(self) -> None:
        """Writes the states that the device alone has; nothing more will come."""
        if self._file_store is not None and self._is_mine:
            for state in list(self._tiers.cached_on_device()):
                self._write(self._file_store, state)

    def load(self, state: CachedState) -> None:
        """Brings a state that a file alone has back to a row, where there is one;
        `StateTransfer.collect` tells when. A file that is damaged is deleted."""
        if self._file_store is None:
            return
        most = LENGTH_BYTES + MAX_HEADER_BYTES + state.position * ID_BYTES
        most += self._layout.bytes + 4 * self._layout.vocab_size
        self._order.touch(state)
        parse = partial(self._parse, state.has_logits)
        self._transfer.load_from(self._file_store, state, most, parse, self._delete)

    def _parse(self, with_logits: bool, content: bytes) -> bytes:
        found = prefix_file.parse(content, self._variant, self._layout)
        if len(found) != self._layout.bytes + (4 * self._layout.vocab_size if with_logits else 0):
            raise StateMalformed("the file is another one than it was")
        return found

    def touch(self, state: CachedState) -> None:
        """Makes its file the most recently used of its owner's."""
        self._order.touch(state)

    def _write(self, file_store: StateFileStore, state: CachedState) -> bool:
        """Exports a state and then writes it; whether it is worth that."""
        if state.position < LEAST_TOKENS or state.files or state in self._writing:
            return False
        scope = None if state.node is None else state.node.tree.scope
        if scope is None or scope[2] is not None:  # what follows a named state is short-lived
            return False
        self._writing.add(state)
        then = partial(self._on_exported, file_store, state, scope)
        self._transfer.export(state, then, state.has_logits)
        return True

    def _on_exported(
        self, file_store: StateFileStore, state: CachedState, scope: Scope, content: bytes | None
    ) -> None:
        node = state.node
        if content is None or node is None:
            self._writing.discard(state)
            return
        head = Head(scope[0], scope[1], node.text(), state.has_logits, 0)
        name = self._name(head)
        self._tiers.add_file(state, name)
        write = partial(prefix_file.write, head, content, self._variant)
        file_store.write(name, write, partial(self._on_written, state, name))

    def _on_written(self, state: CachedState, name: str, result: Result) -> None:
        self._writing.discard(state)
        if not isinstance(result, bytes):
            self.errors += 1
            self._tiers.remove_file(state, name)
        elif name in state.files:
            self._tiers.mark_written(state, name)
            size = HEADER + state.position * ID_BYTES + self._layout.bytes
            self._count(state, size + (4 * self._layout.vocab_size if state.has_logits else 0))
            self._trim()

    def _count(self, state: CachedState, size: int) -> None:
        self._sizes[state] = size
        self._order.add(state)
        self.bytes += size

    def _trim(self) -> None:
        while self.bytes > self._most_bytes:
            state = next(iter(self._order))
            self._tiers.evictions["disk"] += 1
            self._drop(state)

    def _drop(self, state: CachedState) -> None:
        """Its file goes, and with it what lies nowhere else."""
        self._on_evicted(state)
        if state.node is not None and not state.has_row:
            self._cache.evict(state)

    def _on_evicted(self, state: CachedState) -> None:
        self.bytes -= self._sizes.pop(state, 0)
        self._order.discard(state)
        for name in list(state.files):
            self._tiers.remove_file(state, name)
            self._delete(name)

    def _delete(self, name: str) -> None:
        if self._file_store is not None:
            self._file_store.delete(name, self._on_deleted)

    def _on_deleted(self, result: Result) -> None:
        self.errors += not isinstance(result, bytes)

    def _name(self, head: Head) -> str:
        digest = hashlib.blake2b(head.text, digest_size=24).hexdigest()
        return (
            f"{PREFIX_FOLDER}/{StateFileStore.name(self._variant, head.owner, head.salt, digest)}"
        )

    def _reconcile(self, file_store: StateFileStore) -> None:
        """What is there that is not known, and what is not there any more? Raises ConfigError."""
        alone = file_store.lock.alone  # asked first: what an older engine writes last is found
        found = file_store.list_files(self._variant, PREFIX_FOLDER)
        found.sort(key=lambda one: one[1].st_mtime, reverse=True)
        known = {name: state for state in self._sizes for name in state.files}
        self._left = [name for name, _ in found if known.pop(name, None) is None]
        self._is_mine = alone
        for state in known.values():
            self._drop(state)

    def _take_over(self, file_store: StateFileStore, most: int) -> None:
        """Up to so many files, the least recently written first."""
        for _ in range(min(most, len(self._left))):
            name = self._left.pop()
            if not file_store.changing(name):
                self._take_in(file_store, name)
        if self._is_mine:
            self._trim()

    def _take_in(self, file_store: StateFileStore, name: str) -> None:
        most = self._most_bytes
        try:
            read = partial(prefix_file.read_head, most=most)
            content, status = file_store.read_now(name, most, read)
            head = prefix_file.parse_head(content, self._variant, self._layout)
            if self._name(head) != name or head.bytes != status.st_size:
                raise StateMalformed("the file has another name or size than it should")
        except OSError as error:
            log.warning("%s: cannot be read, and is left alone: %s", name, error)
            return
        except StateMalformed as error:
            log.warning("%s: not taken over: %s", name, error.message)
            self._delete(name)  # nobody can want it
            return
        read_tokens = len(head.text) // ID_BYTES
        state = CachedState(read_tokens, head.owner, head.with_logits, files={name}, written={name})
        there = self._cache.restore((head.owner, head.salt, None), head.text, state)
        if there is state:
            self._count(state, head.bytes)
        elif name not in there.files:
            self._delete(name)  # the text has been read again meanwhile
