"""Conversion of SRU language models, in the layout of the `sru` package."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from engine.errors import CheckpointError, ConfigError
from engine.models.convert import convert
from engine.models.loader import load_model
from tests.models import sru
from tests.models.test_sru import DEVIATIONS, deviations, prefill, random_tokens

Weights = dict[str, Tensor]
variants = pytest.mark.parametrize(
    "options", [pytest.param(options, id=name) for name, options in sru.VARIANTS.items()]
)


def weights_of(**options: Any) -> Weights:
    module = sru.published(**options)
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}


@variants
@pytest.mark.parametrize("prefix", ["", "module.", "net.model."])
def test_the_logits_are_the_module_s(options: dict[str, Any], prefix: str, tmp_path: Path) -> None:
    module = sru.published(**options)
    stored = {prefix + name: tensor.clone() for name, tensor in module.state_dict().items()}
    torch.save(stored, tmp_path / "w.pt")
    config = convert(tmp_path / "w.pt", tmp_path / "out", **sru.conversion_options(options))
    embedding, hidden, layers = module.shape
    assert (config.family, config.cell, config.n_layers) == ("sru", "sru", layers)
    assert (config.d_model, config.embedding_width) == (hidden, embedding)
    assert (config.dtype, config.tie_embeddings) == ("float32", options.get("tied", False))
    model, read = load_model(tmp_path / "out", "cpu")
    assert read == config
    tokens = random_tokens(40)
    got = prefill(model, tokens, model.new_state(1))
    assert deviations(got, sru.logits(module, tokens)) < DEVIATIONS


@pytest.mark.parametrize(
    ("embedding", "head"), [("embedding_layer", "output_layer"), ("encoder", "decoder")]
)
def test_modules_have_usual_names(embedding: str, head: str, tmp_path: Path) -> None:
    weights = {
        name.replace("embedding_layer", embedding).replace("output_layer", head): tensor
        for name, tensor in weights_of(embedding=10).items()
    }
    save_file(weights, tmp_path / "w.safetensors")
    assert convert(tmp_path / "w.safetensors", tmp_path / "out").family == "sru"


@pytest.mark.parametrize("stored", [True, False])
def test_a_tied_head_is_recognised(stored: bool, tmp_path: Path) -> None:
    weights = weights_of(tied=True)
    if not stored:
        del weights["output_layer.weight"]
    torch.save(weights, tmp_path / "w.pt")
    assert convert(tmp_path / "w.pt", tmp_path / "out").tie_embeddings
    model, _ = load_model(tmp_path / "out", "cpu")
    assert model.head is None and model.head_bias is not None


def test_a_checkpoint_without_scale_x_has_none(tmp_path: Path) -> None:
    weights = weights_of()
    for index in range(2):
        del weights[f"rnn.rnn_lst.{index}.scale_x"]
    torch.save(weights, tmp_path / "w.pt")
    module, tokens = sru.published(), random_tokens(30)
    convert(tmp_path / "w.pt", tmp_path / "out")
    model, _ = load_model(tmp_path / "out", "cpu")
    got = prefill(model, tokens, model.new_state(1))
    assert deviations(got, sru.logits(module, tokens)) < DEVIATIONS


def test_shapes_and_options_must_agree(tmp_path: Path) -> None:
    wide = {"embedding": 10, "layer_norm": True}
    torch.save(weights_of(**wide), tmp_path / "w.pt")
    refused: list[tuple[dict[str, Any], str]] = [
        ({"skip_term": False}, "skip_term is False; allowed: True, which the first layer's matrix"),
        ({"normalize_after": True}, "normalize_after is True; allowed: False, which the first"),
        ({"normalize_gates": False}, "normalize_gates is False; allowed: none for a sru model"),
    ]
    for options, message in refused:
        with pytest.raises(ConfigError, match=message):
            convert(tmp_path / "w.pt", tmp_path / "out", **options)
    torch.save(weights_of(), tmp_path / "plain.pt")
    with pytest.raises(ConfigError, match="normalize_after is True; allowed: False, since there"):
        convert(tmp_path / "plain.pt", tmp_path / "out", normalize_after=True)
    with pytest.raises(CheckpointError, match=r"no recurrent layers"):
        convert(tmp_path / "plain.pt", tmp_path / "out", family="gru")
    with pytest.raises(ConfigError, match=r"norm_eps is 0.0; allowed:"):
        convert(tmp_path / "w.pt", tmp_path / "out", norm_eps=0.0)
    assert not (tmp_path / "out").exists()
    after = weights_of(**wide, normalize_after=True)
    torch.save(after, tmp_path / "after.pt")
    convert(tmp_path / "after.pt", tmp_path / "out", norm_eps=1e-3)
    model, config = load_model(tmp_path / "out", "cpu")
    assert config.to_dict()["normalize_after"] and config.norm_eps == 1e-3
    assert model.get_submodule("layers.0.layer_norm").eps == 1e-3


def _without(*names: str) -> Callable[[Weights], None]:
    def change(weights: Weights) -> None:
        for name in names:
            del weights[name]

    return change


def _with(name: str, *shape: int) -> Callable[[Weights], None]:
    def change(weights: Weights) -> None:
        weights[name] = torch.ones(shape)

    return change


LAYER = "rnn.rnn_lst.1"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_with("rnn.ln_lst.0.weight", 24), "'rnn.ln_lst.0.weight' is a layer norm of sru 2.1.7"),
        (_with(f"{LAYER}.custom_m.weight", 24, 72), "is of a custom module in the place of"),
        (_with(f"{LAYER}.transform_module.linear_q.weight", 9, 9), r"is of SRU\+\+ \(attention"),
        (_with(f"{LAYER}.attn.weight", 9, 9), r"is of SRU\+\+ \(attention"),
        (_with(f"{LAYER}.other", 9), r"rnn_lst.1.other' is not part of a known layout"),
        (_with(f"{LAYER}.weight", 24, 71), r"1.weight' has shape \[24, 71\].*require \[\*, 72\]"),
        (_with(f"{LAYER}.weight", 24, 96), r"1.weight' has 4 vectors of 24 although the layer's"),
        (_with(f"{LAYER}.weight", 23, 72), r"1.weight' has shape \[23, 72\].*require \[24, 72\]"),
        (_with(f"{LAYER}.bias", 47), r"rnn_lst.1.bias' has shape \[47\].*require \[48\]"),
        (_with("rnn.rnn_lst.0.bias", 47), r"rnn_lst.0.bias' has shape \[47\], but a layer's bia"),
        (_with(f"{LAYER}.weight_c", 24), r"rnn_lst.1.weight_c' has shape \[24\].*require \[48\]"),
        (_with(f"{LAYER}.weight_proj", 23, 7), r"weight_proj' has shape \[23, 7\].*require \[24"),
        (_with(f"{LAYER}.weight_proj", 24, 7), r"has a projection \(weight_proj\) of width 0, and"),
        (_with(f"{LAYER}.layer_norm.weight", 24), r"'rnn.rnn_lst.0.layer_norm.weight' is missing"),
        (_with(f"{LAYER}.scale_x", 1), None),
        (_without(f"{LAYER}.weight"), r"'rnn.rnn_lst.1.weight' is missing"),
        (_without("rnn.rnn_lst.0.weight_c"), r"'rnn.rnn_lst.0.weight_c' is missing"),
        (_with("rnn.rnn_lst.3.weight", 24, 72), r"'rnn.rnn_lst.2.weight' is missing"),
        (_with("other.rnn_lst.0.weight", 24, 72), r"in several modules \(other\., rnn\.\)"),
        (_without("embedding_layer.weight"), "one tensor of the embedding.*there are none"),
        (_with("embedding.weight", 61, 24), r"several \(embedding_layer, embedding\)"),
        (_with("fc.weight", 61, 24), r"there are several \(output_layer, fc\)"),
        (_with("output_layer.weight", 61, 23), r"output_layer.weight' has shape .*\[61, 24\]"),
        (_with("output_layer.bias", 60), r"output_layer.bias' has shape \[60\].*require \[61\]"),
        (_with("norm.weight", 24), r"'norm.weight' \[24\] is not part of a known layout"),
        (_with("rnn.input_to_hidden.weight", 24, 23), r"input_to_hidden.weight' has shape"),
    ],
)
def test_other_models_are_refused_by_name(
    change: Callable[[Weights], None], message: str | None, tmp_path: Path
) -> None:
    weights = weights_of()
    change(weights)
    torch.save(weights, tmp_path / "w.pt")
    if message is None:
        convert(tmp_path / "w.pt", tmp_path / "out")
        return
    with pytest.raises(CheckpointError, match=message):
        convert(tmp_path / "w.pt", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_one_scale_for_all_layers(tmp_path: Path) -> None:
    weights = weights_of()
    weights[f"{LAYER}.scale_x"].fill_(2.0)
    torch.save(weights, tmp_path / "w.pt")
    with pytest.raises(CheckpointError, match=r"layers' scale_x differ \(1\.0, 2\.0\)"):
        convert(tmp_path / "w.pt", tmp_path / "out")


def test_a_scale_that_some_layers_lack(tmp_path: Path) -> None:
    """It is needed where a layer's input is its highway, and no other layer's is taken for it."""
    weights = weights_of()
    del weights[f"{LAYER}.scale_x"]
    torch.save(weights, tmp_path / "w.pt")
    with pytest.raises(CheckpointError, match=r"'rnn.rnn_lst.1.scale_x' is missing, which other"):
        convert(tmp_path / "w.pt", tmp_path / "out")
    convert(tmp_path / "w.pt", tmp_path / "none", skip_term=False)
    wide = weights_of(embedding=10)
    del wide["rnn.rnn_lst.0.scale_x"]  # its highway is a part of the product
    torch.save(wide, tmp_path / "wide.pt")
    convert(tmp_path / "wide.pt", tmp_path / "wide")


def test_an_embedding_of_another_width_is_no_head(tmp_path: Path) -> None:
    weights = weights_of(embedding=10)
    del weights["output_layer.weight"], weights["output_layer.bias"]
    torch.save(weights, tmp_path / "w.pt")
    with pytest.raises(CheckpointError, match=r"no head .* its width is 10, that of the last lay"):
        convert(tmp_path / "w.pt", tmp_path / "out")


def test_a_whole_module_is_refused_with_the_line_that_exports_it(tmp_path: Path) -> None:
    torch.save(sru.published(), tmp_path / "model.pt")
    with pytest.raises(CheckpointError, match=r"contains Python objects.*state_dict\(\), 'weight"):
        convert(tmp_path / "model.pt", tmp_path / "out")


@pytest.mark.parametrize(
    ("stored", "dtype"),
    [(torch.float64, "float32"), (torch.bfloat16, "bfloat16"), (torch.float16, "float16")],
)
def test_types_are_kept(stored: torch.dtype, dtype: str, tmp_path: Path) -> None:
    """What the gates see of the state is float32 beside weights of any type."""
    weights = {name: one.to(stored) for name, one in weights_of().items()}
    torch.save({"state_dict": weights, "epoch": 3}, tmp_path / "w.pt")
    assert convert(tmp_path / "w.pt", tmp_path / "out").dtype == dtype
    model, _ = load_model(tmp_path / "out", "cpu")
    for name, parameter in model.named_parameters():
        wanted = torch.float32 if name.endswith("weight_c") else getattr(torch, dtype)
        assert parameter.dtype == wanted


def test_eight_bit_weights_are_written(tmp_path: Path) -> None:
    torch.save(weights_of(projection_size=7), tmp_path / "w.pt")
    config = convert(tmp_path / "w.pt", tmp_path / "out", quantize="int8")
    assert config.quantization == "int8"
    model, _ = load_model(tmp_path / "out", "cpu")
    assert prefill(model, random_tokens(30), model.new_state(1)).isfinite().all()
