"""Gets a state dict out of a file that somebody else wrote, without running anything of it."""

from __future__ import annotations

import re
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from engine.errors import CheckpointError

# Where training scripts put the weights beside the optimizer's state and their counters.
_NESTED_UNDER = ("model", "state_dict", "model_state_dict")
# What DistributedDataParallel and torch.compile put in front of every name.
_WRAPPERS = ("module.", "_orig_mod.")


def read_state_dict(path: Path) -> dict[str, Tensor]:
    """Names to tensors, on the CPU. Raises CheckpointError without the path in its message."""
    if not path.is_file():
        raise CheckpointError("no such file")
    content = _read_safetensors(path) if path.suffix == ".safetensors" else _read_torch(path)
    if isinstance(content, dict) and not _is_state_dict(content):
        content = next((content[name] for name in _NESTED_UNDER if name in content), content)
    if not (isinstance(content, dict) and _is_state_dict(content)):
        held = list(content)[:5] if isinstance(content, dict) else type(content).__name__
        raise CheckpointError(
            f"holds no state dict, neither by itself nor under {' or '.join(_NESTED_UNDER)}, but"
            f" {held}"
        )
    return _unwrapped(content)


def _is_state_dict(content: dict[object, object]) -> bool:
    return bool(content) and all(
        isinstance(name, str) and isinstance(value, Tensor) for name, value in content.items()
    )


def _unwrapped(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    for wrapper in _WRAPPERS * 2:  # in either order
        if all(name.startswith(wrapper) for name in weights):
            weights = {name.removeprefix(wrapper): value for name, value in weights.items()}
    return weights


def _read_safetensors(path: Path) -> object:
    try:
        return load_file(path)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"damaged or incomplete, not a whole safetensors file ({error})"
        ) from error


def _read_torch(path: Path) -> object:
    try:
        content: object = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged pickle can fail in any way
        # As the checkpoints that BorealisAI/minRNNs' training script writes (attrdict's AttrDict).
        if match := re.search(r"Unsupported global: GLOBAL (\S+)", str(error)):
            raise CheckpointError(
                f"holds Python objects besides tensors ({match[1]}), which are never unpickled;"
                " where you trust the file, save its weights alone:"
                " torch.save(dict(checkpoint['model']), 'weights.pt')"
            ) from error
        raise CheckpointError(
            "damaged, or neither a safetensors file nor one that torch.save wrote"
            f" ({type(error).__name__})"
        ) from error
    return content
