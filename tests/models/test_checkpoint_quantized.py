"""Quantised checkpoints: one is what quantising at load makes, and damaged ones are refused."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from engine.config import DtypeName, EngineConfig, Quantization
from engine.errors import CheckpointError, ConfigError
from engine.models.convert import convert
from engine.models.loader import (
    load_config,
    load_model,
    quantize_model,
    read_config,
    save_model,
)
from engine.models.minrnn.lm import LM
from engine.models.quantized import quantized_matrices
from tests.models.folders import Weights, edit_config, edit_weights
from tests.models.variants import DEVICES, VARIANTS, build

KINDS: tuple[Quantization, ...] = ("int8", "fp8")
kinds = pytest.mark.parametrize("kind", KINDS)
OPTIONS: dict[str, object] = {"cell": "minlstm", "conv_kernel": 3, "cell_bias": True}


def write(folder: Path, options: dict[str, object], dtype: DtypeName = "bfloat16") -> Path:
    model = build(options)
    save_model(folder, model, model.config, dtype)
    return folder


def assert_same_bits(got: LM, expected: LM) -> None:
    mine, other = got.state_dict(), expected.state_dict()
    assert list(mine) == list(other)
    for name, tensor in mine.items():
        assert tensor.dtype == other[name].dtype, name
        shown, wanted = (each.contiguous().view(torch.uint8) for each in (tensor, other[name]))
        assert torch.equal(shown, wanted), name


@pytest.fixture(params=KINDS)
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A quantised checkpoint."""
    model = quantize_model(build(OPTIONS), request.param)
    save_model(tmp_path / "model", model, model.config, "bfloat16")
    return tmp_path / "model"


@kinds
@pytest.mark.parametrize("options", VARIANTS)
def test_a_converted_checkpoint_is_what_quantising_at_load_makes(
    options: dict[str, object], kind: Quantization, tmp_path: Path
) -> None:
    source = write(tmp_path / "source", options)
    written = convert(source, tmp_path / "quantised", quantize=kind)
    assert written.quantization == kind and written.dtype == "bfloat16"
    types: tuple[DtypeName | None, ...] = (None, "float32", "bfloat16", "float16")
    for dtype in types:
        at_load, config = load_model(source, "cpu", dtype, kind)
        loaded, stored = load_model(tmp_path / "quantised", "cpu", dtype)
        assert config == stored == written
        assert_same_bits(loaded, at_load)
        assert not loaded.training
    tokens = torch.arange(12).reshape(2, 6)
    assert torch.equal(loaded(tokens), at_load(tokens))


@kinds
def test_a_quantised_checkpoint_is_about_as_large_as_its_8_bit_weights(
    kind: Quantization, tmp_path: Path
) -> None:
    source = write(tmp_path / "source", {"cell": "mingru", "d_model": 64})
    config = convert(source, tmp_path / "quantised", quantize=kind)
    stored = load_file(tmp_path / "quantised" / "model.safetensors")
    matrices = quantized_matrices(LM(config))
    for name, tensor in stored.items():
        if name in matrices:
            assert tensor.element_size() == 1
        else:
            assert tensor.dtype == (
                torch.float32 if name in matrices.values() else torch.bfloat16
            ), name
    sizes = [
        (tmp_path / name / "model.safetensors").stat().st_size for name in ("source", "quantised")
    ]
    assert sizes[1] < 0.62 * sizes[0]


def test_loading_names_what_is_quantised_already(folder: Path) -> None:
    """The same kind once more changes nothing, another is refused; none is as it is."""
    as_it_is, config = load_model(folder, "cpu")
    assert config.quantization is not None
    again, same = load_model(folder, "cpu", quantize=config.quantization)
    assert same == config
    assert_same_bits(again, as_it_is)
    other: Quantization = "fp8" if config.quantization == "int8" else "int8"
    message = f"its weights are {config.quantization} and cannot be quantised as {other}"
    with pytest.raises(ConfigError, match=message):
        load_model(folder, "cpu", quantize=other)
    with pytest.raises(ConfigError, match=message):
        convert(folder, folder.parent / "other", quantize=other)
    assert not (folder.parent / "other").exists()


def test_a_quantised_checkpoint_is_saved_anew(folder: Path) -> None:
    config = convert(folder, folder.parent / "again", dtype="float16")
    assert config.dtype == "float16"
    assert_same_bits(
        load_model(folder.parent / "again", "cpu", "float32")[0],
        load_model(folder, "cpu", "float16")[0].float(),
    )


@kinds
def test_a_state_dict_is_converted_and_quantised(kind: Quantization, tmp_path: Path) -> None:
    from minGRU_pytorch.minLM import minLM

    torch.manual_seed(0)
    torch.save(minLM(num_tokens=11, dim=8, depth=2).state_dict(), tmp_path / "w.pt")
    convert(tmp_path / "w.pt", tmp_path / "plain")
    convert(tmp_path / "w.pt", tmp_path / "quantised", quantize=kind)
    assert_same_bits(
        load_model(tmp_path / "quantised", "cpu")[0],
        load_model(tmp_path / "plain", "cpu", quantize=kind)[0],
    )


@pytest.mark.parametrize("device", DEVICES)
def test_a_quantised_checkpoint_loads_to_a_device(folder: Path, device: str) -> None:
    model, config = load_model(folder, device, "bfloat16")
    assert {tensor.device.type for tensor in model.state_dict().values()} == {device}
    assert_same_bits(model.cpu(), load_model(folder, "cpu", "bfloat16")[0])
    assert config.quantization is not None


