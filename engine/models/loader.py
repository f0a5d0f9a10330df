"""Reads and writes checkpoints: folders with config.json, model.safetensors and tokenizer.json.

Weights may be split over several files with a model.safetensors.index.json, as Hugging Face does.
Nothing in a checkpoint is trusted: names, shapes and dtypes are compared with config.json before
any weight is read, and nothing is ever unpickled. A file that cannot be read raises a
CheckpointError with its path and the reason, never an OSError.

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
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from engine.config import DtypeName, ModelConfig, Quantization
from engine.errors import CheckpointError, ConfigError
from engine.model_files import has_file, has_folder, mode_of, read_through, unreadable
from engine.models import registry
from engine.models.language_model import LanguageModel
from engine.models.quantize import NotFiniteError, all_finite
from engine.models.quantized import quantize_weights, quantized_matrices

BUNDLED = Path(__file__).parents[1] / "checkpoints"
CONFIG = "config.json"
# The eos_token_id in it takes precedence over config.json's.
GENERATION_CONFIG = "generation_config.json"
WEIGHTS = "model.safetensors"
WEIGHTS_INDEX = "model.safetensors.index.json"
TOKENIZER = "tokenizer.json"
# A chat template and the files that it refers to, if there are any.
CHAT = (
    "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja", "chat_template.json",
)  # fmt: skip

DTYPES: dict[DtypeName, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
# safetensors' names of types.
_STORED_AS: dict[torch.dtype, str] = {
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int8: "I8",
    torch.float8_e4m3fn: "F8_E4M3",
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
        path = snapshot_download(
            repo,
            allow_patterns=[
                CONFIG,
                GENERATION_CONFIG,
                "*.safetensors",
                WEIGHTS_INDEX,
                TOKENIZER,
                *CHAT,
            ],
        )
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise CheckpointError(
            f"no folder {repo!r} here, and downloading that repo from Hugging Face failed: {reason}"
            f" (bundled models: {', '.join(bundled_names()) or 'none'})"
        ) from error
    return Path(path)


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
    """Read a config.json. Raises ConfigError; its message begins with the path."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not valid JSON: {error}") from error
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: must contain a JSON object")
    try:
        return registry.config_from_dict(values)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error.message}", param=error.param) from error


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
    known_readable: bool = False,
) -> tuple[LanguageModel, ModelConfig]:
    """Load the folder's model, in evaluation mode.

    Args:
        folder: the checkpoint.
        device: where to put the weights.
        dtype: type of the weights that are not quantised; None: as stored.
        quantize: quantize the stored weights, whatever `dtype` is; the returned config says so.
            None: leave them as they are, quantised or not.
        known_readable: every byte of the files has just been read (`fingerprint`), so this need not
            be checked.

    Raises:
        CheckpointError: a file is missing, unreadable or damaged, or the weights do not match
            config.json.
        ConfigError: config.json is invalid, or the checkpoint is quantised in another way than
            `quantize`.
    """
    config = load_config(folder)
    expected = _expected(config)
    target = quantized_config(config, quantize, folder)
    with torch.device("meta"):
        model = registry.build(target)
    dtypes = _dtypes(model, DTYPES[dtype or config.dtype])
    with ExitStack() as stack:
        stored = _open_weights(folder, stack, known_readable)
        _check_weights(folder, expected, stored)
        # One tensor at a time, so that the unquantised ones are never in memory together.
        tensors: Iterator[tuple[str, Tensor]] = (
            (name, stored[name].get_tensor(name).to(device)) for name in expected
        )
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


def fingerprint(folder: Path) -> str:
    """Return the SHA-256, in hex, over the bytes of config.json and of every weights file.

    It identifies the model to which a state belongs; generation_config.json (where a text ends) is
    not part of it. Every byte is read once per start, a few seconds for the largest models. Raises
    CheckpointError for files that are missing or cannot be read.
    """
    total = hashlib.sha256()
    for path in [folder / CONFIG, *_weight_files(folder)]:
        try:
            with path.open("rb") as file:
                part = hashlib.file_digest(file, "sha256")
        except OSError as error:
            raise unreadable(path, error) from error
        total.update(f"{path.name} {part.hexdigest()}\n".encode())
    return total.hexdigest()


