"""What the published folders of Mamba and Mamba-2 have in common: transformers' and mamba_ssm's.

Both projects keep a model's tensors under the same names, but for the embedding's. A config.json of
mamba_ssm names neither an architecture nor a type; its field `ssm_cfg` is that of the layers, and
`ssm_cfg.layer` says which of the two these are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from engine.config import MOST_INNER, MOST_WIDTH, ModelConfig, check, is_integer, is_number
from engine.models.family import StoredTensor, WeightMap

MAMBA_SSM = "MambaLMHeadModel"  # the class of mamba_ssm, whose folders do not name it
MARKS = frozenset({"ssm_cfg"})  # of mamba_ssm's folders

# Fields that change what is computed, with the values that mean what is served: of transformers
# and of mamba_ssm.
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


def architectures(values: Mapping[str, Any]) -> list[Any]:
    """Return the names in `architectures` of a config.json, as parsed."""
    listed = values.get("architectures")
    return listed if isinstance(listed, list) else []


def is_mamba_ssm(values: Mapping[str, Any]) -> bool:
    """Return whether a published config.json is mamba_ssm's, not transformers'."""
    named = values.keys() & {"architectures", "model_type"}
    return MAMBA_SSM in architectures(values) or not named


def layer_of(values: Mapping[str, Any]) -> object:
    """Return `ssm_cfg.layer` of mamba_ssm's config.json; "Mamba1" if it does not say."""
    cell = values.get("ssm_cfg")
    return cell.get("layer", "Mamba1") if isinstance(cell, dict) else "Mamba1"


def check_transformers(values: Mapping[str, Any]) -> None:
    """Raise ConfigError for a config.json of transformers with what no family serves."""
    check_served(values, _SERVED)


def cell_of(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return `ssm_cfg` of mamba_ssm's config.json.

    Raises ConfigError for what no family serves.
    """
    check_served(values, _SERVED_MAMBA_SSM)
    cell = values.get("ssm_cfg") or {}
    check(isinstance(cell, dict), "ssm_cfg", cell, "an object")
    return cast("Mapping[str, Any]", cell)


def padded_vocabulary(values: Mapping[str, Any]) -> int:
    """Return the rows of mamba_ssm's tables: a multiple of `pad_vocab_size_multiple`."""
    vocabulary = values.get("vocab_size", 50277)
    multiple = values.get("pad_vocab_size_multiple", 8)
    for name, value in (("vocab_size", vocabulary), ("pad_vocab_size_multiple", multiple)):
        allowed = f"an integer from 1 to {2**24}"
        check(is_integer(value) and 1 <= value <= 2**24, name, value, allowed)
    return -(-cast("int", vocabulary) // cast("int", multiple)) * cast("int", multiple)


def check_served(
    values: Mapping[str, Any], table: Mapping[str, tuple[object, ...]], prefix: str = ""
) -> None:
    """Raise ConfigError, with `prefix` before the name, for a field with a value not in its row."""
    for name, served in table.items():
        value = values.get(name, served[0])
        allowed = ", ".join("null" if one is None else repr(one) for one in served)
        check(value in served, prefix + name, value, allowed)


def checked_width(width: Any, name: str) -> int:
    """Return the width of the residual stream, which must be a possible one."""
    allowed = f"an integer from 1 to {MOST_WIDTH}"
    check(is_integer(width) and 1 <= width <= MOST_WIDTH, name, width, allowed)
    return cast("int", width)


def expanded(expand: Any, width: int, name: str) -> int:
    """Return int(expand * width), which must be a possible number of channels."""
    most = MOST_INNER // width
    check(
        is_number(expand) and 0 < expand <= most and expand * width >= 1,
        name,
        expand,
        f"a number that makes 1 to {MOST_INNER} channels: at most {most}",
    )
    return int(expand * width)


def weight_map(
    config: ModelConfig,
    stored: Mapping[str, tuple[int, ...]],
    parts: Mapping[str, tuple[str, tuple[int, ...]]],
) -> WeightMap:
    """Return where both projects keep a model's tensors.

    `parts` has the tensors of a layer, as the model names them, each with its name in
    `backbone.layers.N` and its shape there. A head that is tied may be stored, too.
    """
    table = (config.vocab_size, config.d_model)
    singular = "backbone.embedding.weight"
    embedding = singular if singular in stored else "backbone.embeddings.weight"
    tensors: dict[str, Sequence[StoredTensor]] = {
        "embedding.weight": [StoredTensor(embedding, table)],
        "norm.weight": [StoredTensor("backbone.norm_f.weight", (config.d_model,))],
    }
    if not config.tie_embeddings:
        tensors["head.weight"] = [StoredTensor("lm_head.weight", table)]
    for index in range(config.n_layers):
        for ours, (theirs, shape) in parts.items():
            source = StoredTensor(f"backbone.layers.{index}.{theirs}", shape)
            tensors[f"layers.{index}.{ours}"] = [source]
    ignored = {"lm_head.weight"} if config.tie_embeddings else set()
    return WeightMap(tensors, frozenset(ignored))
