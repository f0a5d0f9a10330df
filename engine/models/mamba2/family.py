"""The family of Mamba-2 models, in minserve's own folders, transformers' and mamba_ssm's."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar, cast

from engine.config import ModelConfig, check, is_integer, is_number
from engine.errors import ConfigError
from engine.models import mamba_folders
from engine.models.family import Family, WeightMap, with_published_names
from engine.models.language_model import LanguageModel
from engine.models.mamba2.config import Mamba2Config
from engine.models.mamba2.lm import Mamba2LM
from engine.models.mamba_folders import MAMBA_SSM, MARKS, is_mamba_ssm, layer_of

# Fields, beside those of both families, that change what is computed, with the values that mean
# what is served: of transformers, and of mamba_ssm's `ssm_cfg`. Of transformers `norm_before_gate`
# is not read: its class gates before the norm, also where a file says true, as Codestral-Mamba's.
_SERVED: dict[str, tuple[object, ...]] = {"rms_norm": (True,)}
_SERVED_SSM_CFG: dict[str, tuple[object, ...]] = {
    "rmsnorm": (True,),
    "norm_before_gate": (False,),
    "D_has_hdim": (False,),  # a D of every channel, not of every head
}

# Mamba2Config's fields that have another name in published files
_PUBLISHED_NAMES = {
    "d_model": "hidden_size",
    "n_layers": "num_hidden_layers",
    "heads": "num_heads",
    "groups": "n_groups",
    "bias": "use_bias",
    "conv_bias": "use_conv_bias",
    "norm_eps": "layer_norm_epsilon",
    "tie_embeddings": "tie_word_embeddings",
}
_MAMBA_SSM_NAMES = {
    "n_layers": "n_layer",
    "head_dim": "ssm_cfg.headdim",
    "state_size": "ssm_cfg.d_state",
    "groups": "ssm_cfg.ngroups",
    "conv_kernel": "ssm_cfg.d_conv",
    "bias": "ssm_cfg.bias",
    "conv_bias": "ssm_cfg.conv_bias",
}


class Mamba2Family(Family):
    """Models of "Transformers are SSMs" (arXiv 2405.21060), such as Codestral-Mamba."""

    name: ClassVar[str] = "mamba2"
    config_class: ClassVar[type[ModelConfig]] = Mamba2Config
    model_types: ClassVar[frozenset[str]] = frozenset({"mamba2"})
    architectures: ClassVar[frozenset[str]] = frozenset({"Mamba2ForCausalLM", MAMBA_SSM})
    marks: ClassVar[frozenset[str]] = MARKS

    def build(self, config: ModelConfig) -> LanguageModel:
        """Return a model with random weights, on torch's default device."""
        return Mamba2LM(cast("Mamba2Config", config))

    def claims(self, values: Mapping[str, Any]) -> bool:
        """Return whether these are layers of Mamba-2."""
        return not is_mamba_ssm(values) or layer_of(values) == "Mamba2"

    def published_config(self, values: Mapping[str, Any]) -> ModelConfig:
        """Read a config.json; absent fields have the defaults of the class that wrote it."""
        return _of_mamba_ssm(values) if is_mamba_ssm(values) else _of_transformers(values)

    def published_weights(
        self, config: ModelConfig, stored: Mapping[str, tuple[int, ...]]
    ) -> WeightMap:
        """Return where both projects keep a model's tensors."""
        config = cast("Mamba2Config", config)
        width, inner, heads = config.d_model, config.inner, config.heads
        projected = inner + config.convolved + heads
        parts: dict[str, tuple[str, tuple[int, ...]]] = {
            "norm.weight": ("norm.weight", (width,)),
            "in_proj.weight": ("mixer.in_proj.weight", (projected, width)),
            "conv": ("mixer.conv1d.weight", (config.convolved, 1, config.conv_kernel)),
            "dt_bias": ("mixer.dt_bias", (heads,)),
            "A_log": ("mixer.A_log", (heads,)),
            "D": ("mixer.D", (heads,)),
            "gated_norm.weight": ("mixer.norm.weight", (inner,)),
            "out_proj.weight": ("mixer.out_proj.weight", (width, inner)),
        }
        if config.conv_bias:
            parts["conv_bias"] = ("mixer.conv1d.bias", (config.convolved,))
        if config.bias:
            parts["in_proj.bias"] = ("mixer.in_proj.bias", (projected,))
            parts["out_proj.bias"] = ("mixer.out_proj.bias", (width,))
        return mamba_folders.weight_map(config, stored, parts)


