"""How many sequences run at once, and how many states the device keeps beside theirs."""

from __future__ import annotations

import dataclasses
import logging

import torch

from engine.config import SHARE_SLOTS, SLOTS, EngineConfig
from engine.device import available_memory

log = logging.getLogger(__name__)

# Share of the free memory for states. The rest is for what a step computes with, for CUDA graphs
# and, on a CPU, for everything else that the machine does.
_MOST_OF_FREE = {"cuda": 0.8, "cpu": 0.5}


def with_slots(
    config: EngineConfig, device: torch.device, *, state_bytes: int, weight_bytes: int = 0
) -> EngineConfig:
    """Return the config with `max_slots` and `share_slots` chosen, if they are None.

    They are SLOTS and SHARE_SLOTS if these states fit in the device's free memory, else as many as
    fit, in the same proportion; given values stay as they are. On a CPU the memory for
    `host_state_bytes` is not free.

    Args:
        config: of one engine.
        device: where states are.
        state_bytes: bytes of one sequence's state.
        weight_bytes: bytes that are still to be taken from the free memory for weights.
    """
    slots, share = config.max_slots, config.share_slots
    if slots is not None and share is not None:
        return config
    free = available_memory(device) - weight_bytes
    if device.type == "cpu":
        free -= config.host_state_bytes or 0
    # one row more is always initial
    rows = max(int(free * _MOST_OF_FREE[device.type]) // state_bytes - 1, 0)
    if slots is None and share is None:
        both = min(SLOTS + SHARE_SLOTS, rows)
        share = both * SHARE_SLOTS // (SLOTS + SHARE_SLOTS)
        slots = max(both - share, 1)
    elif share is not None:
        slots = min(SLOTS, max(rows - share, 1))
    elif slots is not None:
        share = min(SHARE_SLOTS, max(rows - slots, 0))
    assert slots is not None and share is not None
    fewer_slots = config.max_slots is None and slots < SLOTS
    if fewer_slots or (config.share_slots is None and share < SHARE_SLOTS):
        log.warning(
            "max_slots is %d and share_slots %d: more states of %s bytes may not fit in the %s "
            "bytes that %s has free",
            slots, share, f"{state_bytes:,}", f"{free:,}", device,
        )  # fmt: skip
    return dataclasses.replace(config, max_slots=slots, share_slots=share)
