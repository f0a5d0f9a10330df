"""The families of GRU and LSTM models: minserve's own folders, made of PyTorch state dicts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, cast

from torch import Tensor

from engine.config import ModelConfig
from engine.models.family import Family, WeightMap
from engine.models.gated_rnn import layouts
from engine.models.gated_rnn.config import GatedRnnConfig, GruConfig, LstmConfig
from engine.models.gated_rnn.lm import GatedRnnLM
from engine.models.language_model import LanguageModel


class _GatedRnnFamily(Family):
    """What the families of both cells have in common."""

    config_class: ClassVar[type[GatedRnnConfig]]
    reads_state_dicts: ClassVar[bool] = True

    def build(self, config: ModelConfig) -> LanguageModel:
        """Return a model with random weights, on torch's default device."""
        return GatedRnnLM(cast("GatedRnnConfig", config))

    def state_dict_layout(
        self, stored: Mapping[str, Tensor], options: Mapping[str, Any]
    ) -> tuple[ModelConfig, WeightMap]:
        """Return what the tensors show; see Family.state_dict_layout."""
        return layouts.layout(stored, self.config_class)


class GruFamily(_GatedRnnFamily):
    """Language models of torch.nn.GRU."""

    name: ClassVar[str] = "gru"
    config_class: ClassVar[type[GatedRnnConfig]] = GruConfig

    def recognises(self, stored: Mapping[str, tuple[int, ...]]) -> bool:
        """Return whether there are recurrent matrices, but not of an LSTM.

        Those of torch.nn.RNN are refused with the reason.
        """
        return layouts.gates_of(stored) not in (None, LstmConfig.gates)


class LstmFamily(_GatedRnnFamily):
    """Language models of torch.nn.LSTM."""

    name: ClassVar[str] = "lstm"
    config_class: ClassVar[type[GatedRnnConfig]] = LstmConfig

    def recognises(self, stored: Mapping[str, tuple[int, ...]]) -> bool:
        """Return whether there are recurrent matrices of an LSTM."""
        return layouts.gates_of(stored) == LstmConfig.gates
