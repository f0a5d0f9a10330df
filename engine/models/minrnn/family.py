"""The family of minGRU and minLSTM models, in minserve's own folders."""

from __future__ import annotations

from typing import ClassVar, cast

from engine.config import ModelConfig
from engine.models.family import Family
from engine.models.language_model import LanguageModel
from engine.models.minrnn.config import MinRnnConfig
from engine.models.minrnn.lm import LM


class MinRnnFamily(Family):
    """Models of "Were RNNs All We Needed?" (arXiv 2410.01201)."""

    name: ClassVar[str] = "minrnn"
    config_class: ClassVar[type[ModelConfig]] = MinRnnConfig

    def build(self, config: ModelConfig) -> LanguageModel:
        """Return a model with random weights, on torch's default device."""
        return LM(cast("MinRnnConfig", config))
