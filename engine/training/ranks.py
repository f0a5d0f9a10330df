"""Ranks: the processes of a run, one for each GPU, and what they tell each other.

`torchrun` starts them and describes them by environment variables (RANK, LOCAL_RANK, WORLD_SIZE).
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed
from torch import Tensor

from engine.errors import ConfigError

# Steps between two looks at whether one of the processes was asked to stop.
STOP_EVERY = 16
# How long processes wait for the first one while it encodes, evaluates or saves.
PATIENCE = timedelta(hours=12)
# Seconds in which whatever started the processes ends them after one has failed.
GRACE = 5.0


def environment_of(rank: int, count: int, port: int) -> dict[str, str]:
    """Return the environment of one process of a run on this machine, as torchrun sets it.

    `port`: a free one, on which the first process listens for the others.
    """
    return {
        **os.environ,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
    }


@dataclass(frozen=True)
class Ranks:
    """This process's number and how many there are."""

    rank: int = 0
    count: int = 1

    @classmethod
    def join(cls, device: torch.device) -> Ranks:
        """Join the processes that torchrun has started; one process by itself has nothing to do.

        On GPUs they speak through NCCL, else through Gloo. Raises RuntimeError (torch) if they do
        not find each other.
        """
        count = int(os.environ.get("WORLD_SIZE", "1"))
        if count == 1:
            return cls()
        if not torch.distributed.is_initialized():
            backend = "nccl" if device.type == "cuda" else "gloo"
            named = None
            if device.type == "cuda":
                torch.cuda.set_device(device)  # through which objects are exchanged
                named = device
            torch.distributed.init_process_group(backend, device_id=named, timeout=PATIENCE)
        return cls(torch.distributed.get_rank(), count)

    @staticmethod
    def starts_first() -> bool:
        """Whether this process is or will be the first one; it need not have joined yet."""
        return int(os.environ.get("RANK", "0")) == 0

    @staticmethod
    def local_count() -> int:
        """Return how many processes of the run this machine has."""
        return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))

    @staticmethod
    def local_rank() -> int | None:
        """Return this process's number on its machine; None if torchrun has not started it."""
        found = os.environ.get("LOCAL_RANK")
        return None if found is None else int(found)

    @property
    def first(self) -> bool:
        """Whether this process evaluates, writes and reports."""
        return self.rank == 0

    def rows(self, batch: int) -> slice:
        """Return the rows of a batch that this process reads. Raises ConfigError."""
        if batch % self.count:
            raise ConfigError(
                f"batch is {batch}; allowed on {self.count} GPUs: multiples of {self.count}",
                param="batch",
            )
        own = batch // self.count
        return slice(self.rank * own, (self.rank + 1) * own)

    def mean(self, value: Tensor) -> float:
        """Return the mean of a scalar over all processes."""
        value = value.clone()
        if self.count > 1:
            torch.distributed.all_reduce(value)
        return float(value) / self.count

    def any(self, flag: bool, device: torch.device) -> bool:
        """Return whether the flag is set in any process."""
        if self.count == 1:
            return flag
        found = torch.tensor(int(flag), device=device)
        torch.distributed.all_reduce(found, torch.distributed.ReduceOp.MAX)
        return bool(found)

    def gather(self, value: Any) -> list[Any]:
        """Return every process's value, in order."""
        if self.count == 1:
            return [value]
        found: list[Any] = [None] * self.count
        torch.distributed.all_gather_object(found, value)
        return found

    def of_first(self, value: Any) -> Any:
        """Return the first process's value."""
        if self.count == 1:
            return value
        found = [value]
        torch.distributed.broadcast_object_list(found)
        return found[0]

    @contextmanager
    def one_failure(self) -> Iterator[None]:
        """Let an error that several processes meet be told by one of them.

        What all of them meet the first one tells; if one fails, the others lose their connection to
        it. So those others wait a little before they go on to end, and meanwhile whatever started
        the processes ends them.
        """
        try:
            yield
        except Exception as error:
            if self.count > 1 and (not self.first or _is_lost_connection(error)):
                time.sleep(GRACE)
            raise

    def leave(self) -> None:
        """Leave the other processes."""
        if self.count > 1 and torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


def _is_lost_connection(error: Exception) -> bool:
    """Whether a process does not answer any more; Gloo raises a plain RuntimeError for it."""
    if isinstance(error, torch.distributed.DistError):
        return True
    return type(error) is RuntimeError and "connection" in str(error).lower()
