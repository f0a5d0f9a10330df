"""Published folders: models in the form in which other projects write them for Hugging Face.

A family reads their config.json and names their tensors (engine/models/family.py). This module does
what is the same for all: end-of-text ids, the type of the weights, and the comparison of stored
tensors with those that the model needs. Code in a folder (`auto_map`, .py files) is never run.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from engine.config import DtypeName, ModelConfig
from engine.errors import CheckpointError, ConfigError
from engine.models import registry
from engine.models.language_model import LanguageModel
from engine.models.weight_files import Stored, compare, open_weights

# The type in which weights are held, by safetensors' name of the stored one.
HELD_AS: dict[str, DtypeName] = {
    "F64": "float32",
    "F32": "float32",
    "BF16": "bfloat16",
    "F16": "float16",
}
# The same by the names in a config.json.
_NAMED: dict[str, DtypeName] = {
    "float64": "float32",
    "float32": "float32",
    "bfloat16": "bfloat16",
    "float16": "float16",
}


def read_config(folder: Path, values: Mapping[str, Any]) -> ModelConfig:
    """Read a published config.json, as parsed, of a folder.

    The folder's weights say what config.json does not. Raises ConfigError, and CheckpointError for
    weights that cannot be read.
    """
    family = registry.published_family(values)
    config = family.published_config(values)
    with open_weights(folder, known_readable=True) as stored:
        shapes = {name: tensor.shape for name, tensor in stored.items()}
        try:
            config = family.config_with_shapes(config, values, shapes)
        except CheckpointError as error:
            raise CheckpointError(f"{folder}: {error.message}") from error
        dtype = _dtype(values) or _most_stored(stored)
    return dataclasses.replace(config, dtype=dtype, eos_token_id=values.get("eos_token_id"))


def _dtype(values: Mapping[str, Any]) -> DtypeName | None:
    """Return the type of the weights that config.json names, if it names one."""
    for field in ("dtype", "torch_dtype"):
        name = values.get(field)
        if name is None or name == "auto":
            continue
        if not isinstance(name, str) or name.removeprefix("torch.") not in _NAMED:
            raise ConfigError(f"{field} is {name!r}; allowed: {', '.join(_NAMED)}", param=field)
        return _NAMED[name.removeprefix("torch.")]
    return None


def _most_stored(stored: Mapping[str, Stored]) -> DtypeName:
    """Return the type that the most stored tensors have; without one, ModelConfig's default."""
    counts = Counter(HELD_AS[one.dtype] for one in stored.values() if one.dtype in HELD_AS)
    return counts.most_common(1)[0][0] if counts else ModelConfig.dtype


def read_weights(
    folder: Path, model: LanguageModel, stored: Mapping[str, Stored]
) -> Iterator[tuple[str, Tensor]]:
    """Compare the stored tensors with a model, then yield the model's, one at a time.

    Args:
        folder: the published folder, for messages.
        model: the unquantised model, on the meta device.
        stored: its stored tensors.

    Raises:
        CheckpointError: tensors are missing, surplus, or of a wrong shape or type.
    """
    config = model.config
    shapes = {name: tensor.shape for name, tensor in stored.items()}
    weight_map = registry.family_of(config).published_weights(config, shapes)
    expected = {
        part.name: (part.shape, tuple(HELD_AS))
        for parts in weight_map.tensors.values()
        for part in parts
    }
    compare(folder, expected, stored, weight_map.ignored)
    return (
        (name, weight_map.value(name, tensor.shape, lambda part: stored[part].read()))
        for name, tensor in model.state_dict().items()
    )
