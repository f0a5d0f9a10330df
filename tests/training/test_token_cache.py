from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.errors import CheckpointError, ConfigError
from engine.training import token_cache
from engine.training.token_cache import PartWriter


def write(folder: Path, vocab_size: int = 257, last: int = 256) -> None:
    """A cache of two parts, the first one of two documents."""
    token_cache.clear(folder)
    (folder / "tokenizer.json").write_text("{}")
    entries = {}
    for name, ids in (("train", [1, 2, 3, last]), ("valid", [5, last])):
        with PartWriter(folder, name, vocab_size) as writer:
            for half in (ids[: len(ids) // 2], ids[len(ids) // 2 :]):
                writer.begin()
                writer.write(half, 10 * len(half))
            entries[name] = writer.finish(f"what {name} is")
    token_cache.write_index(folder, {"data": ["digest"]}, entries)


@pytest.mark.parametrize(
    ("vocab_size", "last", "dtype"),
    [(257, 256, np.uint16), (65_536, 65_535, np.uint16), (65_537, 65_536, np.uint32)],
)
def test_what_is_written_reads_back(
    tmp_path: Path, vocab_size: int, last: int, dtype: type[np.generic]
) -> None:
    write(tmp_path, vocab_size, last)
    parts = token_cache.read(tmp_path)
    assert list(parts) == ["train", "valid"]
    train = parts["train"]
    assert train.ids.dtype == dtype and isinstance(train.ids, np.memmap)
    assert train.ids.tolist() == [1, 2, 3, last]
    assert train.starts.tolist() == [0, 2]
    assert (train.bytes, train.what) == (40, "what train is")
    assert parts["valid"].ids.tolist() == [5, last]
    assert token_cache.source_of(tmp_path) == {"data": ["digest"]}


def test_an_empty_part_reads_back(tmp_path: Path) -> None:
    write(tmp_path)
    with PartWriter(tmp_path, "train", 257) as writer:
        entry = writer.finish("nothing")
    token_cache.write_index(tmp_path, {}, {"train": entry})
    assert len(token_cache.read(tmp_path)["train"]) == 0


def test_without_its_index_it_is_no_cache(tmp_path: Path) -> None:
    """The index is written last, and removed before anything else changes."""
    for folder in (tmp_path / "nowhere", tmp_path):
        assert token_cache.source_of(folder) is None
        with pytest.raises(CheckpointError, match=r"there is no tokens\.json"):
            token_cache.read(folder)
    write(tmp_path)
    token_cache.clear(tmp_path)
    assert token_cache.source_of(tmp_path) is None
    assert [path.name for path in tmp_path.iterdir()] == ["tokenizer.json"]


def _edit(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    index = json.loads((folder / "tokens.json").read_text())
    change(index)
    (folder / "tokens.json").write_text(json.dumps(index))


@pytest.mark.parametrize(
    "spoil",
    [
        lambda folder: (folder / "train.bin").write_bytes(b"1234567"),
        lambda folder: (folder / "valid.bin").unlink(),
        lambda folder: (folder / "train.starts.npy").write_bytes(b""),
        lambda folder: (folder / "train.starts.npy").write_bytes(b"\x93NUMPY"),
        lambda folder: (folder / "train.starts.npy").unlink(),
        lambda folder: (folder / "tokenizer.json").unlink(),
        lambda folder: (folder / "tokens.json").write_text("{"),
        lambda folder: (folder / "tokens.json").write_text("[1]"),
        lambda folder: (folder / "tokens.json").write_text("7"),
        lambda folder: (folder / "tokens.json").write_text('{"format": 1, "parts": {}}'),
        lambda folder: _edit(folder, lambda index: index.update(format=2)),
        lambda folder: _edit(folder, lambda index: index.update(parts=[])),
        lambda folder: _edit(folder, lambda index: index["parts"].pop("train")),
        lambda folder: _edit(folder, lambda index: index["parts"]["train"].pop("bytes")),
        lambda folder: _edit(folder, lambda index: index["parts"]["train"].update(dtype="O")),
        lambda folder: _edit(folder, lambda index: index["parts"]["train"].update(tokens=5)),
    ],
)
def test_a_damaged_cache_or_one_of_another_format_is_told(
    tmp_path: Path, spoil: Callable[[Path], object]
) -> None:
    write(tmp_path)
    spoil(tmp_path)
    with pytest.raises(CheckpointError, match=str(tmp_path)):
        token_cache.read(tmp_path)


def test_a_cache_of_another_format_is_made_anew(tmp_path: Path) -> None:
    write(tmp_path)
    _edit(tmp_path, lambda index: index.update(format=2))
    assert token_cache.source_of(tmp_path) is None


def test_a_models_folder_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match="a model's folder"):
        token_cache.clear(tmp_path)
    assert (tmp_path / "tokenizer.json").read_text() == "{}"
