"""Weights files: the tensors of a model folder by name, in whichever format the files are.

A folder has one of these, looked for in this order:

| files | format |
|---|---|
| `model.safetensors.index.json` and the files that it names | safetensors |
| `model.safetensors` | safetensors |
| `pytorch_model.bin.index.json` and the files that it names | torch.save |
| `pytorch_model.bin` | torch.save |
| the only `.pth` or `.pt` file | torch.save |

Files of torch.save are read with weights_only and nothing is allow-listed, so nothing but tensors
and plain values is unpickled. Both formats are mapped into memory. Files of torch before 1.6 cannot
be: they are read whole each time that they are opened, for the config and again for the weights.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from engine.errors import CheckpointError
from engine.model_files import has_file, read_through, unreadable
from engine.models.state_dicts import read_state_dict

WEIGHTS = "model.safetensors"
WEIGHTS_INDEX = "model.safetensors.index.json"
TORCH_WEIGHTS = "pytorch_model.bin"
TORCH_WEIGHTS_INDEX = "pytorch_model.bin.index.json"
TORCH_SUFFIXES = (".pth", ".pt")
MOST_NAMED = 3  # tensors in one error message

# safetensors' names of types
STORED_AS: dict[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int8: "I8",
    torch.float8_e4m3fn: "F8_E4M3",
}


@dataclass(frozen=True, slots=True)
class Stored:
    """A stored tensor, which is read when it is asked for.

    Args:
        shape: its shape.
        dtype: safetensors' name of its type.
        read: returns it on the CPU, a view of the file if that is mapped.
    """

    shape: tuple[int, ...]
    dtype: str
    read: Callable[[], Tensor]


def weight_files(folder: Path) -> list[Path]:
    """Return the folder's weights files, in the order of their names.

    Raises CheckpointError if there are none, if several could be meant, or if one is missing.
    """
    for index, single in ((WEIGHTS_INDEX, WEIGHTS), (TORCH_WEIGHTS_INDEX, TORCH_WEIGHTS)):
        if has_file(folder / index):
            return _indexed(folder / index)
        if has_file(folder / single):
            return [folder / single]
    try:
        found = sorted(path for path in folder.iterdir() if path.suffix in TORCH_SUFFIXES)
    except OSError as error:
        raise unreadable(folder, error) from error
    if len(found) > 1:
        names = ", ".join(path.name for path in found[:3])
        raise CheckpointError(
            f"{folder}: {WEIGHTS} is missing, and several other files may hold the weights"
            f" ({names}{', ...' if len(found) > 3 else ''}); leave one of them in the folder"
        )
    if not found or not has_file(found[0]):
        raise CheckpointError(
            f"{folder}: {WEIGHTS} is missing, and so are {TORCH_WEIGHTS} and"
            f" a {' or '.join(TORCH_SUFFIXES)} file"
        )
    return found


def _indexed(index: Path) -> list[Path]:
    try:
        values = json.loads(index.read_text(encoding="utf-8"))
        names = sorted(set(values["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{index}: has no readable weight_map") from error
    except OSError as error:
        raise unreadable(index, error) from error
    for name in names:
        # A name with a folder in it could refer to any file of this machine.
        if not isinstance(name, str) or Path(name).name != name or not name.isprintable():
            raise CheckpointError(f"{index}: {name!r} is not the name of a file beside it")
        if not has_file(index.parent / name):
            raise CheckpointError(f"{index.parent}: {name} is missing")
    return [index.parent / name for name in names]


@contextmanager
def open_weights(folder: Path, *, known_readable: bool = False) -> Iterator[dict[str, Stored]]:
    """Open the folder's weights files; yield their tensors by name.

    Args:
        folder: the model folder.
        known_readable: every byte of the files has just been read, or only names, shapes and types
            are wanted; so a failing disk need not be looked for.

    Raises:
        CheckpointError: a file is missing, unreadable or damaged, or has other things than tensors.
    """
    stored: dict[str, Stored] = {}
    with ExitStack() as stack:
        for path in weight_files(folder):
            if not known_readable:
                read_through(path)
            tensors = _safetensors(path, stack) if path.suffix == ".safetensors" else _torch(path)
            for name, tensor in tensors:
                if name in stored:
                    raise CheckpointError(f"{path}: tensor {name!r} is also in another file")
                stored[name] = tensor
        yield stored


def _safetensors(path: Path, stack: ExitStack) -> Iterator[tuple[str, Stored]]:
    try:
        file = stack.enter_context(safe_open(path, framework="pt"))
    except OSError as error:
        raise unreadable(path, error) from error
    except SafetensorError as error:
        raise CheckpointError(
            f"{path}: damaged or incomplete, not a whole safetensors file ({error})"
        ) from error
    for name in file.keys():  # noqa: SIM118 (the file is not a mapping)
        tensor = file.get_slice(name)
        shape, dtype = tuple(tensor.get_shape()), tensor.get_dtype()
        yield name, Stored(shape, dtype, partial(file.get_tensor, name))


def _torch(path: Path) -> Iterator[tuple[str, Stored]]:
    try:
        tensors = read_state_dict(path, mapped=True)
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error.message}") from error
    for name, tensor in tensors.items():
        dtype = STORED_AS.get(tensor.dtype, str(tensor.dtype))
        yield name, Stored(tuple(tensor.shape), dtype, partial(_itself, tensor.detach()))


def _itself(tensor: Tensor) -> Tensor:
    return tensor


def compare(
    folder: Path,
    expected: Mapping[str, tuple[Collection[int], Collection[str]]],
    stored: Mapping[str, Stored],
    ignored: Collection[str] = (),
) -> None:
    """Compare stored tensors with the ones that a model has.

    Args:
        folder: the model folder, for messages.
        expected: by name, the shape and the allowed types (safetensors' names).
        stored: the stored tensors.
        ignored: names of tensors that may be stored as well.

    Raises:
        CheckpointError: it names up to MOST_NAMED tensors that are missing, surplus or wrong.
    """
    wrong = list(_contradictions(expected, stored, ignored))
    if wrong:
        more = f" (and {len(wrong) - MOST_NAMED} more)" if len(wrong) > MOST_NAMED else ""
        raise CheckpointError(
            f"{folder}: the weights contradict config.json: {'; '.join(wrong[:MOST_NAMED])}{more}"
        )


def _contradictions(
    expected: Mapping[str, tuple[Collection[int], Collection[str]]],
    stored: Mapping[str, Stored],
    ignored: Collection[str],
) -> Iterator[str]:
    for name, (shape, dtypes) in expected.items():
        if name not in stored:
            yield f"tensor {name!r} {list(shape)} is missing"
            continue
        tensor = stored[name]
        if tensor.shape != tuple(shape):
            yield (
                f"tensor {name!r} has shape {list(tensor.shape)}, config.json requires"
                f" {list(shape)}"
            )
        elif tensor.dtype not in dtypes:
            yield (
                f"tensor {name!r} is stored as {tensor.dtype}, config.json requires"
                f" {' or '.join(dtypes)}"
            )
    for name in stored:
        if name not in expected and name not in ignored:
            yield f"tensor {name!r} is unexpected"
