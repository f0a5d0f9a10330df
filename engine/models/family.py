"""Family: what a folder of engine/models says of its models, for the registry.

A family has a config, a model in plain torch, and knows the Hugging Face folders ("published" ones)
of other projects' such models: their config.json and the names of their tensors.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from engine.config import ModelConfig
from engine.errors import ConfigError
from engine.models.language_model import LanguageModel


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of a published folder, as it must be stored there."""

    name: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class WeightMap:
    """The stored tensors, of a published folder or a state dict, of which each of a model is made.

    Args:
        tensors: for each tensor of the model's state dict the stored ones, which are concatenated
            along the first dimension and then reshaped to the model's shape. Of none: zeros.
        ignored: names of stored tensors that hold nothing new, such as the head of a model whose
            head is the embedding. They may be there or not.
        changes: for some tensors of the model, what is done to the values after they were
            concatenated and before they are reshaped, such as another order of rows.
    """

    tensors: Mapping[str, Sequence[StoredTensor]]
    ignored: frozenset[str] = field(default_factory=frozenset)
    changes: Mapping[str, Callable[[Tensor], Tensor]] = field(default_factory=dict)

    def value(self, name: str, shape: Sequence[int], read: Callable[[str], Tensor]) -> Tensor:
        """Return a tensor of the model, contiguous; it may be a view of the stored one.

        `shape` is the model's; `read` returns a stored tensor by its name.
        """
        parts = [read(part.name) for part in self.tensors[name]]
        if not parts:
            return torch.zeros(*shape)
        tensor = parts[0] if len(parts) == 1 else torch.cat(parts)
        if name in self.changes:
            tensor = self.changes[name](tensor)
        return tensor.reshape(*shape).contiguous()


def with_published_names(error: ConfigError, names: Mapping[str, str]) -> ConfigError:
    """Return an error of a config's field that names the field as the published file does.

    `names`: for fields of the config, the published ones.
    """
    ours = error.param or ""
    theirs = names.get(ours, ours)
    return ConfigError(error.message.replace(ours, theirs, 1), param=theirs or None)


class Family(ABC):
    """A family of models, in a folder beside this file."""

    name: ClassVar[str]  # `family` of a config.json in minserve's form
    config_class: ClassVar[type[ModelConfig]]
    # `model_type` and `architectures` of the config.json files that other projects write
    model_types: ClassVar[frozenset[str]] = frozenset()
    architectures: ClassVar[frozenset[str]] = frozenset()
    # fields by which such a file is recognised that has neither of the two; minserve's has none
    marks: ClassVar[frozenset[str]] = frozenset()
    # `architectures` that are named like the family's and are not served, each with the reason
    refused: ClassVar[Mapping[str, str]] = {}

    # whether the family has layouts of state dicts, files of weights without a config.json
    reads_state_dicts: ClassVar[bool] = False
    # fields of its config that a state dict does not show, and that whoever converts it may give
    state_dict_options: ClassVar[frozenset[str]] = frozenset()

    @abstractmethod
    def build(self, config: ModelConfig) -> LanguageModel:
        """Return a model with random weights, on torch's default device.

        `config` is of `config_class`.
        """

    def claims(self, values: Mapping[str, Any]) -> bool:
        """Return whether a published config.json with a name or mark of the family is its own.

        Families may share names and marks: Mamba and Mamba-2 share those of mamba_ssm.
        """
        return True

    def published_config(self, values: Mapping[str, Any]) -> ModelConfig:
        """Read a published config.json, as parsed.

        The loader reads `eos_token_id` and the type of the weights itself. Raises ConfigError,
        which names the field, for a model that the family does not compute.
        """
        raise NotImplementedError

    def config_with_shapes(
        self,
        config: ModelConfig,
        values: Mapping[str, Any],
        stored: Mapping[str, tuple[int, ...]],
    ) -> ModelConfig:
        """Return the config of `values`, completed by what only the stored tensors' shapes tell.

        `values` is the published config.json, for messages in its words. Raises CheckpointError if
        they contradict each other.
        """
        return config

    def published_weights(
        self, config: ModelConfig, stored: Mapping[str, tuple[int, ...]]
    ) -> WeightMap:
        """Return where the tensors of a model with this config are.

        `stored` has the shapes of the folder's tensors by name: published forms may differ in
        which tensors they have. Missing and surplus tensors are the loader's to report.
        """
        raise NotImplementedError

    def recognises(self, stored: Mapping[str, tuple[int, ...]]) -> bool:
        """Return whether a state dict, of tensors with these shapes, is probably one of the family.

        At most one family may say so. Every other state dict is taken for one of the default
        family, unless the family is named.
        """
        return False

    def state_dict_layout(
        self, stored: Mapping[str, Tensor], options: Mapping[str, Any]
    ) -> tuple[ModelConfig, WeightMap]:
        """Return the config that a state dict shows, and where the model's tensors are.

        Args:
            stored: the tensors.
            options: some of `state_dict_options`, which replace what names and shapes show.

        Raises:
            CheckpointError: a tensor is missing, unknown or of a shape that contradicts the others;
                it names that tensor.
            ConfigError: no model of the family has such shapes or options.
        """
        raise NotImplementedError
