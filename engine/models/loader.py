"""Reads and writes model folders: config.json, weights files and a tokenizer.

A folder is in minserve's form, or in that of another project whose models a family computes
(engine/models/published.py). Nothing in a folder is trusted: names, shapes and dtypes are compared
with config.json before any weight is read, and no object but tensors is ever unpickled. A file that
cannot be read raises a CheckpointError with its path and the reason, never an OSError.

The matrices of a quantised checkpoint (`quantization` in config.json) are int8 or fp8 tensors, each
with an fp32 `scale` beside its `weight`. They are bitwise equal to those of quantisation at load.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from engine.config import DtypeName, ModelConfig, Quantization
from engine.errors import CheckpointError, ConfigError
from engine.model_files import has_file, has_folder, mode_of, unreadable
from engine.models import published, registry
from engine.models.language_model import LanguageModel
from engine.models.quantize import NotFiniteError, all_finite
from engine.models.quantized import quantize_weights, quantized_matrices
from engine.models.weight_files import (
    STORED_AS,
    TORCH_SUFFIXES,
    TORCH_WEIGHTS,
    TORCH_WEIGHTS_INDEX,
    WEIGHTS,
    WEIGHTS_INDEX,
    Stored,
    compare,
    open_weights,
    weight_files,
)
from engine.sentencepiece_model import ADDED_TOKENS
from engine.tokenizer_files import SENTENCEPIECE, TOKENIZER

BUNDLED = Path(__file__).parents[1] / "checkpoints"
CONFIG = "config.json"
# The eos_token_id in it takes precedence over config.json's.
GENERATION_CONFIG = "generation_config.json"
# A chat template and the files that it refers to, if there are any.
CHAT = (
    "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja", "chat_template.json",
)  # fmt: skip
# Texts to begin from, which the service tells clients of.
STARTS = "starts.json"
# What is fetched from the top level of a repo of the hub, until a folder has weights: safetensors
# alone where a repo has both.
_FETCHED = (
    (
        CONFIG, GENERATION_CONFIG, "*.safetensors", WEIGHTS_INDEX, TOKENIZER, SENTENCEPIECE,
        ADDED_TOKENS, *CHAT, STARTS,
    ),
    (TORCH_WEIGHTS, TORCH_WEIGHTS_INDEX, "pytorch_model-*.bin"),
    tuple(f"*{suffix}" for suffix in TORCH_SUFFIXES),
)  # fmt: skip

DTYPES: dict[DtypeName, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


def bundled_names() -> list[str]:
    """Return the names of the checkpoints that ship with the package."""
    return sorted(path.parent.name for path in BUNDLED.glob(f"*/{CONFIG}"))


def resolve(model: str) -> Path:
    """Return the folder of a model: a bundled name, an existing folder, or a Hugging Face repo id.

    They are tried in this order. A repo id is downloaded to (or found in) the hub's own cache.
    Raises CheckpointError, with the bundled names, if it is none of these or cannot be read or
    downloaded.
    """
    if model in bundled_names():
        return BUNDLED / model
    if "\0" in model:
        raise CheckpointError(f"no model {model!r}: a name cannot contain a null character")
    folder = Path(os.path.expanduser(model))
    if has_folder(folder):
        return folder
    if mode_of(folder) is not None:
        raise CheckpointError(f"{model}: is a file; a checkpoint is a folder with {CONFIG}")
    if _HUB_ID.fullmatch(model) and not model.startswith((".", "~")):
        return _fetch(model)
    raise CheckpointError(
        f"no model {model!r}: it is neither a folder, nor a Hugging Face repo id (owner/name), nor"
        f" a bundled model (bundled models: {', '.join(bundled_names()) or 'none'})"
    )


def _fetch(repo: str) -> Path:
    from huggingface_hub import snapshot_download  # slow to import, and seldom needed

    try:
        # Every error of the hub's client, and of the connection below it, is an OSError or a
        # ValueError (huggingface_hub.errors).
        for patterns in _FETCHED:
            path = Path(
                snapshot_download(repo, allow_patterns=list(patterns), ignore_patterns="*/*")
            )
            if _has_weights(path):
                break
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise CheckpointError(
            f"no folder {repo!r} here, and downloading that repo from Hugging Face failed: {reason}"
            f" (bundled models: {', '.join(bundled_names()) or 'none'})"
        ) from error
    return path


def _has_weights(folder: Path) -> bool:
    try:
        return bool(weight_files(folder))
    except CheckpointError:
        return False


def load_config(folder: Path) -> ModelConfig:
    """Read the folder's config.json, and end-of-text ids from its generation_config.json, if any.

    Raises CheckpointError if config.json is missing, the folder cannot be read or the other file is
    wrong; ConfigError if config.json is invalid or cannot be read.
    """
    if not has_folder(folder):
        raise CheckpointError(f"{folder}: no such folder")
    path = folder / CONFIG
    if not has_file(path):
        raise CheckpointError(f"{folder}: {CONFIG} is missing")
    return with_generation_config(read_config(path), folder)


def read_config(path: Path) -> ModelConfig:
    """Read a config.json, and what it leaves open from the weights beside it.

    Raises ConfigError, whose message begins with the path; CheckpointError for weights of a
    published folder that cannot be read.
    """
    values = _read_values(path)
    try:
        if registry.is_own(values):
            return registry.config_from_dict(values)
        return published.read_config(path.parent, values)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error.message}", param=error.param) from error


def is_published(folder: Path) -> bool:
    """Return whether a folder is in another project's form. Raises ConfigError."""
    return not registry.is_own(_read_values(folder / CONFIG))


