"""Checkpoints: a folder with config.json, model.safetensors and, for text, tokenizer.json.

Weights may be split over several files with a model.safetensors.index.json, as Hugging Face does.
Nothing of a checkpoint is trusted: names, shapes and dtypes are compared with what config.json
describes before any weight is read, and nothing is ever unpickled.
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

from engine.config import DtypeName, ModelConfig
from engine.errors import CheckpointError
from engine.models.lm import LM

BUNDLED = Path(__file__).parent / "checkpoints"
CONFIG = "config.json"
WEIGHTS = "model.safetensors"
WEIGHTS_INDEX = "model.safetensors.index.json"
TOKENIZER = "tokenizer.json"

DTYPES: dict[DtypeName, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
# safetensors' own names of the same three.
_STORED_AS: dict[DtypeName, str] = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


def bundled_names() -> list[str]:
    """Names of the checkpoints that ship with the package."""
    return sorted(path.parent.name for path in BUNDLED.glob(f"*/{CONFIG}"))


def resolve(model: str) -> Path:
    """The folder of a bundled name, of an existing folder, or of a Hugging Face repo id.

    In this order. A repo id is fetched into (or found in) the hub's own cache. Raises
    CheckpointError when it is none of these, with the bundled names, or cannot be fetched.
    """
    if model in bundled_names():
        return BUNDLED / model
    folder = Path(model).expanduser()
    if folder.is_dir():
        return folder
    if folder.exists():
        raise CheckpointError(f"{model}: is a file; a checkpoint is a folder with {CONFIG}")
    if _HUB_ID.fullmatch(model) and not model.startswith((".", "~")):
        return _fetch(model)
    raise CheckpointError(
        f"no model {model!r}: it is neither a folder, nor a Hugging Face repo id (owner/name), nor"
        f" a bundled model (these are: {', '.join(bundled_names()) or 'none'})"
    )


def _fetch(repo: str) -> Path:
    from huggingface_hub import snapshot_download  # slow to import, and seldom needed

    try:
        # Every error of the hub's client and of the connection below it is an OSError or a
        # ValueError (huggingface_hub.errors).
        path = snapshot_download(
            repo, allow_patterns=[CONFIG, "*.safetensors", WEIGHTS_INDEX, TOKENIZER]
        )
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise CheckpointError(
            f"no folder {repo!r} here, and Hugging Face could not give that repo: {reason}"
            f" (bundled models: {', '.join(bundled_names()) or 'none'})"
        ) from error
    return Path(path)


def load_config(folder: Path) -> ModelConfig:
    """The folder's config.json. Raises CheckpointError when it is missing, ConfigError when it
    is invalid."""
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: no such folder")
    path = folder / CONFIG
    if not path.is_file():
        raise CheckpointError(f"{folder}: {CONFIG} is missing")
    return ModelConfig.load(path)


def load_model(
    folder: Path, device: torch.device | str, dtype: DtypeName | None = None
) -> tuple[LM, ModelConfig]:
    """The folder's model in evaluation mode, on `device`, in `dtype` (None: as it is stored).

    Raises CheckpointError when a file is missing or damaged, or when the weights are not those
    that config.json describes; ConfigError when config.json is invalid.
    """
    config = load_config(folder)
    with torch.device("meta"):
        model = LM(config)
    expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    target = DTYPES[dtype or config.dtype]
    with ExitStack() as stack:
        stored = _open_weights(folder, stack)
        _check_weights(folder, expected, stored, config.dtype)
        # copy: the tensors of an open file are views of it, and a file may be overwritten.
        weights = {
            name: stored[name].get_tensor(name).to(device, target, copy=True) for name in expected
        }
    model.load_state_dict(weights, assign=True)
    return model.eval(), config


def save_model(folder: Path, model: LM, config: ModelConfig, dtype: DtypeName) -> None:
    """Writes config.json and model.safetensors with the weights rounded to `dtype`.

    Each file is replaced as a whole, so that an interrupted save never leaves half a file.
    """
    folder.mkdir(parents=True, exist_ok=True)
    # copy: safetensors refuses tensors that share memory.
    weights = {
        name: tensor.detach().to("cpu", DTYPES[dtype], copy=True).contiguous()
        for name, tensor in model.state_dict().items()
    }
    partial = folder / f".{WEIGHTS}.partial"
    save_file(weights, partial, metadata={"format": "pt"})
    os.replace(partial, folder / WEIGHTS)
    partial = folder / f".{CONFIG}.partial"
    dataclasses.replace(config, dtype=dtype).save(partial)
    os.replace(partial, folder / CONFIG)
    # safetensors makes its file private; whoever may read the config may read the weights.
    shutil.copymode(folder / CONFIG, folder / WEIGHTS)


def fingerprint(folder: Path) -> str:
    """SHA-256, in hex, over the bytes of config.json and of every weights file.

    It says which model a state belongs to. Every byte is read: a few seconds for the largest
    models, once per start, and no two models that differ anywhere share it.
    """
    total = hashlib.sha256()
    for path in [folder / CONFIG, *_weight_files(folder)]:
        with path.open("rb") as file:
            part = hashlib.file_digest(file, "sha256")
        total.update(f"{path.name} {part.hexdigest()}\n".encode())
    return total.hexdigest()


def _weight_files(folder: Path) -> list[Path]:
    index = folder / WEIGHTS_INDEX
    if not index.is_file():
        names = [WEIGHTS]
    else:
        try:
            values = json.loads(index.read_text(encoding="utf-8"))
            names = sorted(set(values["weight_map"].values()))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise CheckpointError(f"{index}: has no readable weight_map") from error
        for name in names:
            # A name with a folder in it could point anywhere on this machine.
            if not isinstance(name, str) or Path(name).name != name:
                raise CheckpointError(f"{index}: {name!r} is not the name of a file beside it")
    for name in names:
        if not (folder / name).is_file():
            raise CheckpointError(f"{folder}: {name} is missing")
    return [folder / name for name in names]


def _open_weights(folder: Path, stack: ExitStack) -> dict[str, Any]:
    """Each tensor's name and the open file that holds it."""
    stored: dict[str, Any] = {}
    for path in _weight_files(folder):
        try:
            file = stack.enter_context(safe_open(path, framework="pt"))
        except (SafetensorError, OSError) as error:
            raise CheckpointError(
                f"{path}: damaged or incomplete, not a whole safetensors file ({error})"
            ) from error
        for name in file.keys():  # noqa: SIM118 (the file is no mapping)
            if name in stored:
                raise CheckpointError(f"{path}: tensor {name!r} is also in another file")
            stored[name] = file
    return stored


def _check_weights(
    folder: Path, expected: dict[str, tuple[int, ...]], stored: dict[str, Any], dtype: DtypeName
) -> None:
    wrong = list(_contradictions(expected, stored, dtype))
    if wrong:
        more = f" (and {len(wrong) - 3} more)" if len(wrong) > 3 else ""
        raise CheckpointError(
            f"{folder}: the weights contradict {CONFIG}: {'; '.join(wrong[:3])}{more}"
        )


def _contradictions(
    expected: dict[str, tuple[int, ...]], stored: dict[str, Any], dtype: DtypeName
) -> Iterator[str]:
    for name, shape in expected.items():
        if name not in stored:
            yield f"tensor {name!r} {list(shape)} is missing"
            continue
        tensor = stored[name].get_slice(name)
        if tuple(tensor.get_shape()) != shape:
            yield (
                f"tensor {name!r} has the shape {tensor.get_shape()}, {CONFIG} makes it"
                f" {list(shape)}"
            )
        elif tensor.get_dtype() != _STORED_AS[dtype]:
            yield f"tensor {name!r} is stored as {tensor.get_dtype()}, {CONFIG} says {dtype}"
    for name in stored:
        if name not in expected:
            yield f"tensor {name!r} is unexpected"
