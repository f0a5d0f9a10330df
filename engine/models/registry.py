"""Registry of model families: finds the family of a config and builds its model.

A family is a folder of engine/models with a model in plain torch. Its recurrences are cells. A
config names a cell, and no two families have a cell in common.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from engine.config import ModelConfig
from engine.errors import ConfigError
from engine.models.minrnn.lm import CELLS, LM


@dataclass(frozen=True, slots=True)
class Family:
    """A family of models, one folder beside this file."""

    name: str  # name of the folder
    cells: frozenset[str]
    # returns a model with random weights, on torch's default device
    build: Callable[[ModelConfig], LM]


FAMILIES = (Family("minrnn", frozenset(CELLS), LM),)


def family_of(config: ModelConfig) -> Family:
    """Return the family of models with this config's cell. Raises ConfigError if there is none."""
    for family in FAMILIES:
        if config.cell in family.cells:
            return family
    known = sorted(cell for family in FAMILIES for cell in family.cells)
    raise ConfigError(
        f"no model family has the cell {config.cell!r}; known cells: {', '.join(known)}",
        param="cell",
    )


def build(config: ModelConfig) -> LM:
    """Return an untrained model of this config, on torch's default device. Raises ConfigError."""
    return family_of(config).build(config)
