"""Reads a state dict from a file that somebody else wrote, without executing anything in it."""

from __future__ import annotations

import re
from pathlib import Path
from zipfile import is_zipfile

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from engine.config import DtypeName
from engine.errors import CheckpointError

# The type in which weights of a state dict are held.
HELD_AS: dict[torch.dtype, DtypeName] = {
    torch.float64: "float32",
    torch.float32: "float32",
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
}
# Keys under which training scripts store the weights, beside optimizer state and counters.
_NESTED_UNDER = ("model", "state_dict", "model_state_dict")
# Prefixes that DistributedDataParallel and torch.compile add to every name.
_WRAPPERS = ("module.", "_orig_mod.")


def read_state_dict(path: Path, *, mapped: bool = False) -> dict[str, Tensor]:
    """Return tensors by name, on the CPU.

    `mapped`: map a file of torch.save into memory instead of reading it, if its format allows that
    (torch 1.6 and later). The tensors are then views of the file.

    Raises CheckpointError; its message does not contain the path.
    """
    if not path.is_file():
        raise CheckpointError("no such file")
    if path.suffix == ".safetensors":
        content = _read_safetensors(path)
    else:
        content = _read_torch(path, mapped and is_zipfile(path))
    if isinstance(content, dict) and not _is_state_dict(content):
        content = next((content[name] for name in _NESTED_UNDER if name in content), content)
    if isinstance(content, dict) and any(map(_is_weight, content.items())):
        # Some scripts store a model's configuration among its weights.
        content = {name: value for name, value in content.items() if isinstance(value, Tensor)}
    if not (isinstance(content, dict) and _is_state_dict(content)):
        held = list(content)[:5] if isinstance(content, dict) else type(content).__name__
        raise CheckpointError(
            f"contains no state dict, neither at its top level nor under"
            f" {' or '.join(_NESTED_UNDER)}, but {held}"
        )
    for name, tensor in content.items():
        if (kind := _unlike_stored(tensor)) is not None:
            raise CheckpointError(f"tensor {name!r} {kind}; allowed: dense tensors, stored whole")
    return _unwrapped(content)


def _unlike_stored(tensor: Tensor) -> str | None:
    """Return why a tensor's values are not all in the file, one by one; None: they are.

    A few bytes of a file can name a tensor of any size, which would be allocated when it is copied.
    """
    if tensor.is_nested:
        return "is nested"
    if tensor.layout != torch.strided:
        return f"is {str(tensor.layout).removeprefix('torch.')}"
    if tensor.device.type != "cpu":
        return f"has no values (device {tensor.device})"
    stored, needed = tensor.untyped_storage().nbytes(), tensor.numel() * tensor.itemsize
    if stored < needed:
        return f"of shape {list(tensor.shape)} repeats {stored} bytes"
    return None


def _is_state_dict(content: dict[object, object]) -> bool:
    return bool(content) and all(
        isinstance(name, str) and isinstance(value, Tensor) for name, value in content.items()
    )


def _is_weight(item: tuple[object, object]) -> bool:
    name, value = item
    return isinstance(name, str) and name.endswith(".weight") and isinstance(value, Tensor)


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


def _read_torch(path: Path, mapped: bool) -> object:
    try:
        content: object = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except Exception as error:  # a damaged pickle can fail in any way
        # For example in checkpoints of BorealisAI/minRNNs' training script (attrdict's AttrDict).
        if match := re.search(r"Unsupported global: GLOBAL (\S+)", str(error)):
            raise CheckpointError(
                f"contains Python objects besides tensors ({match[1]}), which are never unpickled;"
                " if you trust the file, save only its weights. If it is a module:"
                f" torch.save(torch.load({path.name!r}, weights_only=False).state_dict(),"
                " 'weights.pth'); if it is a checkpoint: torch.save(dict(checkpoint['model']),"
                " 'weights.pth')"
            ) from error
        raise CheckpointError(
            "damaged, or neither a safetensors file nor a file written by torch.save"
            f" ({type(error).__name__})"
        ) from error
    return content
