"""CacheConfig: what an engine's cache of states is made with."""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.cache.storage.snapshot import StateLayout
from engine.protocol.placement import StatePlacement

ANY_LAYOUT = StateLayout("", 2**31, (1, 1), None)  # for schedulers without a model


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """Of one engine. Without a StateFileStore beside it, the disk's bounds mean nothing."""

    device_rows: int  # of the state pool, for cached and named states
    first_row: int  # of these rows
    host_rows: int = 0  # of main memory
    layout: StateLayout = ANY_LAYOUT  # of the model's states
    with_whole_chunks: bool = False  # states are stored at multiples of SCAN_CHUNK tokens alone
    tree_bytes: int = 2**28  # of memory for the prefix cache's texts
    ttl: float = 86400.0  # seconds that a named state stays unless its request says
    most_states: int = 2**17  # with names, for one owner
    disk_bytes: int = 0  # of named states' files
    disk_cache_bytes: int = 0  # of the prefix cache's files
    variant: str = ""  # of the model: cached states are read back by the same variant alone
    placement: StatePlacement = field(default_factory=StatePlacement)  # of new states' ids

    @property
    def host_row_bytes(self) -> int:
        """Of one row of main memory: a state and its logits."""
        return self.layout.bytes + 4 * self.layout.vocab_size
