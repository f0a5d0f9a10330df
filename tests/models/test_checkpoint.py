"""Checkpoints: what is written is what is read, and everything damaged is told apart."""

from __future__ import annotations

import dataclasses
import errno
import io
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.config import DtypeName
from engine.errors import CheckpointError, ConfigError
from engine.models import loader as checkpoint
from engine.models.loader import (
    fingerprint,
    load_config,
    load_model,
    read_config,
    resolve,
    save_model,
)
from tests.models.folders import (
    FORBIDDEN,
    UNREADABLE,
    Weights,
    edit_config,
    edit_weights,
    forbidden,
)
from tests.models.variants import VARIANTS, build, config_of

OPTIONS: dict[str, object] = {"cell": "minlstm", "conv_kernel": 3, "eos_token_id": 7}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    model = build(OPTIONS)
    save_model(tmp_path / "model", model, model.config, "float32")
    return tmp_path / "model"


def split(folder: Path) -> None:
    """Turns model.safetensors into two files and their index, as Hugging Face writes them."""
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(weights)
    files = [f"model-{number:05}-of-00002.safetensors" for number in (1, 2)]
    where = {name: files[index % 2] for index, name in enumerate(names)}
    for file in files:
        save_file({n: weights[n].clone() for n in names if where[n] == file}, folder / file)
    index = {"metadata": {}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.mark.parametrize("options", VARIANTS)
def test_a_saved_model_loads_as_it_was(options: dict[str, object], tmp_path: Path) -> None:
    model = build(options)
    save_model(tmp_path, model, model.config, "float32")
    loaded, config = load_model(tmp_path, "cpu")
    assert config == dataclasses.replace(model.config, dtype="float32")
    assert not loaded.training
    tokens = torch.arange(12).reshape(2, 6)
    assert torch.equal(loaded(tokens), model(tokens))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "model.safetensors"]


@pytest.mark.parametrize("stored", ["bfloat16", "float16"])
def test_weights_are_rounded_once(stored: DtypeName, tmp_path: Path) -> None:
    model = build(OPTIONS)
    save_model(tmp_path, model, model.config, stored)
    rounded, config = load_model(tmp_path, "cpu")
    widened, _ = load_model(tmp_path, "cpu", "float32")
    assert config.dtype == stored
    for name, exact in model.state_dict().items():
        expected = exact.to(checkpoint.DTYPES[stored])
        assert torch.equal(rounded.state_dict()[name], expected)
        assert torch.equal(widened.state_dict()[name], expected.float())


@pytest.mark.gpu
def test_loads_to_the_gpu(folder: Path) -> None:
    model, _ = load_model(folder, "cuda", "bfloat16")
    assert {p.device.type for p in model.parameters()} == {"cuda"}
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}


def test_a_loaded_model_outlives_its_file(folder: Path) -> None:
    model, _ = load_model(folder, "cpu")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    path = folder / "model.safetensors"
    path.write_bytes(bytes(path.stat().st_size))  # in place: same inode
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_split_weights_load(folder: Path) -> None:
    whole, _ = load_model(folder, "cpu")
    split(folder)
    assert len(list(folder.glob("*.safetensors"))) == 2
    parts, _ = load_model(folder, "cpu")
    assert all(torch.equal(parts.state_dict()[n], t) for n, t in whole.state_dict().items())


def _truncate(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-10])


def _garble(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"\xff" * 4096)


def _lose_a_part(folder: Path) -> None:
    split(folder)
    (folder / "model-00002-of-00002.safetensors").unlink()


