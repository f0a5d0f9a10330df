"""Which family of models a config describes, and how to build one.

A family is a folder of engine/models with a model in plain torch. Its recurrences are cells; a
config names one, and no two families have a cell in common.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from engine.config import ModelConfig
from engine.errors import ConfigError
from engine.models.minrnn.lm import CELLS, LM


@dataclass(frozen=True, slots=True)
class Family:
    """A kind of model, one folder beside this file."""

    name: str  # the folder's
    cells: frozenset[str]
    build: Callable[[ModelConfig], LM]  # with random weights, on torch's default device


FAMILIES = (Family("minrnn", frozenset(CELLS), LM),)


def family_of(config: ModelConfig) -> Family:
    """The family that computes such a model. Raises ConfigError where none does."""
    for family in FAMILIES:
        if config.cell in family.cells:
            return family
    known = sorted(cell for family in FAMILIES for cell in family.cells)
    raise ConfigError(
        f"no family of models has cell {config.cell!r}; known cells: {', '.join(known)}",
        param="cell",
    )


def build(config: ModelConfig) -> LM:
    """An untrained model of this config, on torch's default device. Raises ConfigError."""
    return family_of(config).build(config)
