"""BackendInfo: which implementation of a model runs, and why others do not.

Plain data for logs, `/v1/models` and `minserve inspect`. This module does not import torch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class PathInfo:
    """One way to run a model: another backend, or an execution path of the one that runs it."""

    name: str
    used: bool
    reason: str | None = None  # why it is not used


@dataclass(frozen=True, slots=True)
class BackendInfo:
    """The backend that runs a model; `paths` begins with backends that could not."""

    name: str
    paths: tuple[PathInfo, ...] = ()

    def instead_of(self, name: str, reason: str) -> BackendInfo:
        """Return it with another backend, which is not used for this reason."""
        return replace(self, paths=(PathInfo(name, False, reason), *self.paths))