def _escape(folder: Path) -> None:
    split(folder)
    index = {"weight_map": {"norm.weight": "../other/model.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def _empty_index(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text("{}")


def _duplicate(folder: Path) -> None:
    split(folder)
    parts = sorted(folder.glob("*.safetensors"))
    weights = load_file(parts[0])
    save_file({**load_file(parts[1]), "embedding.weight": weights["embedding.weight"]}, parts[1])


def _lose_a_tensor(folder: Path) -> None:
    edit_weights(folder, lambda weights: weights.pop("layers.1.cell.gates.weight"))


def _add_a_tensor(folder: Path) -> None:
    edit_weights(folder, lambda weights: weights.update({"extra": torch.zeros(1)}))


def _misshape(folder: Path) -> None:
    edit_weights(folder, lambda weights: weights.update({"norm.weight": torch.zeros(7)}))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: (folder / "config.json").unlink(), r"config\.json is missing"),
        (lambda folder: (folder / "model.safetensors").unlink(), r"model\.safetensors is missing"),
        (_truncate, r"model\.safetensors: damaged or incomplete"),
        (_garble, r"model\.safetensors: damaged or incomplete"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b""), "damaged or incomplete"),
        (_lose_a_part, r"model-00002-of-00002\.safetensors is missing"),
        (_escape, r"'\.\./other/model\.safetensors' is not the name of a file beside it"),
        (_empty_index, r"index\.json: has no readable weight_map"),
        (_duplicate, r"'embedding\.weight' is also in another file"),
        (_lose_a_tensor, r"'layers\.1\.cell\.gates\.weight' \[90, 20\] is missing"),
        (_add_a_tensor, r"tensor 'extra' is unexpected"),
        (_misshape, r"'norm\.weight' has shape \[7\], config\.json requires \[20\]"),
        (lambda folder: edit_config(folder, dtype="bfloat16"), "stored as F32, .* requires BF16"),
        (lambda folder: edit_config(folder, d_model=24), r"shape \[29, 20\], .* \[29, 24\].*more"),
        (lambda folder: edit_config(folder, cell="mingru"), r"\[90, 20\], .* requires \[60, 20\]"),
        (lambda folder: edit_config(folder, n_layers=1), r"'layers\.1\..*' is unexpected"),
        (lambda folder: edit_config(folder, tie_embeddings=True), r"'head\.weight' is unexpected"),
    ],
)  # fmt: skip
def test_a_damaged_checkpoint_is_refused(
    damage: Callable[[Path], object], message: str, folder: Path
) -> None:
    damage(folder)
    with pytest.raises(CheckpointError, match=message):
        load_model(folder, "cpu")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not valid JSON"),
        ("[]", "must contain a JSON object"),
        ('{"cell": "lstm", "vocab_size": 1, "d_model": 1, "n_layers": 1}', "cell is 'lstm'"),
        ('{"cell": "mingru"}', "'vocab_size' is missing"),
    ],
)
def test_an_invalid_config_is_refused(text: str, message: str, folder: Path) -> None:
    (folder / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_model(folder, "cpu")


def test_a_missing_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no such folder"):
        load_config(tmp_path / "nothing")


@pytest.mark.parametrize(("spoil", "says"), UNREADABLE.values(), ids=list(UNREADABLE))
def test_what_cannot_be_read_is_told_in_words(
    spoil: Callable[[Path], object], says: str, folder: Path
) -> None:
    spoil(folder)
    with pytest.raises((CheckpointError, ConfigError)) as caught:
        load_model(resolve(str(folder)), "cpu")
    assert says in caught.value.message


@pytest.mark.parametrize("name", FORBIDDEN)
def test_what_may_not_be_read_is_not_called_damaged_or_missing(folder: Path, name: str) -> None:
    with forbidden(folder, name) as copy:
        with pytest.raises((CheckpointError, ConfigError)) as caught:
            load_model(resolve(str(copy)), "cpu")
        assert "cannot be read: Permission denied" in caught.value.message
        assert str(copy / name) in caught.value.message
        with pytest.raises(CheckpointError, match="cannot be read: Permission denied"):
            fingerprint(copy)


@pytest.mark.parametrize("read", [lambda folder: load_model(folder, "cpu"), fingerprint])
def test_a_disk_that_fails_is_told(
    read: Callable[[Path], object], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the file is mapped into memory, where it would kill the process."""

    class Failing(io.FileIO):
        def readinto(self, buffer: Any) -> int:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    opened = Path.open

    def open_failing(path: Path, *mode: Any, **options: Any) -> Any:
        if path.name == "model.safetensors":
            return Failing(path)
        return opened(path, *mode, **options)

    monkeypatch.setattr(Path, "open", open_failing)
    with pytest.raises(CheckpointError, match=r"model\.safetensors: cannot be read: Input/output"):
        read(folder)


def test_an_interrupted_save_leaves_the_old_weights(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = load_file(folder / "model.safetensors")

    def half_a_file(weights: Weights, path: Path, metadata: dict[str, str]) -> None:
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "save_file", half_a_file)
    other = build(OPTIONS, seed=5)
    with pytest.raises(OSError, match="No space left"):
        save_model(folder, other, other.config, "float32")
    new = load_file(folder / "model.safetensors")
    assert all(torch.equal(new[name], tensor) for name, tensor in old.items())


def test_fingerprint_follows_the_weights_and_the_config(folder: Path) -> None:
    first = fingerprint(folder)
    assert first == fingerprint(folder) and len(first) == 64
    edit_weights(folder, lambda weights: weights["norm.weight"].mul_(1.5))
    second = fingerprint(folder)
    edit_config(folder, norm_eps=1e-4)
    third = fingerprint(folder)
    split(folder)
    assert len({first, second, third, fingerprint(folder)}) == 4


def write_generation_config(folder: Path, text: str) -> None:
    (folder / "generation_config.json").write_text(text)


class TestEndsOfText:
    """config.json says 7 (OPTIONS); there are 29 tokens."""

    @pytest.mark.parametrize(
        ("given", "ids"),
        [
            (None, ()),
            (0, (0,)),
            ([5], (5,)),
            ([5, 3, 5, 28], (5, 3, 28)),
            ([*range(29)], (*range(29),)),
        ],
    )
    def test_config_json_has_one_or_several(
        self, given: object, ids: tuple[int, ...], folder: Path
    ) -> None:
        edit_config(folder, eos_token_id=given)
        config = load_config(folder)
        assert config.eos_token_ids == ids
        config.save(folder / "config.json")
        assert load_config(folder) == config

    @pytest.mark.parametrize(
        ("text", "ids"),
        [
            ('{"eos_token_id": 3}', (3,)),
            ('{"eos_token_id": [3, 4], "do_sample": true}', (3, 4)),
            ('{"eos_token_id": null}', (7,)),
            ("{}", (7,)),
        ],
    )
    def test_generation_config_json_wins(
        self, text: str, ids: tuple[int, ...], folder: Path
    ) -> None:
        before = fingerprint(folder)
        write_generation_config(folder, text)
        _, config = load_model(folder, "cpu")
        assert config.eos_token_ids == load_config(folder).eos_token_ids == ids
        assert fingerprint(folder) == before  # states stay those of this model

    @pytest.mark.parametrize(
        ("given", "shown"),
        [
            (29, "29"),
            (-1, "-1"),
            (True, "True"),
            (2.0, "2.0"),
            ("7", "'7'"),
            ([], r"\[\]"),
            ([7, 29], r"\[7, 29\]"),
            ([7, "8"], r"\[7, '8'\]"),
            ([[7]], r"\[\[7\]\]"),
            ({"7": 8}, r"\{'7': 8\}"),
            ([7] * 129, r"\[7, 7"),
        ],
    )
    def test_what_is_no_token_is_refused(self, given: object, shown: str, folder: Path) -> None:
        says = rf"eos_token_id is {shown}.*; allowed: null, an integer from 0 to 28, or a list of 1"
        write_generation_config(folder, json.dumps({"eos_token_id": given}))
        with pytest.raises(CheckpointError, match=rf"generation_config\.json: {says}"):
            load_config(folder)
        (folder / "generation_config.json").unlink()
        edit_config(folder, eos_token_id=given)
        with pytest.raises(ConfigError, match=rf"config\.json: {says}"):
            load_config(folder)

    @pytest.mark.parametrize(
        ("text", "says"), [("{", "not valid JSON"), ("[]", "must contain a JSON object")]
    )
    def test_a_generation_config_that_is_none(self, text: str, says: str, folder: Path) -> None:
        write_generation_config(folder, text)
        with pytest.raises(CheckpointError, match=rf"generation_config\.json: {says}"):
            load_config(folder)

    def test_one_that_cannot_be_read(self, folder: Path) -> None:
        (folder / "generation_config.json").mkdir()
        with pytest.raises(CheckpointError, match=r"generation_config\.json: is a folder"):
            load_config(folder)


class TestResolve:
    def test_an_existing_folder(self, folder: Path) -> None:
        assert resolve(str(folder)) == folder

    def test_a_bundled_name(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(checkpoint, "BUNDLED", folder.parent)
        assert resolve("model") == folder

    def test_an_unknown_name_lists_the_bundled_ones(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(checkpoint, "BUNDLED", folder.parent)
        monkeypatch.chdir(folder)  # what lies around elsewhere must not decide
        for name in ("modle", "./no/such/folder", "/no/such", "a/b/c", "../x"):
            with pytest.raises(CheckpointError, match=r"bundled model \(bundled models: model\)"):
                resolve(name)

    def test_a_file_is_no_folder(self, folder: Path) -> None:
        with pytest.raises(CheckpointError, match="is a file"):
            resolve(str(folder / "model.safetensors"))

    def test_a_name_that_no_folder_can_have(self) -> None:
        for name in ("a\0b", "x" * 5000):
            with pytest.raises(CheckpointError, match=r"no model|cannot be read"):
                resolve(name)

    def test_a_hub_id_is_fetched(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        asked = []

        def download(repo: str, *, allow_patterns: list[str], ignore_patterns: str) -> str:
            asked.append((repo, allow_patterns))
            return str(folder)

        monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
        assert resolve("owner/my.model-1") == folder
        [(repo, patterns)] = asked
        assert repo == "owner/my.model-1"
        assert {"config.json", "*.safetensors", "tokenizer.json"} <= set(patterns)
        assert "generation_config.json" in patterns
        assert {"tokenizer_config.json", "chat_template.jinja"} <= set(patterns)
        assert {"special_tokens_map.json", "chat_template.json", "starts.json"} <= set(patterns)
        assert not any(pattern.endswith((".bin", ".pt", ".py", "*")) for pattern in patterns)

    def test_a_hub_that_cannot_give_it(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
        with pytest.raises(CheckpointError, match="no folder 'owner/absent' here, and downloading"):
            resolve("owner/absent")


def test_config_of_every_variant_survives_json(tmp_path: Path) -> None:
    for variant in VARIANTS:
        config = config_of(variant.values[0])  # type: ignore[arg-type]
        config.save(tmp_path / "config.json")
        assert read_config(tmp_path / "config.json") == config


def test_a_model_of_the_largest_sizes_is_compared_before_it_is_built(folder: Path) -> None:
    """A config that asks for terabytes is refused by its shapes; nothing is allocated for it."""
    edit_config(folder, vocab_size=2**24, d_model=2**17, n_layers=2)
    with pytest.raises(CheckpointError, match=r"\[16777216, 131072\]"):
        load_model(folder, "cpu")
