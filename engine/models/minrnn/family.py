"""The family of minGRU and minLSTM models: minserve's own folders and the hub's MinGRULM.

A published MinGRULMForCausalLM wraps a model of minGRU-pytorch, whose names it has behind a prefix
("model.", "model.min_gru_model."). Its lm_head is not part of what it computes: its class ties it
to the embedding and takes the wrapped model's logits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar, cast

import torch
from torch import Tensor

from engine.config import ModelConfig
from engine.errors import CheckpointError, ConfigError
from engine.models.family import Family, StoredTensor, WeightMap, with_published_names
from engine.models.language_model import LanguageModel
from engine.models.minrnn.config import MinRnnConfig
from engine.models.minrnn.lm import LM
from engine.models.minrnn.minlm import HEADS, layout

_EMBEDDING = "token_emb.weight"
_TIED_HEAD = "lm_head.weight"
# Names of a size in the config.json files that exist, the first one counts.
_SIZES = {
    "vocab_size": ("vocab_size", "num_tokens"),
    "d_model": ("d_model", "dim", "hidden_size"),
    "n_layers": ("n_layer", "depth", "num_hidden_layers"),
}


class MinRnnFamily(Family):
    """Models of "Were RNNs All We Needed?" (arXiv 2410.01201)."""

    name: ClassVar[str] = "minrnn"
    config_class: ClassVar[type[ModelConfig]] = MinRnnConfig
    architectures: ClassVar[frozenset[str]] = frozenset({"MinGRULMForCausalLM"})
    refused: ClassVar[Mapping[str, str]] = {
        "MinGRUForCausalLM": "it normalises over batch and time, so a token's logits depend on the"
        " tokens after it; it is not causal"
    }

    reads_state_dicts: ClassVar[bool] = True
    state_dict_options: ClassVar[frozenset[str]] = frozenset({"normalize_gates", "norm_eps"})

    def build(self, config: ModelConfig) -> LanguageModel:
        """Return a model with random weights, on torch's default device."""
        return LM(cast("MinRnnConfig", config))

    def published_config(self, values: Mapping[str, Any]) -> ModelConfig:
        """Read the config.json of a MinGRULMForCausalLM; its layers show in the weights alone."""
        names = _names_of_sizes(values)
        sizes = {field: values[name] for field, name in names.items()}
        tied = values.get("tie_word_embeddings", False)
        try:
            return MinRnnConfig(cell="mingru", tie_embeddings=tied, **sizes)
        except ConfigError as error:
            names["tie_embeddings"] = "tie_word_embeddings"
            raise with_published_names(error, names) from error

    def config_with_shapes(
        self,
        config: ModelConfig,
        values: Mapping[str, Any],
        stored: Mapping[str, tuple[int, ...]],
    ) -> ModelConfig:
        """Return the config that the weights show; it must have the sizes of `config`.

        A stored head is used even if config.json ties it: its class ties lm_head alone.
        """
        shown, _, prefix = _layout(config, stored)
        for field, name in _names_of_sizes(values).items():
            if getattr(shown, field) != getattr(config, field):
                raise CheckpointError(
                    f"config.json says {name} {getattr(config, field)}, the weights"
                    f" {getattr(shown, field)}"
                )
        has_head = any(prefix + head in stored for head in HEADS)
        return replace(shown, tie_embeddings=config.tie_embeddings and not has_head)

    def published_weights(
        self, config: ModelConfig, stored: Mapping[str, tuple[int, ...]]
    ) -> WeightMap:
        """Return where the tensors are; see Family.published_weights."""
        _, weights, prefix = _layout(config, stored)
        tensors = {
            name: tuple(StoredTensor(prefix + part.name, part.shape) for part in parts)
            for name, parts in weights.tensors.items()
        }
        if config.tie_embeddings:
            del tensors["head.weight"]
        return WeightMap(tensors, frozenset({_TIED_HEAD}), weights.changes)

    def state_dict_layout(
        self, stored: Mapping[str, Tensor], options: Mapping[str, Any]
    ) -> tuple[ModelConfig, WeightMap]:
        """Return what the tensors show of a model of either project that minlm.py knows."""
        config, weights = layout(stored)
        return replace(config, **options), weights


def _names_of_sizes(values: Mapping[str, Any]) -> dict[str, str]:
    """Return the names that a config.json has for the fields in _SIZES. Raises ConfigError."""
    found = {}
    for field, names in _SIZES.items():
        name = next((name for name in names if name in values), None)
        if name is None:
            raise ConfigError(
                f"{names[0]} (or {' or '.join(names[1:])}) is missing", param=names[0]
            )
        found[field] = name
    return found


def _layout(
    config: ModelConfig, stored: Mapping[str, tuple[int, ...]]
) -> tuple[MinRnnConfig, WeightMap, str]:
    """Return what the tensors behind the prefix show, where they are, and the prefix."""
    embedding = next((name for name in stored if name.endswith(_EMBEDDING)), _EMBEDDING)
    prefix = embedding.removesuffix(_EMBEDDING)
    weights: dict[str, Tensor] = {
        name.removeprefix(prefix): torch.empty(shape, device="meta")
        for name, shape in stored.items()
        if name != _TIED_HEAD
    }
    if config.tie_embeddings and not any(head in weights for head in HEADS):
        weights[HEADS[0]] = weights.get(_EMBEDDING, torch.empty(0, device="meta"))
    return *layout(weights), prefix
