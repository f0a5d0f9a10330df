"""TuningCache: results of autotuning, kept in a file for the next start.

A file belongs to one model on one GPU: its name is a hash of the GPU's name and size, of the
versions of minserve, torch and CUDA, of the compiled operators, and of the model's shapes and
dtypes. Its content is used only to choose by name: a path among those that compete now, an
algorithm among those that the library offers now.

A file that is missing, damaged or of another key is ignored, and a folder that cannot be written is
left alone. Then everything is measured at each start.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
import json
import os
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Self, TypeVar

import torch

from engine.models.language_model import LanguageModel
from engine.ops import library

_Item = TypeVar("_Item")
_FORMAT = 1
_MOST_BYTES = 2**24  # the most bytes of a file; a larger one is not ours


def tuning_folder(setting: str) -> Path | None:
    """Return the folder for the setting EngineConfig.tuning_cache.

    "auto" is `$XDG_CACHE_HOME/minserve` or `~/.cache/minserve`. None for "off", or without a home
    directory.
    """
    if setting == "off":
        return None
    if setting != "auto":
        return Path(setting)
    base = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(base):  # relative paths are invalid (XDG Base Directory Specification)
        return Path(base) / "minserve"
    try:
        return Path.home() / ".cache" / "minserve"
    except RuntimeError:
        return None


class TuningCache:
    """Choices that were measured, read from `path` if that is a file for `key`.

    Without a path they exist in this process only.
    """

    def __init__(self, path: Path | None = None, key: dict[str, Any] | None = None) -> None:
        self.path, self._key = path, key or {}
        # Number of choices read from the file, and of those added by measuring.
        self.read = self.measured = 0
        self._paths, self._products = self._load()

    @classmethod
    def of(cls, folder: Path | None, model: LanguageModel, device: torch.device) -> Self:
        """Return the cache in `folder` for `model`, whose weights are on a GPU `device`.

        Without a folder there is no file.
        """
        if folder is None:
            return cls()
        key = _key(model, device)
        digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
        return cls(folder / "autotune" / f"{digest[:32]}.json", key)

    def path_of(self, kind: str, size: int, names: Sequence[str]) -> str | None:
        """Return the fastest of the paths with these names; None if it is not known."""
        found = self._paths.get(f"{kind} {size}")
        if not found or found[1:] != list(names) or found[0] not in names:
            return None
        self.read += 1
        return found[0]

    def add_path(self, kind: str, size: int, names: Sequence[str], quickest: str) -> None:
        """Store the fastest path."""
        self._paths[f"{kind} {size}"] = [quickest, *names]
        self.measured += 1

    def product_of(self, shape: str, offered: Sequence[list[int]]) -> int | None:
        """Return the index of the fastest offered algorithm; -1: torch's call; None: unknown."""
        found = self._products.get(shape)
        if found is None or (found and found not in offered):
            return None
        self.read += 1
        return offered.index(found) if found else -1

    def add_product(self, shape: str, algorithm: list[int]) -> None:
        """Store the fastest algorithm of a product; an empty list is torch's own call."""
        self._products[shape] = algorithm
        self.measured += 1

    def save(self) -> None:
        """Write the file if anything was measured, merged with what others have written meanwhile.

        It is replaced as a whole; if two processes write at once, the last one wins.
        """
        if self.path is None or not self.measured:
            return
        paths, products = self._load()
        content = {
            "format": _FORMAT,
            "key": self._key,
            "paths": {**paths, **self._paths},
            "products": {**products, **self._products},
        }
        with suppress(OSError):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            descriptor, partial = tempfile.mkstemp(suffix=".partial", dir=self.path.parent)
            try:
                with open(descriptor, "w", encoding="utf-8") as file:
                    json.dump(content, file)
                os.replace(partial, self.path)
            except OSError:
                os.unlink(partial)
                raise

    def _load(self) -> tuple[dict[str, list[str]], dict[str, list[int]]]:
        """Read paths and products from the file, ignoring anything that `save` would not write."""
        if self.path is None:
            return {}, {}
        try:
            with self.path.open("rb") as file:
                content = json.loads(file.read(_MOST_BYTES))
        except (OSError, ValueError, RecursionError):
            return {}, {}
        if not isinstance(content, dict) or content.get("format") != _FORMAT:
            return {}, {}
        if content.get("key") != self._key:
            return {}, {}
        return _lists(content.get("paths"), str), _lists(content.get("products"), int)


def _lists(values: object, kind: type[_Item]) -> dict[str, list[_Item]]:
    """Return the entries of an object that are lists of items of this type."""
    if not isinstance(values, dict):
        return {}
    return {
        name: found
        for name, found in values.items()
        if isinstance(found, list) and all(type(item) is kind for item in found)
    }


def _key(model: LanguageModel, device: torch.device) -> dict[str, Any]:
    """Return everything that decides which kernels compete and how long they take, for JSON."""
    gpu = torch.cuda.get_device_properties(device)
    shape = dataclasses.asdict(model.config)
    del shape["eos_token_id"], shape["dtype"]  # the type in which it was stored
    built = library.PATH.stat()
    try:
        version = importlib.metadata.version("minserve")
    except importlib.metadata.PackageNotFoundError:
        version = ""
    return {
        "gpu": [gpu.name, gpu.multi_processor_count, gpu.total_memory],
        "minserve": version,
        "operators": [built.st_size, built.st_mtime_ns],
        "torch": str(torch.__version__),
        "cuda": torch.version.cuda,
        "model": shape,
        "dtype": str(model.activations),
    }
