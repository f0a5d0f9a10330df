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
from engine.models.family import Family, StoredTensor, WeightMap
from engine.models.language_model import LanguageModel
from engine.models.minrnn.config import MinRnnConfig
from engine.models.minrnn.lm import LM
from engine.models.minrnn.minlm import layout

_EMBEDDING, _HEAD = "token_emb.weight", "to_logits.weight"
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

    def build(self, config: ModelConfig) -> LanguageModel:
        """Return a model with random weights, on torch's default device."""
        return LM(cast("MinRnnConfig", config))

    def published_config(self, values: Mapping[str, Any]) -> ModelConfig:
        """Read the config.json of a MinGRULMForCausalLM; its layers show in the weights alone."""
        sizes = {}
        for field, names in _SIZES.items():
            name = next((name for name in names if name in values), None)
            if name is None:
                raise ConfigError(
                    f"{names[0]} (or {' or '.join(names[1:])}) is missing", param=names[0]
                )
            sizes[field] = values[name]
        tied = values.get("tie_word_embeddings") is True
        return MinRnnConfig(cell="mingru", tie_embeddings=tied, **sizes)

    def config_with_shapes(
        self, config: ModelConfig, stored: Mapping[str, tuple[int, ...]]
    ) -> ModelConfig:
        """Return the config that the weights show; it must have the sizes of `config`."""
        shown, _, _ = _layout(config, stored)
        for field in _SIZES:
            if getattr(shown, field) != getattr(config, field):
                raise CheckpointError(
                    f"config.json says {field} {getattr(config, field)}, the weights"
                    f" {getattr(shown, field)}"
                )
        return replace(shown, tie_embeddings=config.tie_embeddings)

    def published_weights(
        self, config: ModelConfig, stored: Mapping[str, tuple[int, ...]]
    ) -> WeightMap:
        """Return where the tensors are; see Family.published_weights."""
        _, weights, prefix = _layout(config, stored)
        tensors = {
            name: tuple(StoredTensor(prefix + part.name, part.shape) for part in parts)
            for name, parts in weights.tensors.items()
        }
        ignored = {_TIED_HEAD}
        if config.tie_embeddings:
            del tensors["head.weight"]
            ignored.add(prefix + _HEAD)
        return WeightMap(tensors, frozenset(ignored), weights.changes)


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
    if config.tie_embeddings:
        weights.setdefault(_HEAD, weights.get(_EMBEDDING, torch.empty(0, device="meta")))
    return *layout(weights), prefix