def _of_transformers(values: Mapping[str, Any]) -> Mamba2Config:
    """Read a config.json of `Mamba2ForCausalLM`."""
    mamba_folders.check_transformers(values)
    mamba_folders.check_served(values, _SERVED)
    width = mamba_folders.checked_width(values.get("hidden_size", 4096), "hidden_size")
    inner = mamba_folders.expanded(values.get("expand", 2), width, "expand")
    heads, head_dim = values.get("num_heads", 128), values.get("head_dim", 64)
    _heads(inner, head_dim, "head_dim")
    check(
        is_integer(heads) and heads * head_dim == inner,
        "num_heads",
        heads,
        f"{inner // head_dim}, which is expand * hidden_size / head_dim",
    )
    least, most = _limit(values.get("time_step_limit"), "time_step_limit")
    try:
        return Mamba2Config(
            vocab_size=values.get("vocab_size", 32768),
            d_model=width,
            n_layers=values.get("num_hidden_layers", 64),
            heads=heads,
            head_dim=head_dim,
            state_size=values.get("state_size", 128),
            groups=values.get("n_groups", 8),
            conv_kernel=values.get("conv_kernel", 4),
            bias=values.get("use_bias", False),
            conv_bias=values.get("use_conv_bias", True),
            least_dt=least,
            most_dt=most,
            residual_in_fp32=values.get("residual_in_fp32", True),
            norm_eps=values.get("layer_norm_epsilon", 1e-5),
            tie_embeddings=values.get("tie_word_embeddings", False),
        )
    except ConfigError as error:
        raise with_published_names(error, _PUBLISHED_NAMES) from error


def _of_mamba_ssm(values: Mapping[str, Any]) -> Mamba2Config:
    """Read a config.json of mamba_ssm's `MambaLMHeadModel` with layers of Mamba-2."""
    cell = mamba_folders.cell_of(values)
    mamba_folders.check_served(cell, _SERVED_SSM_CFG, "ssm_cfg.")
    width = mamba_folders.checked_width(values.get("d_model", 2560), "d_model")
    inner = mamba_folders.expanded(cell.get("expand", 2), width, "ssm_cfg.expand")
    d_ssm = cell.get("d_ssm")
    check(d_ssm in (None, inner), "ssm_cfg.d_ssm", d_ssm, f"null, {inner}")
    head_dim = cell.get("headdim", 64)
    heads = _heads(inner, head_dim, "ssm_cfg.headdim")
    least, most = _limit(cell.get("dt_limit"), "ssm_cfg.dt_limit")
    try:
        return Mamba2Config(
            vocab_size=mamba_folders.padded_vocabulary(values),
            d_model=width,
            n_layers=values.get("n_layer", 64),
            heads=heads,
            head_dim=head_dim,
            state_size=cell.get("d_state", 128),
            groups=cell.get("ngroups", 1),
            conv_kernel=cell.get("d_conv", 4),
            bias=cell.get("bias", False),
            conv_bias=cell.get("conv_bias", True),
            least_dt=least,
            most_dt=most,
            residual_in_fp32=values.get("residual_in_fp32", True),
            norm_eps=1e-5,
            tie_embeddings=values.get("tie_embeddings", True),
        )
    except ConfigError as error:
        raise with_published_names(error, _MAMBA_SSM_NAMES) from error


def _heads(inner: int, head_dim: Any, name: str) -> int:
    """Return the number of heads of `inner` channels."""
    check(
        is_integer(head_dim) and head_dim >= 1 and inner % head_dim == 0,
        name,
        head_dim,
        f"a divisor of the {inner} channels",
    )
    return inner // cast("int", head_dim)


def _limit(limit: Any, name: str) -> tuple[float, float | None]:
    """Return the least and the largest time step; the latter is None where it is infinite.

    Infinity is a word of its own in JSON that Python writes, or transformers' object for it.
    """
    if limit is None:
        return 0.0, None
    least, most = limit if isinstance(limit, list) and len(limit) == 2 else (None, None)
    if most in (math.inf, {"__float__": "Infinity"}):
        most = None
    elif not is_number(most):
        least = None
    check(
        is_number(least) and least >= 0 and (most is None or least <= most),  # type: ignore[operator]
        name,
        limit,
        "two numbers from 0 up, the second of which may be Infinity",
    )
    return cast("float", least), most
