"""What one turn costs a replica and the store: measured figures, which --costs replaces."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Costs:
    """Costs of one turn. Seconds of the store are those of a shard's only thread.

    The defaults are `shakespeare-mingru` on two CPU cores and a Redis with appendfsync always:
    `loadtest/results/cluster.md` says how and when they were measured.
    """

    state_bytes: float = 23_548  # a named state's file, as it travels
    row_bytes: float = 24_576  # of a replica's memory, for a state
    stored_bytes: float = 25_195  # of a shard's memory, for a session, without its owner's index
    index_bytes: float = 310  # of a shard's memory, for a session in its owner's index
    open_seconds: float = 90e-6  # look a state up and lock it; its content is not needed
    read_seconds: float = 150e-6  # the same, and its content is sent
    write_seconds: float = 200e-6  # store a state, sync excluded
    admit_seconds: float = 85e-6  # keep the owner's index
    renew_seconds: float = 53e-6  # prolong a lock, every two seconds of a turn
    sync_seconds: float = 2.3e-3  # a sync of the shard's log; one for all that came together
    client_seconds: float = 0.12e-3  # of the replica, for a call of the store
    network_seconds: float = 0.2e-3  # there and back; assumed
    turn_seconds: float = 4.6  # a turn with all slots taken, in its slot
    slots: float = 32  # turns at a time, of a replica

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise ValueError(f"{name} is {value!r}; allowed: a number")
            may_be_zero = name in ("sync_seconds", "network_seconds", "client_seconds")
            if not math.isfinite(value) or value < 0 or (value == 0 and not may_be_zero):
                least = "0 or more" if may_be_zero else "more than 0"
                raise ValueError(f"{name} is {value}; allowed: {least}")
        if self.slots != int(self.slots):
            raise ValueError(f"slots is {self.slots}; allowed: a whole number")

    @classmethod
    def read(cls, path: Path) -> Costs:
        """Read costs from a JSON object; those that it lacks are the defaults.

        Raises ValueError, or OSError if there is no such file.
        """
        try:
            found: Any = json.loads(path.read_text())
        except ValueError as error:
            raise ValueError(f"{path} is no JSON: {error}") from None
        if not isinstance(found, dict):
            raise ValueError(f"{path} has to hold a JSON object of costs")
        names = [one.name for one in fields(cls)]
        if unknown := sorted(set(found) - set(names)):
            raise ValueError(f"{path}: unknown {', '.join(unknown)}; allowed: {', '.join(names)}")
        try:
            return replace(cls(), **found)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None


PRESETS = {
    "cpu": Costs(),
    # The 113 M model on one H200, answers of 128 tokens: 1,295,187 tokens/s with 1,024 slots. The
    # store is the same Redis.
    "h200": Costs(
        state_bytes=55_800,
        row_bytes=58_368,
        stored_bytes=57_923,
        read_seconds=194e-6,
        write_seconds=303e-6,
        turn_seconds=0.101,
        slots=1024,
    ),
}


def costs_of(name: str) -> Costs:
    """Return the costs of a preset, or those in the file of this name.

    Raises ValueError, or OSError if there is no such file.
    """
    return PRESETS[name] if name in PRESETS else Costs.read(Path(name))
