"""The family of HGRN models, in minserve's own folders and flash-linear-attention's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, cast

from engine.config import MOST_INNER, MOST_WIDTH, ModelConfig, check, is_integer, is_number
from engine.errors import ConfigError
from engine.models.family import Family, StoredTensor, WeightMap, with_published_names
from engine.models.hgrn.config import MOST_MLP_HIDDEN, HgrnConfig
from engine.models.hgrn.lm import HgrnLM
from engine.models.language_model import LanguageModel

# Fields that change what is computed, with the values that mean what is served.
_SERVED: dict[str, tuple[object, ...]] = {
    "attn": (None,),  # layers of attention between the recurrent ones
    "attnres_block_size": (None,),
    "hidden_act": ("swish", "silu"),
    "elementwise_affine": (True,),  # without, the gated norm has no weight
    "quantization_config": (None,),
}
# HgrnConfig's fields that have another name in published files
_PUBLISHED_NAMES = {
    "d_model": "hidden_size",
    "n_layers": "num_hidden_layers",
    "mlp_hidden": "intermediate_size",
    "conv_kernel": "conv_size",
    "lower_bounds": "use_lower_bound",
    "tie_embeddings": "tie_word_embeddings",
}


class HgrnFamily(Family):
    """Models of "Hierarchically Gated Recurrent Neural Network" (arXiv 2311.04823)."""

    name: ClassVar[str] = "hgrn"
    config_class: ClassVar[type[ModelConfig]] = HgrnConfig
    model_types: ClassVar[frozenset[str]] = frozenset({"hgrn"})
    architectures: ClassVar[frozenset[str]] = frozenset({"HGRNForCausalLM"})

    def build(self, config: ModelConfig) -> LanguageModel:
        """Return a model with random weights, on torch's default device."""
        return HgrnLM(cast("HgrnConfig", config))

    def published_config(self, values: Mapping[str, Any]) -> ModelConfig:
        """Read a config.json of `HGRNForCausalLM`; absent fields have that class's defaults."""
        for name, served in _SERVED.items():
            allowed = ", ".join("null" if value is None else f"{value!r}" for value in served)
            check(values.get(name, served[0]) in served, name, values.get(name), allowed)
        convolved = values.get("use_short_conv", False)
        check(isinstance(convolved, bool), "use_short_conv", convolved, "true or false")
        if convolved and values.get("share_conv_kernel"):  # of older versions
            raise ConfigError(
                "share_conv_kernel is True; allowed: false: one convolution of the layer's input "
                "is not served, only those of i and f",
                param="share_conv_kernel",
            )
        width = values.get("hidden_size", 2048)
        check(
            is_integer(width) and 1 <= width <= MOST_WIDTH,
            "hidden_size",
            width,
            f"an integer from 1 to {MOST_WIDTH}",
        )
        eps = "rms_norm_eps" if "norm_eps" not in values else "norm_eps"
        try:
            return HgrnConfig(
                vocab_size=values.get("vocab_size", 32000),
                d_model=width,
                n_layers=values.get("num_hidden_layers", 24),
                inner=_inner(values, width),
                mlp_hidden=_mlp_hidden(values, width),
                conv_kernel=values.get("conv_size", 4) if convolved else 0,
                lower_bounds=values.get("use_lower_bound", True),
                norm_eps=values.get(eps, 1e-6),
                tie_embeddings=values.get("tie_word_embeddings", False),
            )
        except ConfigError as error:
            raise with_published_names(error, {**_PUBLISHED_NAMES, "norm_eps": eps}) from error

    def published_weights(
        self, config: ModelConfig, stored: Mapping[str, tuple[int, ...]]
    ) -> WeightMap:
        """Return where `HGRNForCausalLM` keeps a model's tensors.

        In older files the rows of `mlp.gate_proj` are gate | up, and there is no `mlp.up_proj`.
        """
        config = cast("HgrnConfig", config)
        width, inner, hidden = config.d_model, config.inner, config.mlp_hidden
        table = (config.vocab_size, width)
        tensors: dict[str, Sequence[StoredTensor]] = {
            "embedding.weight": [StoredTensor("model.embeddings.weight", table)],
            "norm.weight": [StoredTensor("model.norm.weight", (width,))],
        }
        if not config.tie_embeddings:
            tensors["head.weight"] = [StoredTensor("lm_head.weight", table)]
        if config.lower_bounds:
            shape = (config.n_layers, inner)
            tensors["lower_bounds"] = [StoredTensor("model.lower_bounds", shape)]
        for index in range(config.n_layers):
            ours, theirs = f"layers.{index}", f"model.layers.{index}"
            if f"{theirs}.mlp.up_proj.weight" in stored:
                up = [
                    ("mlp.gate_proj.weight", (hidden, width)),
                    ("mlp.up_proj.weight", (hidden, width)),
                ]
            else:
                up = [("mlp.gate_proj.weight", (2 * hidden, width))]
            parts: dict[str, Sequence[tuple[str, tuple[int, ...]]]] = {
                "norm.weight": [("attn_norm.weight", (width,))],
                "gates.weight": [(f"attn.{one}_proj.weight", (inner, width)) for one in "ifg"],
                "gated_norm.weight": [("attn.g_norm.weight", (inner,))],
                "out.weight": [("attn.o_proj.weight", (width, inner))],
                "mlp_norm.weight": [("mlp_norm.weight", (width,))],
                "mlp.up.weight": up,
                "mlp.down.weight": [("mlp.down_proj.weight", (width, hidden))],
            }
            if config.conv_kernel:
                for one in "if":
                    taps = (inner, 1, config.conv_kernel)
                    parts[f"{one}_conv"] = [(f"attn.{one}_conv1d.weight", taps)]
            for name, sources in parts.items():
                tensors[f"{ours}.{name}"] = [
                    StoredTensor(f"{theirs}.{source}", shape) for source, shape in sources
                ]
        ignored = {"lm_head.weight"} if config.tie_embeddings else set()
        return WeightMap(tensors, frozenset(ignored))


def _number(values: Mapping[str, Any], name: str, default: float) -> float:
    value = values.get(name, default)
    check(is_number(value) and 0 < value <= 1024, name, value, "a number above 0, at most 1024")
    return cast("float", value)


def _inner(values: Mapping[str, Any], width: int) -> int:
    ratio = _number(values, "expand_ratio", 1)
    inner = int(width * ratio)
    check(
        1 <= inner <= MOST_INNER,
        "expand_ratio",
        ratio,
        f"hidden_size * expand_ratio from 1 to {MOST_INNER}",
    )
    return inner


def _mlp_hidden(values: Mapping[str, Any], width: int) -> int:
    """Return the MLP's width: as given, or 2/3 of the ratio's, rounded up to 256 channels."""
    given = values.get("intermediate_size")
    if given is not None:
        return cast("int", given)
    ratio = 4.0
    if values.get("hidden_ratio") is not None:
        ratio = _number(values, "hidden_ratio", ratio)
    hidden = -(-int(width * ratio * 2 / 3) // 256) * 256
    check(
        1 <= hidden <= MOST_MLP_HIDDEN,
        "hidden_ratio",
        ratio,
        f"hidden_size * hidden_ratio * 2 / 3 from 1 to {MOST_MLP_HIDDEN}",
    )
    return hidden
