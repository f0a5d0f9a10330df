"""DiskTier: the prefix cache's states on disk, for states evicted from memory and for a restart.

A state is written when it is demoted from the device to host memory, so that its row may be reused
at any time. At the end, states on the device are written too. Short texts are not written, because
reading them again is as fast as reading a file. At most WRITES_PER_SECOND are written: under a load
of new prompts the others are evicted as if there were no disk. The text itself stays in memory, in
the prefix cache's tree, and counts towards that tree's limit. On disk the limit is
`disk_cache_bytes`; the least recently used file of the owner with the most files is deleted.

During a reload two engines use one folder. A file's name identifies the text that its state has
read, so each engine may read what the other has written; if a file has vanished, the prompt is read
instead. Only the older engine adds and counts files. The newer one counts again when it is alone,
and then adopts the files that appeared since, a few in every step.
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

LEAST_TOKENS = 256  # shortest text whose state is written
WRITES_PER_SECOND = 100.0
MOST_PENDING = 64  # most reads and writes that may wait for the disk
HEADER = 512  # approximate size of a file's header, in bytes
TAKEN_OVER = 16  # files of a former engine adopted per step


class DiskTier:
    """Files of the states in `cache`; without `file_store` or `disk_cache_bytes` there are none.

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
        """Adopt the files in the folder; `clock` returns seconds."""
        self._tiers = tiers
        self._cache = cache
        self._transfer = transfer
        self._layout = config.layout
        self._file_store = file_store if config.disk_cache_bytes else None
        self._variant = config.variant
        self._most_bytes = config.disk_cache_bytes
        self._clock = clock
        self._next_write = 0.0  # earliest time of the next write, by `clock`
        self._writing: set[CachedState] = set()
        self._sizes: dict[CachedState, int] = {}  # file sizes in bytes
        self._order: FairLru[CachedState] = FairLru()  # states with files, in eviction order
        self.bytes = 0
        self.errors = 0  # files that could not be written or removed
        self._is_mine = False  # no older engine uses the folder any more
        self._left: list[str] = []  # files still to be adopted, the latest first
        if self._file_store is not None:
            tiers.on_demoted = self.offer
            cache.on_evicted = self._on_evicted
            self._reconcile(self._file_store)
            self._take_over(self._file_store, len(self._left))

    def collect(self) -> None:
        """Adopt more of a former engine's files; called in every step."""
        if self._file_store is not None:
            if not self._is_mine and self._file_store.lock.alone:
                try:
                    self._reconcile(self._file_store)
                except ConfigError as error:
                    log.error("%s", error.message)  # the next step tries again
            self._take_over(self._file_store, TAKEN_OVER)

    def offer(self, state: CachedState) -> None:
        """Write a state that was demoted to host memory, unless there is too much to do."""
        now, file_store = self._clock(), self._file_store
        if file_store is None or not self._is_mine or now < self._next_write:
            return
        if file_store.pending < MOST_PENDING and self._write(file_store, state):
            self._next_write = now + 1 / WRITES_PER_SECOND

    def write_all(self) -> None:
        """Write the states that only the device has; called once, at the end."""
        if self._file_store is not None and self._is_mine:
            for state in list(self._tiers.cached_on_device()):
                self._write(self._file_store, state)

    def load(self, state: CachedState) -> None:
        """Load a state that only a file has into a row, if one is free.

        `StateTransfer.collect` reports when it is done. A damaged file is deleted.
        """
        if self._file_store is None:
            return
        most = LENGTH_BYTES + MAX_HEADER_BYTES + state.position * ID_BYTES
        most += prefix_file.most_state_bytes(self._layout)
        self._order.touch(state)
        parse = partial(self._parse, state.has_hidden)
        self._transfer.load_from(self._file_store, state, most, parse, self._delete)

    def _parse(self, with_hidden: bool, content: bytes) -> bytes:
        found = prefix_file.parse(content, self._variant, self._layout)
        if len(found) != prefix_file.state_bytes(with_hidden, self._layout):
            raise StateMalformed("the file was replaced by another one")
        return found

    def touch(self, state: CachedState) -> None:
        """Make the state's file the most recently used of its owner."""
        self._order.touch(state)

    def _write(self, file_store: StateFileStore, state: CachedState) -> bool:
        """Export a state, then write it; return False if it is not worth writing."""
        if state.position < LEAST_TOKENS or state.files or state in self._writing:
            return False
        scope = None if state.node is None else state.node.tree.scope
        # states that follow a named state are short-lived
        if scope is None or scope[2] is not None:
            return False
        self._writing.add(state)
        then = partial(self._on_exported, file_store, state, scope)
        self._transfer.export(state, then, state.has_hidden)
        return True

    def _on_exported(
        self, file_store: StateFileStore, state: CachedState, scope: Scope, content: bytes | None
    ) -> None:
        node = state.node
        if content is None or node is None:
            self._writing.discard(state)
            return
        head = Head(scope[0], scope[1], node.text(), state.has_hidden, 0)
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
            size = prefix_file.state_bytes(state.has_hidden, self._layout)
            self._count(state, HEADER + state.position * ID_BYTES + size)
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
        """Delete the state's file, and evict the state if it is nowhere else."""
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
        """Compare the folder's files with the known ones: find new files, drop vanished ones.

        Raises ConfigError if the folder cannot be listed.
        """
        # asked first, so that the last files of an older engine are found
        alone = file_store.lock.alone
        found = file_store.list_files(self._variant, PREFIX_FOLDER)
        found.sort(key=lambda one: one[1].st_mtime, reverse=True)
        known = {name: state for state in self._sizes for name in state.files}
        self._left = [name for name, _ in found if known.pop(name, None) is None]
        self._is_mine = alone
        for state in known.values():
            self._drop(state)

    def _take_over(self, file_store: StateFileStore, most: int) -> None:
        """Adopt up to `most` files, the least recently written first."""
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
                raise StateMalformed("the file's name or size does not match its header")
        except OSError as error:
            log.warning("%s: cannot be read and is left alone: %s", name, error)
            return
        except StateMalformed as error:
            log.warning("%s: not adopted, and deleted: %s", name, error.message)
            self._delete(name)  # no engine can use it
            return
        read_tokens = len(head.text) // ID_BYTES
        state = CachedState(read_tokens, head.owner, head.with_hidden, files={name}, written={name})
        there = self._cache.restore((head.owner, head.salt, None), head.text, state)
        if there is state:
            self._count(state, head.bytes)
        elif name not in there.files:
            self._delete(name)  # the text was read again in the meantime
