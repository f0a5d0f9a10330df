"""TuningCache: what is read again, and what is measured anew."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from engine.models.backends.tuning_cache import TuningCache, tuning_folder
from engine.models.minrnn.config import MinRnnConfig
from engine.models.minrnn.lm import LM

KEY = {"gpu": ["a GPU", 132, 2**36], "model": {"d_model": 8}}


def filled(file: Path) -> TuningCache:
    cache = TuningCache(file, KEY)
    cache.add_path("step", 64, ["chain", "library"], "library")
    cache.add_product("64 8 8 0 0", [1, 2, -3])
    cache.add_product("64 8 8 1 0", [])
    cache.save()
    return cache


def test_what_was_measured_is_read(tmp_path: Path) -> None:
    file = tmp_path / "folder" / "that is made" / "of a model.json"
    assert filled(file).measured == 3
    assert [path.name for path in file.parent.iterdir()] == [file.name]  # nothing is left beside it
    again = TuningCache(file, KEY)
    assert again.path_of("step", 64, ["chain", "library"]) == "library"
    assert again.product_of("64 8 8 0 0", [[7, 7, 7], [1, 2, -3]]) == 1
    assert again.product_of("64 8 8 1 0", [[7, 7, 7]]) == -1
    assert (again.read, again.measured) == (3, 0)


def test_what_does_not_compete_now_is_not_known(tmp_path: Path) -> None:
    file = tmp_path / "of a model.json"
    filled(file)
    again = TuningCache(file, KEY)
    assert again.path_of("step", 64, ["chain", "clusters", "library"]) is None
    assert again.path_of("step", 64, ["chain"]) is None
    assert again.path_of("step", 32, ["chain", "library"]) is None
    assert again.path_of("prompt", 64, ["chain", "library"]) is None
    assert again.product_of("64 8 8 0 0", [[7, 7, 7]]) is None
    assert again.product_of("32 8 8 0 0", [[1, 2, -3]]) is None
    assert again.read == 0


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"\xff\xfe",
        b"[" * 100_000,
        b"[]",
        b"null",
        json.dumps({"format": 2, "key": KEY, "paths": {}, "products": {}}).encode(),
        json.dumps({"format": 1, "key": {}, "paths": {}, "products": {}}).encode(),
        json.dumps({"format": 1, "key": KEY}).encode(),
        json.dumps({"format": 1, "key": KEY, "paths": [], "products": 3}).encode(),
        json.dumps(
            {
                "format": 1,
                "key": KEY,
                "paths": {"step 64": ["library", 3], "step 32": [], "step 16": "library"},
                "products": {"64 8 8 0 0": [1, True], "64 8 8 1 0": ["x"]},
            }
        ).encode(),
    ],
)
def test_a_damaged_file_is_measured_anew_and_replaced(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "of a model.json"
    file.write_bytes(content)
    cache = TuningCache(file, KEY)
    for size in (16, 32, 64):
        assert cache.path_of("step", size, ["chain", "library"]) is None
    for shape in ("64 8 8 0 0", "64 8 8 1 0"):
        assert cache.product_of(shape, [[1, 1]]) is None
    filled(file)
    assert TuningCache(file, KEY).path_of("step", 64, ["chain", "library"]) == "library"


def test_another_key_is_another_model_or_gpu(tmp_path: Path) -> None:
    file = tmp_path / "of a model.json"
    filled(file)
    other = TuningCache(file, {**KEY, "gpu": ["another GPU", 132, 2**36]})
    assert other.path_of("step", 64, ["chain", "library"]) is None


def test_engines_that_start_at_once_add_to_each_other(tmp_path: Path) -> None:
    file = tmp_path / "of a model.json"
    first, second = TuningCache(file, KEY), TuningCache(file, KEY)
    first.add_path("step", 64, ["chain"], "chain")
    second.add_path("step", 32, ["chain"], "chain")
    first.save()
    second.save()
    both = TuningCache(file, KEY)
    assert both.path_of("step", 64, ["chain"]) == both.path_of("step", 32, ["chain"]) == "chain"


def test_a_folder_that_cannot_be_written_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    cache = filled(tmp_path / "file" / "of a model.json")
    assert cache.path_of("step", 64, ["chain", "library"]) == "library"  # as long as it lives
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    # Nor is a folder made where nothing was measured.
    TuningCache(tmp_path / "folder" / "of a model.json", KEY).save()
    assert not (tmp_path / "folder").exists()


def test_a_partial_file_that_cannot_be_put_in_place_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(source: str, target: Path) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr("engine.models.backends.tuning_cache.os.replace", full)
    filled(tmp_path / "of a model.json")
    assert not list(tmp_path.iterdir())


def test_where_it_lies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert tuning_folder("auto") == tmp_path / "minserve"
    assert tuning_folder("off") is None
    assert tuning_folder("/var/cache/tuning") == Path("/var/cache/tuning")
    for other in ("", "relative"):
        monkeypatch.setenv("XDG_CACHE_HOME", other)
        assert tuning_folder("auto") == Path("/home/somebody/.cache/minserve")

    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", homeless)
    assert tuning_folder("auto") is None


def test_a_file_is_of_one_model_on_one_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = {"name": "a GPU", "multi_processor_count": 132, "total_memory": 2**36}
    device = torch.device("cuda")
    config = MinRnnConfig(cell="mingru", vocab_size=29, d_model=8, n_layers=1)

    def file_of(config: MinRnnConfig, dtype: torch.dtype = torch.bfloat16, **other: object) -> Path:
        properties = SimpleNamespace(**{**gpu, **other})
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
        path = TuningCache.of(tmp_path, LM(config).to(dtype), device).path
        assert path is not None and path.parent == tmp_path / "autotune"
        return path

    same = file_of(config)
    assert file_of(dataclasses.replace(config, eos_token_id=3, dtype="bfloat16")) == same
    files = [
        same,
        file_of(dataclasses.replace(config, n_layers=2)),
        file_of(dataclasses.replace(config, cell="minlstm")),
        file_of(config, torch.float32),
        file_of(config, name="another GPU"),
        file_of(config, multi_processor_count=66),  # a part of one
    ]
    assert len(set(files)) == len(files)
    assert TuningCache.of(None, LM(config), device).path is None