def _weight_files(folder: Path) -> list[Path]:
    index = folder / WEIGHTS_INDEX
    if not has_file(index):
        names = [WEIGHTS]
    else:
        try:
            values = json.loads(index.read_text(encoding="utf-8"))
            names = sorted(set(values["weight_map"].values()))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise CheckpointError(f"{index}: has no readable weight_map") from error
        except OSError as error:
            raise unreadable(index, error) from error
        for name in names:
            # A name with a folder in it could refer to any file of this machine.
            if not isinstance(name, str) or Path(name).name != name:
                raise CheckpointError(f"{index}: {name!r} is not the name of a file beside it")
    for name in names:
        if not has_file(folder / name):
            raise CheckpointError(f"{folder}: {name} is missing")
    return [folder / name for name in names]


def _open_weights(folder: Path, stack: ExitStack, known_readable: bool) -> dict[str, Any]:
    """Return the open file that contains each tensor, by the tensor's name."""
    stored: dict[str, Any] = {}
    for path in _weight_files(folder):
        if not known_readable:
            read_through(path)
        try:
            file = stack.enter_context(safe_open(path, framework="pt"))
        except OSError as error:
            raise unreadable(path, error) from error
        except SafetensorError as error:
            raise CheckpointError(
                f"{path}: damaged or incomplete, not a whole safetensors file ({error})"
            ) from error
        for name in file.keys():  # noqa: SIM118 (the file is not a mapping)
            if name in stored:
                raise CheckpointError(f"{path}: tensor {name!r} is also in another file")
            stored[name] = file
    return stored


def _dtypes(model: LanguageModel, dtype: torch.dtype) -> dict[str, torch.dtype]:
    """Return each tensor's type if the model is held or stored in `dtype`.

    Quantised weights and their scales have their own types.
    """
    matrices = quantized_matrices(model)
    own = {*matrices, *matrices.values()}
    return {
        name: tensor.dtype if name in own else dtype for name, tensor in model.state_dict().items()
    }


def _expected(config: ModelConfig) -> dict[str, tuple[list[int], str]]:
    """Return the shape and safetensors' type name of every tensor that the config describes."""
    with torch.device("meta"):
        model = registry.build(config)
    dtypes = _dtypes(model, DTYPES[config.dtype])
    return {
        name: (list(tensor.shape), _STORED_AS[dtypes[name]])
        for name, tensor in model.state_dict().items()
    }


def _check_weights(
    folder: Path, expected: dict[str, tuple[list[int], str]], stored: dict[str, Any]
) -> None:
    wrong = list(_contradictions(expected, stored))
    if wrong:
        more = f" (and {len(wrong) - 3} more)" if len(wrong) > 3 else ""
        raise CheckpointError(
            f"{folder}: the weights contradict {CONFIG}: {'; '.join(wrong[:3])}{more}"
        )


def _contradictions(
    expected: dict[str, tuple[list[int], str]], stored: dict[str, Any]
) -> Iterator[str]:
    for name, (shape, dtype) in expected.items():
        if name not in stored:
            yield f"tensor {name!r} {shape} is missing"
            continue
        tensor = stored[name].get_slice(name)
        if tensor.get_shape() != shape:
            yield f"tensor {name!r} has shape {tensor.get_shape()}, {CONFIG} requires {shape}"
        elif tensor.get_dtype() != dtype:
            yield f"tensor {name!r} is stored as {tensor.get_dtype()}, {CONFIG} requires {dtype}"
    for name in stored:
        if name not in expected:
            yield f"tensor {name!r} is unexpected"
