"""The state of an unfinished run: one file with everything that `--resume` needs.

It is read with `weights_only=True`, so that no file can run code, and replaced atomically, so that
a run that is killed while saving leaves the previous state.
"""

from __future__ import annotations

import os
import pickle
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine.errors import CheckpointError, ConfigError
from engine.models.minrnn.config import MinRnnConfig
from engine.training.recipe import Recipe

FILE_NAME = "training-state.pt"


@dataclass(kw_only=True)
class Best:
    """The best evaluation so far; `weights`, by parameter name, are as they would be written."""

    step: int
    loss: float
    weights: dict[str, Tensor]


@dataclass(kw_only=True)
class RunState:
    """Everything that changes during a run, and what must be the same to resume it."""

    config: dict[str, Any]
    recipe: dict[str, Any]
    data: str  # Data.fingerprint
    step: int
    seconds: float
    loss_steps: int  # since the last evaluation
    model: dict[str, Tensor]
    average: list[Tensor]
    optimizers: list[dict[str, Any]]
    windows_generator: Tensor
    windows_positions: Tensor
    # of each process: its generators, carried states and sum of losses since the last evaluation
    processes: list[dict[str, Any]]
    best: dict[str, Any] | None

    def save(self, folder: Path) -> None:
        """Write the state file. Raises OSError."""
        part = folder / (FILE_NAME + ".part")
        with part.open("wb") as file:
            torch.save({field.name: getattr(self, field.name) for field in fields(self)}, file)
        os.replace(part, folder / FILE_NAME)

    @classmethod
    def load(cls, folder: Path) -> RunState:
        """Read the state file, with tensors on the CPU. Raises CheckpointError."""
        path = folder / FILE_NAME
        try:
            values = torch.load(path, map_location="cpu", weights_only=True)
        except FileNotFoundError as error:
            raise CheckpointError(f"{folder}: there is no unfinished run to resume") from error
        except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
            raise CheckpointError(f"{path}: cannot be read: {error}") from error
        names = {field.name for field in fields(cls)}
        if not isinstance(values, dict) or set(values) != names:
            raise CheckpointError(f"{path}: not the state of a training run")
        return cls(**values)

    def check_same_run(
        self, config: MinRnnConfig, recipe: Recipe, data: str, processes: int
    ) -> None:
        """Raise ConfigError unless the saved run has this config, recipe, data and processes."""
        for saved, asked in (
            (self.config, asdict(config)),
            (self.recipe, asdict(recipe)),
        ):
            for name, value in asked.items():
                # fields that came after the run was begun had its values as defaults
                if saved.get(name, value) != value:
                    raise ConfigError(
                        f"the unfinished run has {name} {saved[name]!r}, not {value!r}; "
                        "resume with the options that it was started with",
                        param=name,
                    )
        if self.data != data:
            raise ConfigError("the unfinished run was trained on other data", param="data")
        if len(self.processes) != processes:
            raise ConfigError(
                f"the unfinished run was on {len(self.processes)} GPUs or processes, not "
                f"{processes}; resume on as many",
                param="gpus",
            )