def _read_values(path: Path) -> Mapping[str, Any]:
    """Return the object in a config.json. Raises ConfigError."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not valid JSON: {error}") from error
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: must contain a JSON object")
    return values


def with_generation_config(config: ModelConfig, folder: Path) -> ModelConfig:
    """Return the config with the end-of-text ids of the folder's generation_config.json.

    These replace the config's own. Without the file, or if it names none, the config is unchanged.
    Raises CheckpointError.
    """
    path = folder / GENERATION_CONFIG
    if not has_file(path):
        return config
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise unreadable(path, error) from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(values, dict):
        raise CheckpointError(f"{path}: must contain a JSON object")
    ids = values.get("eos_token_id")
    if ids is None:
        return config
    try:
        return dataclasses.replace(config, eos_token_id=ids)
    except ConfigError as error:
        raise CheckpointError(f"{path}: {error.message}") from error


def load_model(
    folder: Path,
    device: torch.device | str,
    dtype: DtypeName | None = None,
    quantize: Quantization | None = None,
    *,
    state_dtype: str = "auto",
    known_readable: bool = False,
) -> tuple[LanguageModel, ModelConfig]:
    """Load the folder's model, in evaluation mode.

    Args:
        folder: the checkpoint.
        device: where to put the weights.
        dtype: type of the weights that are not quantised; None: that of the config.
        quantize: quantize the stored weights, whatever `dtype` is; the returned config says so.
            None: leave them as they are, quantised or not.
        state_dtype: type of the states (EngineConfig); the returned config says so.
        known_readable: every byte of the files has just been read (`fingerprint`), so this need not
            be checked.

    Raises:
        CheckpointError: a file is missing, unreadable or damaged, or the weights do not match
            config.json.
        ConfigError: config.json is invalid, the checkpoint is quantised in another way than
            `quantize`, or the model has no states of `state_dtype`.
    """
    config = load_config(folder)
    target = quantized_config(config, quantize, folder).with_state_dtype(state_dtype)
    with torch.device("meta"):
        stored_model, model = registry.build(config), registry.build(target)
    dtypes = _dtypes(model, DTYPES[dtype or config.dtype])
    with open_weights(folder, known_readable=known_readable) as stored:
        # One tensor at a time, so that the unquantised ones are never in memory together.
        read = _read_checked(folder, stored_model, stored)
        tensors: Iterator[tuple[str, Tensor]] = ((name, tensor.to(device)) for name, tensor in read)
        if quantize is not None and config.quantization is None:
            tensors = quantize_weights(tensors, quantized_matrices(model), quantize)
        try:
            # copy=True: tensors of an open file are views of it, and the file may be overwritten.
            weights = {name: tensor.to(dtypes[name], copy=True) for name, tensor in tensors}
        except NotFiniteError as error:
            raise CheckpointError(f"{folder}: cannot be quantised: {error}") from error
    for name, scale in quantized_matrices(model).items():
        if not all_finite(weights[name]):
            raise CheckpointError(f"{folder}: tensor {name!r} has values that are not finite")
        if not bool((weights[scale].isfinite() & (weights[scale] > 0)).all()):
            raise CheckpointError(f"{folder}: tensor {scale!r} has values that are not positive")
    model.load_state_dict(weights, assign=True)
    return model.eval(), target


def outline_model(
    folder: Path,
    dtype: DtypeName | None = None,
    quantize: Quantization | None = None,
    *,
    state_dtype: str = "auto",
) -> tuple[LanguageModel, ModelConfig, Mapping[str, Stored]]:
    """Return what `load_model` would, without weights: the model is on the meta device.

    Returns also the stored tensors, whose shapes and types are compared with the config. They can
    no longer be read. Raises what `load_model` raises.
    """
    config = load_config(folder)
    target = quantized_config(config, quantize, folder).with_state_dtype(state_dtype)
    with torch.device("meta"):
        stored_model, model = registry.build(config), registry.build(target)
    dtypes = _dtypes(model, DTYPES[dtype or config.dtype])
    with open_weights(folder, known_readable=True) as stored:
        _read_checked(folder, stored_model, stored)
    weights = {name: tensor.to(dtypes[name]) for name, tensor in model.state_dict().items()}
    model.load_state_dict(weights, assign=True)
    return model.eval(), target, stored


def _read_checked(
    folder: Path, model: LanguageModel, stored: Mapping[str, Stored]
) -> Iterator[tuple[str, Tensor]]:
    """Compare the stored tensors with the model that the config describes; yield that one's."""
    read = published.read_weights if is_published(folder) else _read_own
    return read(folder, model, stored)


