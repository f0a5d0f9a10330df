"""A token cache: a folder with the data of a run as token ids, encoded once and memory-mapped.

    tokens.json              what it was made from, and the parts
    tokenizer.json           the tokenizer
    train.bin                ids of the part, little-endian, uint16 or (larger vocabularies) uint32
    train.starts.npy         int64: positions at which a document or a repeated header begins
    valid.bin, valid.starts.npy, and test.bin, test.starts.npy if there is a test part

It is complete once tokens.json exists. A run on another machine needs this folder alone.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np

from engine.errors import CheckpointError, ConfigError
from engine.training.data import Part

INDEX = "tokens.json"
TOKENIZER = "tokenizer.json"
FORMAT = 1
DTYPES = ("<u2", "<u4")
PARTS = ("train", "valid", "test")


class PartWriter:
    """Writes one part's ids as they come."""

    def __init__(self, folder: Path, name: str, vocab_size: int) -> None:
        self._folder, self._name = folder, name
        self._dtype = np.dtype(DTYPES[0] if vocab_size <= 1 << 16 else DTYPES[1])
        self._file = (folder / f"{name}.bin").open("wb")
        self._starts: list[int] = []
        self.tokens = 0
        self.bytes = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def begin(self) -> None:
        """Say that a document or a repeated header begins here."""
        self._starts.append(self.tokens)

    def write(self, ids: Sequence[int], bytes: int) -> None:
        """Append ids, which stand for so many bytes of text. Raises OSError."""
        values = np.asarray(ids, dtype=np.int64)
        self._file.write(values.astype(self._dtype).tobytes())
        self.tokens += len(values)
        self.bytes += bytes

    def finish(self, what: str) -> dict[str, Any]:
        """End the part and return its entry of the index. Raises OSError."""
        self._file.close()
        np.save(self._folder / f"{self._name}.starts.npy", np.asarray(self._starts, np.int64))
        return {
            "tokens": self.tokens,
            "bytes": self.bytes,
            "dtype": self._dtype.str,
            "what": what,
        }


def clear(folder: Path) -> None:
    """Make the folder if needed and remove a cache from it.

    Raises OSError, and ConfigError for a model's folder, whose tokenizer would be overwritten.
    """
    if (folder / "config.json").exists():
        raise ConfigError(
            f"{folder} is a model's folder; allowed for --tokens: a folder of its own"
        )
    folder.mkdir(parents=True, exist_ok=True)
    (folder / INDEX).unlink(missing_ok=True)
    for name in PARTS:
        for suffix in (".bin", ".starts.npy"):
            (folder / f"{name}{suffix}").unlink(missing_ok=True)


def write_index(folder: Path, source: dict[str, Any], parts: dict[str, dict[str, Any]]) -> None:
    """Complete a cache; `source` says what it was made from. Raises OSError."""
    part = folder / f"{INDEX}.part"
    index = {"format": FORMAT, "source": source, "parts": parts}
    part.write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    os.replace(part, folder / INDEX)


def source_of(folder: Path) -> dict[str, Any] | None:
    """Return what a cache was made from; None if the folder has no complete cache of this format.

    Raises CheckpointError if its index is damaged.
    """
    path = folder / INDEX
    if not path.exists():
        return None
    index = _index(path)
    source: dict[str, Any] = index["source"]
    return source if index["format"] == FORMAT else None


def read(folder: Path) -> dict[str, Part]:
    """Map the parts of a cache, by name. Raises CheckpointError if it is missing or damaged."""
    path = folder / INDEX
    if not path.exists():
        raise CheckpointError(f"{folder}: no token cache: there is no {INDEX}")
    index = _index(path)
    if index["format"] != FORMAT:
        raise CheckpointError(f"{path}: format {index['format']}; allowed: {FORMAT}")
    try:
        parts = {name: _part(folder, name, entry) for name, entry in index["parts"].items()}
        if "train" not in parts:
            raise ValueError("there is no train part")
        if not (folder / TOKENIZER).exists():
            raise ValueError(f"there is no {TOKENIZER}")
    except (AttributeError, EOFError, KeyError, OSError, TypeError, ValueError) as error:
        raise CheckpointError(f"{folder}: a damaged token cache: {error!r}") from error
    return parts


def _index(path: Path) -> dict[str, Any]:
    try:
        index = json.loads(path.read_text(encoding="utf-8"))
        if not {"format", "source", "parts"} <= set(index):
            raise ValueError("format, source or parts is missing")
    except (ValueError, TypeError, OSError) as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from error
    return dict(index)


def _part(folder: Path, name: str, entry: dict[str, Any]) -> Part:
    if entry["dtype"] not in DTYPES:
        raise ValueError(f"the dtype of {name} is {entry['dtype']!r}")
    path, dtype = folder / f"{name}.bin", np.dtype(entry["dtype"])
    found = path.stat().st_size
    if found != entry["tokens"] * dtype.itemsize:
        raise ValueError(f"{path.name} has {found} bytes, not {entry['tokens']} x {dtype.itemsize}")
    ids = np.memmap(path, dtype, "r") if found else np.zeros(0, dtype)
    starts = np.load(folder / f"{name}.starts.npy", allow_pickle=False)
    return Part(ids, starts, entry["bytes"], entry["what"])
