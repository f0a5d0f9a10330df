"""A scheduler of its own, with a cache, for tests without an engine."""

from __future__ import annotations

from typing import Any

from engine.cache.cache_config import CacheConfig
from engine.cache.state_manager import StateCacheManager
from engine.scheduler.scheduler import Scheduler, SchedulerConfig


def make_scheduler(
    slots: int = 4, share_slots: int = 4, with_whole_chunks: bool = False, **config: Any
) -> Scheduler:
    """`share_slots` rows for cached states; `config` is what differs from a small SchedulerConfig.
    It serves a vocabulary of ten tokens without any that ends a text."""
    options: dict[str, Any] = {
        "vocab_size": 10,
        "eos_token_ids": (),
        "state_bytes": 10,
        "max_step_tokens": 512,
        "max_waiting": 100,
    }
    cache = CacheConfig(
        device_rows=share_slots, first_row=slots, with_whole_chunks=with_whole_chunks
    )
    return Scheduler(SchedulerConfig(slots=slots, **(options | config)), StateCacheManager(cache))