def quantized_config(
    config: ModelConfig, quantize: Quantization | None, source: Path
) -> ModelConfig:
    """Return the config of the model at `source` after quantising it; None changes nothing.

    Raises ConfigError if the model is already quantised in another way.
    """
    if quantize is None or quantize == config.quantization:
        return config
    if config.quantization is not None:
        raise ConfigError(
            f"{source}: its weights are {config.quantization} and cannot be quantised as"
            f" {quantize}: leave quantize out, or start from the unquantised weights",
            param="quantize",
        )
    return dataclasses.replace(config, quantization=quantize)


def quantize_model(model: LanguageModel, kind: Quantization) -> LanguageModel:
    """Return a quantised copy of an unquantised model, on its device, in evaluation mode.

    Tensors that are not quantised are shared. Raises NotFiniteError, naming the tensor, for weights
    that are not finite, and ConfigError for a model that is already quantised.
    """
    config = model.config
    if config.quantization is not None:
        raise ConfigError(
            f"the model is already quantised as {config.quantization}", param="quantize"
        )
    with torch.device("meta"):
        quantized = registry.build(dataclasses.replace(config, quantization=kind))
    weights = quantize_weights(model.state_dict().items(), quantized_matrices(quantized), kind)
    quantized.load_state_dict(dict(weights), assign=True)
    return quantized.eval()


def save_model(folder: Path, model: LanguageModel, config: ModelConfig, dtype: DtypeName) -> None:
    """Write config.json and model.safetensors, with the weights rounded to `dtype`.

    Quantised weights stay quantised, and config.json says so. Each file is replaced as a whole, so
    an interrupted save never leaves a partial file.
    """
    folder.mkdir(parents=True, exist_ok=True)
    dtypes = _dtypes(model, DTYPES[dtype])
    # copy=True: safetensors refuses tensors that share memory.
    weights = {
        name: tensor.detach().to("cpu", dtypes[name], copy=True).contiguous()
        for name, tensor in model.state_dict().items()
    }
    partial = folder / f".{WEIGHTS}.partial"
    save_file(weights, partial, metadata={"format": "pt"})
    os.replace(partial, folder / WEIGHTS)
    partial = folder / f".{CONFIG}.partial"
    quantization = model.config.quantization
    dataclasses.replace(config, dtype=dtype, quantization=quantization).save(partial)
    os.replace(partial, folder / CONFIG)
    # safetensors creates a private file; whoever may read the config may read the weights.
    shutil.copymode(folder / CONFIG, folder / WEIGHTS)


def fingerprint(folder: Path, state_dtype: str = "auto") -> str:
    """Return the SHA-256, in hex, over the bytes of config.json and of every weights file.

    It identifies the model to which a state belongs; generation_config.json (where a text ends) is
    not part of it, but a `state_dtype` that is not the model's own is. Every byte is read once per
    start, a few seconds for the largest models. Raises CheckpointError for files that are missing
    or cannot be read.
    """
    total = hashlib.sha256()
    for path in [folder / CONFIG, *weight_files(folder)]:
        try:
            with path.open("rb") as file:
                part = hashlib.file_digest(file, "sha256")
        except OSError as error:
            raise unreadable(path, error) from error
        total.update(f"{path.name} {part.hexdigest()}\n".encode())
    if state_dtype != "auto" and not _is_own_state_dtype(load_config(folder), state_dtype):
        total.update(f"states {state_dtype}\n".encode())
    return total.hexdigest()


def _is_own_state_dtype(config: ModelConfig, state_dtype: str) -> bool:
    return config.with_state_dtype(state_dtype) == config


def _dtypes(model: LanguageModel, dtype: torch.dtype) -> dict[str, torch.dtype]:
    """Return each tensor's type if the model is held or stored in `dtype`.

    Quantised weights and their scales have their own types, and some parameters are float32.
    """
    matrices = quantized_matrices(model)
    own = {*matrices, *matrices.values()}

    def type_of(name: str, tensor: Tensor) -> torch.dtype:
        if name in own:
            return tensor.dtype
        return torch.float32 if name.endswith(model.float32_parameters) else dtype

    return {name: type_of(name, tensor) for name, tensor in model.state_dict().items()}


def _read_own(
    folder: Path, model: LanguageModel, stored: Mapping[str, Stored]
) -> Iterator[tuple[str, Tensor]]:
    """Compare the tensors of a folder in minserve's form with the model, then yield them."""
    plain = DTYPES[model.config.dtype]
    dtypes = _dtypes(model, plain)

    def stored_as(name: str) -> tuple[str, ...]:
        # What is held in float32 beside 16-bit weights may be stored as these are.
        either = name.endswith(model.float32_parameters)
        kinds = (dtypes[name], plain) if either else (dtypes[name],)
        return tuple(dict.fromkeys(STORED_AS[kind] for kind in kinds))

    expected = {
        name: (tuple(tensor.shape), stored_as(name)) for name, tensor in model.state_dict().items()
    }
    compare(folder, expected, stored)
    return ((name, stored[name].read().contiguous()) for name in expected)
