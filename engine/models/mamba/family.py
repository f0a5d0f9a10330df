"""The family of Mamba models, in minserve's own folders, transformers' and mamba_ssm's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, cast

from engine.config import MOST_WIDTH, ModelConfig, check, is_integer, is_number
from engine.errors import ConfigError
from engine.models.family import Family, StoredTensor, WeightMap, with_published_names
from engine.models.language_model import LanguageModel
from engine.models.mamba.config import MOST_INNER, MambaConfig
from engine.models.mamba.lm import MambaLM

_FALCON = "FalconMambaForCausalLM"
_MAMBA_SSM = "MambaLMHeadModel"  # the class of mamba_ssm, whose folders do not name it
_FALCON_TYPE = "falcon_mamba"

# Fields that change what is computed, with the values that mean what is served: of transformers,
# of mamba_ssm, and of mamba_ssm's `ssm_cfg`.
_SERVED: dict[str, tuple[object, ...]] = {
    "hidden_act": ("silu", "swish"),
    "quantization_config": (None,),
}
_SERVED_MAMBA_SSM: dict[str, tuple[object, ...]] = {
    "rms_norm": (True,),  # without, norms are LayerNorms
    "attn_layer_idx": ([], None),
    "attn_cfg": ({}, None),
    "d_intermediate": (0, None),  # width of MLPs between the recurrent layers
    "quantization_config": (None,),
}
_SERVED_SSM_CFG: dict[str, tuple[object, ...]] = {"layer": ("Mamba1",)}

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
    architectures: ClassVar[frozenset[str]] = frozenset({"MambaForCausalLM", _FALCON, _MAMBA_SSM})
    marks: ClassVar[frozenset[str]] = frozenset({"ssm_cfg"})  # of mamba_ssm's folders
    refused: ClassVar[Mapping[str, str]] = {
        "Mamba2ForCausalLM": "the recurrence of Mamba-2 is another one, only Mamba-1 is served"
    }

    def build(self, config: ModelConfig) -> LanguageModel:
        """Return a model with random weights, on torch's default device."""
        return MambaLM(cast("MambaConfig", config))

    def published_config(self, values: Mapping[str, Any]) -> ModelConfig:
        """Read a config.json; absent fields have the defaults of the class that wrote it."""
        if _MAMBA_SSM in _architectures(values) or not values.keys() & {
            "architectures",
            "model_type",
        }:
            return _of_mamba_ssm(values)
        return _of_transformers(values)

    def published_weights(
        self, config: ModelConfig, stored: Mapping[str, tuple[int, ...]]
    ) -> WeightMap:
        """Return where both projects keep a model's tensors; they differ in the embedding's name.

        A head that is tied may be stored, too.
        """
        config = cast("MambaConfig", config)
        width, inner, states = config.d_model, config.inner, config.state_size
        table = (config.vocab_size, width)
        singular = "backbone.embedding.weight"
        embedding = singular if singular in stored else "backbone.embeddings.weight"
        tensors: dict[str, Sequence[StoredTensor]] = {
            "embedding.weight": [StoredTensor(embedding, table)],
            "norm.weight": [StoredTensor("backbone.norm_f.weight", (width,))],
        }
        if not config.tie_embeddings:
            tensors["head.weight"] = [StoredTensor("lm_head.weight", table)]
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
        for index in range(config.n_layers):
            for ours, (theirs, shape) in parts.items():
                source = StoredTensor(f"backbone.layers.{index}.{theirs}", shape)
                tensors[f"layers.{index}.{ours}"] = [source]
        ignored = {"lm_head.weight"} if config.tie_embeddings else set()
        return WeightMap(tensors, frozenset(ignored))


def _architectures(values: Mapping[str, Any]) -> list[Any]:
    listed = values.get("architectures")
    return listed if isinstance(listed, list) else []


def _of_transformers(values: Mapping[str, Any]) -> MambaConfig:
    """Read a config.json of `MambaForCausalLM` or `FalconMambaForCausalLM`."""
    _check_served(values, _SERVED)
    width = _width(values.get("hidden_size", 768), "hidden_size")
    inner = values.get("intermediate_size")
    if inner is None:
        inner = _inner(values.get("expand", 2), width, "expand")
    falcon = values.get("model_type") == _FALCON_TYPE or _FALCON in _architectures(values)
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
    """Read a config.json of mamba_ssm's `MambaLMHeadModel`.

    Its tables have `vocab_size` rows, rounded up to a multiple of `pad_vocab_size_multiple`.
    """
    _check_served(values, _SERVED_MAMBA_SSM)
    cell = values.get("ssm_cfg") or {}
    check(isinstance(cell, dict), "ssm_cfg", cell, "an object")
    _check_served(cell, _SERVED_SSM_CFG, "ssm_cfg.")
    width = _width(values.get("d_model", 2560), "d_model")
    vocabulary = values.get("vocab_size", 50277)
    multiple = values.get("pad_vocab_size_multiple", 8)
    for name, value in (("vocab_size", vocabulary), ("pad_vocab_size_multiple", multiple)):
        allowed = f"an integer from 1 to {2**24}"
        check(is_integer(value) and 1 <= value <= 2**24, name, value, allowed)
    try:
        return MambaConfig(
            vocab_size=-(-vocabulary // multiple) * multiple,
            d_model=width,
            n_layers=values.get("n_layer", 64),
            inner=_inner(cell.get("expand", 2), width, "ssm_cfg.expand"),
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


def _check_served(
    values: Mapping[str, Any], table: Mapping[str, tuple[object, ...]], prefix: str = ""
) -> None:
    for name, served in table.items():
        value = values.get(name, served[0])
        allowed = ", ".join("null" if one is None else repr(one) for one in served)
        check(value in served, prefix + name, value, allowed)


def _width(width: Any, name: str) -> int:
    allowed = f"an integer from 1 to {MOST_WIDTH}"
    check(is_integer(width) and 1 <= width <= MOST_WIDTH, name, width, allowed)
    return cast("int", width)


def _inner(expand: Any, width: int, name: str) -> int:
    """Return int(expand * width), which must be a possible number of channels."""
    most = MOST_INNER // width
    check(
        is_number(expand) and 0 < expand <= most and expand * width >= 1,
        name,
        expand,
        f"a number that makes 1 to {MOST_INNER} channels: at most {most}",
    )
    return int(expand * width)


def _dt_rank(rank: Any, width: int) -> int:
    """Return the rank; "auto" is a sixteenth of the width, rounded up."""
    return -(-width // 16) if rank == "auto" else cast("int", rank)