def _make_nan(folder: Path) -> None:
    edit_weights(folder, lambda weights: weights["head.scale"].fill_(torch.nan))


def _make_negative(folder: Path) -> None:
    edit_weights(folder, lambda weights: weights["layers.0.mlp.up.scale"][3].neg_())


def _lose_a_scale(folder: Path) -> None:
    edit_weights(folder, lambda weights: weights.pop("layers.1.cell.gates.scale"))


def _cut_a_scale(folder: Path) -> None:
    edit_weights(folder, lambda weights: weights.update({"head.scale": torch.ones(7)}))


def _widen(name: str, dtype: torch.dtype) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        edit_weights(folder, lambda weights: weights.update({name: weights[name].to(dtype)}))

    return damage


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_make_nan, r"'head\.scale' has values that are not positive"),
        (_make_negative, r"'layers\.0\.mlp\.up\.scale' has values that are not positive"),
        (_lose_a_scale, r"'layers\.1\.cell\.gates\.scale' \[90\] is missing"),
        (_cut_a_scale, r"'head\.scale' has shape \[7\], config\.json requires \[29\]"),
        (_widen("head.scale", torch.bfloat16), r"'head\.scale' is stored as BF16, .* requires F32"),
        (_widen("head.weight", torch.bfloat16), r"'head\.weight' is stored as BF16, .* (I8|F8)"),
        (_widen("norm.weight", torch.int8), r"'norm\.weight' is stored as I8, .* requires BF16"),
        (lambda folder: edit_config(folder, quantization=None), r"as (I8|F8_E4M3), .* BF16"),
        (lambda folder: edit_config(folder, tie_embeddings=True), r"'embedding\.scale'.*missing"),
    ],
)  # fmt: skip
def test_a_damaged_checkpoint_is_refused(
    damage: Callable[[Path], object], message: str, folder: Path
) -> None:
    damage(folder)
    with pytest.raises(CheckpointError) as refused:
        load_model(folder, "cpu")
    refused.match(message)


def test_a_checkpoint_of_the_other_kind_is_refused(folder: Path) -> None:
    kind = load_config(folder).quantization
    stored, claimed = ("I8", "fp8") if kind == "int8" else ("F8_E4M3", "int8")
    edit_config(folder, quantization=claimed)
    with pytest.raises(CheckpointError, match=rf"stored as {stored}, config\.json requires"):
        load_model(folder, "cpu")


def test_an_unquantised_checkpoint_that_claims_to_be_quantised(tmp_path: Path) -> None:
    folder = write(tmp_path / "model", OPTIONS)
    edit_config(folder, quantization="int8")
    with pytest.raises(CheckpointError, match=r"stored as BF16, config\.json requires I8"):
        load_model(folder, "cpu")


@pytest.mark.parametrize("nan", [0x7F, 0xFF])
def test_an_fp8_weight_that_is_not_a_number_is_refused(nan: int, tmp_path: Path) -> None:
    convert(write(tmp_path / "source", OPTIONS), tmp_path / "model", quantize="fp8")

    def damage(weights: Weights) -> None:
        weights["layers.0.cell.out.weight"].view(torch.uint8)[3, 5] = nan

    edit_weights(tmp_path / "model", damage)
    with pytest.raises(CheckpointError, match=r"'layers\.0\.cell\.out\.weight' has .* not finite"):
        load_model(tmp_path / "model", "cpu")


@kinds
def test_weights_that_are_not_finite_cannot_be_quantised(
    kind: Quantization, tmp_path: Path
) -> None:
    folder = write(tmp_path / "model", OPTIONS)
    edit_weights(folder, lambda weights: weights["layers.1.cell.out.weight"][0].fill_(torch.inf))
    message = r"cannot be quantised: tensor 'layers\.1\.cell\.out\.weight' has values .* not finite"
    with pytest.raises(CheckpointError, match=message):
        load_model(folder, "cpu", quantize=kind)
    with pytest.raises(CheckpointError, match=message):
        convert(folder, tmp_path / "out", quantize=kind)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("value", ["int4", "none", True, 8, [], ""])
def test_a_config_of_an_unknown_quantization(value: object, tmp_path: Path) -> None:
    folder = write(tmp_path / "model", OPTIONS)
    edit_config(folder, quantization=value)
    with pytest.raises(ConfigError, match=r'quantization is .*; allowed: null, "int8" or "fp8"'):
        load_model(folder, "cpu")


def test_a_config_without_the_field_is_not_quantised(tmp_path: Path) -> None:
    folder = write(tmp_path / "model", OPTIONS)
    values = json.loads((folder / "config.json").read_text())
    del values["quantization"]
    (folder / "config.json").write_text(json.dumps(values))
    assert read_config(folder / "config.json").quantization is None


def test_an_engine_quantises_as_it_is_told_to() -> None:
    assert EngineConfig().quantization is None
    assert EngineConfig(quantize="fp8").quantization == "fp8"
    for value in ("int4", "", "INT8", None):
        with pytest.raises(ConfigError, match=r'quantize is .*; allowed: "none", "int8" or "fp8"'):
            dataclasses.replace(EngineConfig(), quantize=value)
