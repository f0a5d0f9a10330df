"""EngineConfig: integers have bounds, None only where it means "chosen"; rows of host memory."""

from __future__ import annotations

import pytest

from engine.cache.cache_config import CacheConfig
from engine.cache.storage.snapshot import StateLayout
from engine.config import EngineConfig, host_rows
from engine.errors import ConfigError
from engine.state_spec import StateSpec

BOUNDS = {
    "max_slots": (1, 2**20),
    "max_step_tokens": (1, 2**24),
    "max_waiting": (0, 2**31),
    "max_waiting_tokens": (1, 2**40),
    "share_slots": (0, 2**20),
    "host_state_bytes": (0, 2**60),
    "disk_state_bytes": (0, 2**60),
    "max_states": (0, 2**40),
    "threads": (1, 2**24),
}
CHOSEN = {
    "max_step_tokens",
    "host_state_bytes",
    "threads",
    "max_slots",
    "share_slots",
}  # where they are None


@pytest.mark.parametrize("name", BOUNDS)
def test_integers_stay_within_their_bounds(name: str) -> None:
    least, most = BOUNDS[name]
    for value in (least, most):
        assert getattr(EngineConfig(**{name: value}), name) == value  # type: ignore[arg-type]
    wrong = [least - 1, most + 1, True, float(most), "1", *([] if name in CHOSEN else [None])]
    for value in wrong:
        with pytest.raises(ConfigError, match=f"{name} is .*from {least} to {most}") as caught:
            EngineConfig(**{name: value})  # type: ignore[arg-type]
        assert caught.value.param == name


@pytest.mark.parametrize("name", sorted(CHOSEN))
def test_what_is_chosen_for_the_device_may_be_left_open(name: str) -> None:
    assert getattr(EngineConfig(**{name: None}), name) is None  # type: ignore[arg-type]


def test_a_row_of_host_memory_has_a_state_and_a_hidden_state() -> None:
    """At 113 M parameters, whatever the vocabulary."""
    state, width = 4 * 12 * 1152, 768
    config = EngineConfig(host_state_bytes=2**30)
    assert host_rows(config, state_bytes=state, d_model=width) == 2**30 // 58_368 == 18_396
    layout = StateLayout("", 32_000, (StateSpec("cell", 12, (1152,)),), width)
    cache = CacheConfig(device_rows=0, first_row=0, layout=layout)
    assert cache.host_row_bytes == 58_368
    assert host_rows(EngineConfig(), state_bytes=state, d_model=width) == 0
