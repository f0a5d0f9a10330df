"""The family of Mamba models, in minserve's own folders, transformers' and mamba_ssm's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, cast

from engine.config import ModelConfig, check
from engine.errors import ConfigError
from engine.models import mamba_folders
from engine.models.family import Family, WeightMap, with_published_names
from engine.models.language_model import LanguageModel
from engine.models.mamba.config import MambaConfig
from engine.models.mamba.lm import MambaLM
from engine.models.mamba_folders import MAMBA_SSM, MARKS, is_mamba_ssm, layer_of

_FALCON = "FalconMambaForCausalLM"
_FALCON_TYPE = "falcon_mamba"

# MambaConfig's fields that have another name in published files
_PUBLISHED_NAMES = {
    "d_model": "hidden_size",
    "n_layers": "num_hidden_layers",
    "inner": "intermediate_size",
    "dt_rank": "time_step_rank",
    "bias": "use_bias",
    "conv_bias": "use_conv_bias",
    "selection_norm_eps": "mixer_rms_eps",
    "norm_eps": "layer_norm_epsilon",
    "tie_embeddings": "tie_word_embeddings",
}
_MAMBA_SSM_NAMES = {
    "n_layers": "n_layer",
    "inner": "ssm_cfg.expand",
    "state_size": "ssm_cfg.d_state",
    "dt_rank": "ssm_cfg.dt_rank",
    "conv_kernel": "ssm_cfg.d_conv",
    "bias": "ssm_cfg.bias",
    "conv_bias": "ssm_cfg.conv_bias",
}


class MambaFamily(Family):
    """Models of "Mamba" (arXiv 2312.00752) and of "Falcon Mamba" (arXiv 2410.05355)."""

    name: ClassVar[str] = "mamba"
    config_class: ClassVar[type[ModelConfig]] = MambaConfig
    model_types: ClassVar[frozenset[str]] = frozenset({"mamba", _FALCON_TYPE})
    architectures: ClassVar[frozenset[str]] = frozenset({"MambaForCausalLM", _FALCON, MAMBA_SSM})
    marks: ClassVar[frozenset[str]] = MARKS

    def build(self, config: ModelConfig) -> LanguageModel:
        """Return a model with random weights, on torch's default device."""
        return MambaLM(cast("MambaConfig", config))

    def claims(self, values: Mapping[str, Any]) -> bool:
        """Return whether these are not layers of Mamba-2."""
        return not is_mamba_ssm(values) or layer_of(values) != "Mamba2"

    def published_config(self, values: Mapping[str, Any]) -> ModelConfig:
        """Read a config.json; absent fields have the defaults of the class that wrote it."""
        return _of_mamba_ssm(values) if is_mamba_ssm(values) else _of_transformers(values)

    def published_weights(
        self, config: ModelConfig, stored: Mapping[str, tuple[int, ...]]
    ) -> WeightMap:
        """Return where both projects keep a model's tensors."""
        config = cast("MambaConfig", config)
        width, inner, states = config.d_model, config.inner, config.state_size
        parts: dict[str, tuple[str, tuple[int, ...]]] = {
            "norm.weight": ("norm.weight", (width,)),
            "in_proj.weight": ("mixer.in_proj.weight", (2 * inner, width)),
            "conv": ("mixer.conv1d.weight", (inner, 1, config.conv_kernel)),
            "x_proj.weight": ("mixer.x_proj.weight", (config.dt_rank + 2 * states, inner)),
            "dt_proj.weight": ("mixer.dt_proj.weight", (inner, config.dt_rank)),
            "dt_proj.bias": ("mixer.dt_proj.bias", (inner,)),
            "A_log": ("mixer.A_log", (inner, states)),
            "D": ("mixer.D", (inner,)),
            "out_proj.weight": ("mixer.out_proj.weight", (width, inner)),
        }
        if config.conv_bias:
            parts["conv_bias"] = ("mixer.conv1d.bias", (inner,))
        if config.bias:
            parts["in_proj.bias"] = ("mixer.in_proj.bias", (2 * inner,))
            parts["out_proj.bias"] = ("mixer.out_proj.bias", (width,))
        return mamba_folders.weight_map(config, stored, parts)


def _of_transformers(values: Mapping[str, Any]) -> MambaConfig:
    """Read a config.json of `MambaForCausalLM` or `FalconMambaForCausalLM`."""
    mamba_folders.check_transformers(values)
    width = mamba_folders.checked_width(values.get("hidden_size", 768), "hidden_size")
    inner = values.get("intermediate_size")
    if inner is None:
        inner = mamba_folders.expanded(values.get("expand", 2), width, "expand")
    names = mamba_folders.architectures(values)
    falcon = values.get("model_type") == _FALCON_TYPE or _FALCON in names
    try:
        return MambaConfig(
            vocab_size=values.get("vocab_size", 50280),
            d_model=width,
            n_layers=values.get("num_hidden_layers", 32),
            inner=inner,
            state_size=values.get("state_size", 16),
            dt_rank=_dt_rank(values.get("time_step_rank", "auto"), width),
            conv_kernel=values.get("conv_kernel", 4),
            bias=values.get("use_bias", False),
            conv_bias=values.get("use_conv_bias", True),
            selection_norm_eps=values.get("mixer_rms_eps", 1e-6) if falcon else None,
            residual_in_fp32=values.get("residual_in_fp32", True),
            norm_eps=values.get("layer_norm_epsilon", 1e-5),
            tie_embeddings=values.get("tie_word_embeddings", True),
        )
    except ConfigError as error:
        raise with_published_names(error, _PUBLISHED_NAMES) from error


def _of_mamba_ssm(values: Mapping[str, Any]) -> MambaConfig:
    """Read a config.json of mamba_ssm's `MambaLMHeadModel`."""
    cell = mamba_folders.cell_of(values)
    layer = layer_of(values)
    check(layer == "Mamba1", "ssm_cfg.layer", layer, "'Mamba1', 'Mamba2'")
    width = mamba_folders.checked_width(values.get("d_model", 2560), "d_model")
    try:
        return MambaConfig(
            vocab_size=mamba_folders.padded_vocabulary(values),
            d_model=width,
            n_layers=values.get("n_layer", 64),
            inner=mamba_folders.expanded(cell.get("expand", 2), width, "ssm_cfg.expand"),
            state_size=cell.get("d_state", 16),
            dt_rank=_dt_rank(cell.get("dt_rank", "auto"), width),
            conv_kernel=cell.get("d_conv", 4),
            bias=cell.get("bias", False),
            conv_bias=cell.get("conv_bias", True),
            residual_in_fp32=values.get("residual_in_fp32", True),
            norm_eps=1e-5,
            tie_embeddings=values.get("tie_embeddings", True),
        )
    except ConfigError as error:
        raise with_published_names(error, _MAMBA_SSM_NAMES) from error


def _dt_rank(rank: Any, width: int) -> int:
    """Return the rank; "auto" is a sixteenth of the width, rounded up."""
    return -(-width // 16) if rank == "auto" else cast("int", rank)
