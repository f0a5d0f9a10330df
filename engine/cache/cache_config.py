"""CacheConfig: the configuration of an engine's state cache."""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.cache.storage.snapshot import StateLayout
from engine.protocol.placement import StatePlacement
from engine.state_spec import StateSpec

ANY_LAYOUT = StateLayout("", 2**31, (StateSpec("cell", 1, (1,)),))  # for schedulers without a model


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """The cache configuration of one engine; the disk limits apply only with a StateFileStore."""

    device_rows: int  # state pool rows for cached and named states
    first_row: int  # index of the first of these rows
    host_rows: int = 0  # rows in host memory
    layout: StateLayout = ANY_LAYOUT  # layout of the model's states
    with_whole_chunks: bool = False  # store states only at multiples of SCAN_CHUNK tokens
    tree_bytes: int = 2**28  # memory for the prefix cache's texts
    ttl: float = 86400.0  # default lifetime of a named state, in seconds
    most_states: int = 2**17  # named states of one owner
    disk_bytes: int = 0  # for files of named states
    disk_cache_bytes: int = 0  # for files of the prefix cache
    variant: str = ""  # variant of the model; only the same one reads cached states back
    placement: StatePlacement = field(default_factory=StatePlacement)  # chooses ids of new states

    @property
    def host_row_bytes(self) -> int:
        """Bytes of one row of host memory: a state, with room for a hidden state."""
        return self.layout.bytes + self.layout.hidden_bytes
