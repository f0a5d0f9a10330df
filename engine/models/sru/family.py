"""The family of SRU models: minserve's own folders, made of PyTorch state dicts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, cast

from torch import Tensor

from engine.config import ModelConfig
from engine.models.family import Family, WeightMap
from engine.models.language_model import LanguageModel
from engine.models.sru import layout
from engine.models.sru.config import SruConfig
from engine.models.sru.lm import SruLM


class SruFamily(Family):
    """Language models of the `sru` package's SRU."""

    name: ClassVar[str] = "sru"
    config_class: ClassVar[type[ModelConfig]] = SruConfig
    reads_state_dicts: ClassVar[bool] = True
    state_dict_options: ClassVar[frozenset[str]] = frozenset(
        {"tanh", "skip_term", "normalize_after", "norm_eps"}
    )

    def build(self, config: ModelConfig) -> LanguageModel:
        """Return a model with random weights, on torch's default device."""
        return SruLM(cast("SruConfig", config))

    def recognises(self, stored: Mapping[str, tuple[int, ...]]) -> bool:
        """Return whether there are layers of an SRU."""
        return layout.is_sru(stored)

    def state_dict_layout(
        self, stored: Mapping[str, Tensor], options: Mapping[str, Any]
    ) -> tuple[ModelConfig, WeightMap]:
        """Return what tensors and options show; see Family.state_dict_layout."""
        return layout.layout(stored, options)
