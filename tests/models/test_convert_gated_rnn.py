"""Conversion of GRU and LSTM language models, in the layouts in which PyTorch code has them."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from engine.errors import CheckpointError, ConfigError
from engine.models.convert import convert
from engine.models.loader import load_model
from engine.models.minrnn.config import MinRnnConfig
from tests.models import gated_rnn
from tests.models.test_gated_rnn import DEVIATIONS, deviations, prefill, random_tokens

Weights = dict[str, Tensor]
kinds = pytest.mark.parametrize("kind", list(gated_rnn.KINDS))


def weights_of(kind: str, **options: Any) -> Weights:
    module = gated_rnn.published(kind, **options)
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}


def renamed(weights: Weights, names: Mapping[str, str], prefix: str = "") -> Weights:
    """With other names of modules, behind a prefix."""

    def new(name: str) -> str:
        for old, other in names.items():
            name = re.sub(rf"^{old}\.", other + ".", name)
        return prefix + name

    return {new(name): tensor for name, tensor in weights.items()}


LAYOUTS: dict[str, Callable[[Weights], Weights]] = {
    "pytorch/examples": lambda weights: weights,
    "embedding, lstm, fc": lambda weights: renamed(
        weights, {"encoder": "embedding", "rnn": "lstm", "decoder": "fc"}
    ),
    "embed, gru, linear": lambda weights: renamed(
        weights, {"encoder": "embed", "rnn": "gru", "decoder": "linear"}
    ),
    "emb, cell, out": lambda weights: renamed(
        weights, {"encoder": "emb", "rnn": "layers", "decoder": "out"}
    ),
    "behind a prefix": lambda weights: renamed(weights, {}, "net.model."),
    "of DataParallel": lambda weights: renamed(weights, {}, "module."),
    "parts behind prefixes": lambda weights: renamed(
        weights, {"encoder": "0.encoder", "rnn": "0.rnn", "decoder": "1.decoder"}
    ),
    "a module a layer": lambda weights: {
        re.sub(r"^rnn\.(\w+)_l(\d)$", r"rnns.\2.\1_l0", name): tensor
        for name, tensor in weights.items()
    },
    "cells": lambda weights: {
        re.sub(r"^rnn\.(\w+)_l(\d)$", r"cells.\2.\1", name): tensor
        for name, tensor in weights.items()
    },
    "dropped weights": lambda weights: {
        re.sub(r"^rnn\.(\w+)_l(\d)$", r"rnns.\2.module.\1_l0", name).replace(
            "weight_hh_l0", "weight_hh_l0_raw"
        ): tensor
        for name, tensor in weights.items()
    },
    "dropped weights as fastai": lambda weights: (
        {
            re.sub(r"^rnn\.(\w+)_l(\d)$", r"0.rnns.\2.module.\1_l0", name): tensor * 0.5
            if "weight_hh" in name
            else tensor
            for name, tensor in weights.items()
        }
        | {
            re.sub(r"^rnn\.(\w+)_l(\d)$", r"0.rnns.\2.\1_l0_raw", name): tensor
            for name, tensor in weights.items()
            if "weight_hh" in name
        }
        | {"0.encoder_dp.emb.weight": weights["encoder.weight"].clone()}
    ),
}


@kinds
@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_the_logits_are_the_module_s(kind: str, layout: str, tmp_path: Path) -> None:
    module = gated_rnn.published(kind, embedding=10, layers=3)
    stored = LAYOUTS[layout]({name: one.clone() for name, one in module.state_dict().items()})
    torch.save(stored, tmp_path / "w.pt")
    config = convert(tmp_path / "w.pt", tmp_path / "out")
    assert (config.family, config.cell, config.n_layers) == (kind, kind, 3)
    assert (config.d_model, config.embedding_width, config.dtype) == (24, 10, "float32")
    model, read = load_model(tmp_path / "out", "cpu")
    assert read == config
    tokens = random_tokens(40)
    got = prefill(model, tokens, model.new_state(1))
    assert deviations(got, gated_rnn.logits(module, tokens)) < DEVIATIONS


@kinds
def test_the_family_may_be_named(kind: str, tmp_path: Path) -> None:
    torch.save(weights_of(kind), tmp_path / "w.pt")
    assert convert(tmp_path / "w.pt", tmp_path / "out", family=kind).family == kind
    other = {"gru": "lstm", "lstm": "gru"}[kind]
    gates = {"gru": 3, "lstm": 4}[kind]
    message = rf"w\.pt: tensor 'rnn.weight_hh_l0' \[{gates * 24}, 24\] shows {gates} gates: "
    with pytest.raises(CheckpointError, match=f"{message}{kind.upper()} .* the family {kind}"):
        convert(tmp_path / "w.pt", tmp_path / "other", family=other)
    with pytest.raises(CheckpointError, match=r"'token_emb.weight' is missing"):
        convert(tmp_path / "w.pt", tmp_path / "other", family="minrnn")
    with pytest.raises(ConfigError, match=r"'mamba'; allowed for a state dict: minrnn, .*lstm"):
        convert(tmp_path / "w.pt", tmp_path / "other", family="mamba")
    with pytest.raises(ConfigError, match=f"norm_eps is 0.1; allowed: none for a {kind} model"):
        convert(tmp_path / "w.pt", tmp_path / "other", norm_eps=0.1)
    with pytest.raises(ConfigError, match=f"family is '{other}'; allowed: {kind}, as .*config"):
        convert(tmp_path / "out", tmp_path / "other", family=other)
    assert not (tmp_path / "other").exists()


@kinds
@pytest.mark.parametrize("stored", [True, False])
@pytest.mark.parametrize("head_bias", [True, False])
def test_a_tied_head_is_recognised(
    kind: str, stored: bool, head_bias: bool, tmp_path: Path
) -> None:
    weights = weights_of(kind, tied=True, head_bias=head_bias)
    if not stored:
        del weights["decoder.weight"]
    save_file(weights, tmp_path / "w.safetensors")
    config = convert(tmp_path / "w.safetensors", tmp_path / "out")
    assert config.tie_embeddings
    model, _ = load_model(tmp_path / "out", "cpu")
    assert model.head is None and (model.head_bias is not None) == head_bias
    module, tokens = gated_rnn.published(kind, tied=True, head_bias=head_bias), random_tokens(30)
    got = prefill(model, tokens, model.new_state(1))
    assert deviations(got, gated_rnn.logits(module, tokens)) < DEVIATIONS


class AwdModel(nn.Module):
    """As AWD-LSTM: the last layer is as narrow as the embedding, which is the head's matrix."""

    def __init__(self, kind: str, widths: list[int], tied: bool) -> None:
        super().__init__()
        make = gated_rnn.KINDS[kind]
        self.encoder = nn.Embedding(gated_rnn.VOCABULARY, widths[0])
        self.rnns = nn.ModuleList(
            make(inputs, units) for inputs, units in itertools.pairwise(widths)
        )
        self.decoder = nn.Linear(widths[-1], gated_rnn.VOCABULARY)
        if tied:
            self.decoder.weight = self.encoder.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.encoder(tokens.long()).unsqueeze(1)
        for layer in self.rnns:
            x, _ = layer(x)
        logits: Tensor = self.decoder(x.squeeze(1))
        return logits


@kinds
@pytest.mark.parametrize(
    ("widths", "tied"),
    [([10, 24, 24, 10], True), ([10, 24, 10], True), ([6, 8, 20, 12], False), ([24, 24, 9], False)],
)
def test_narrower_layers_are_padded_without_a_change(
    kind: str, widths: list[int], tied: bool, tmp_path: Path
) -> None:
    torch.manual_seed(3)
    module = AwdModel(kind, widths, tied).eval()
    torch.save(module.state_dict(), tmp_path / "w.pt")
    config = convert(tmp_path / "w.pt", tmp_path / "out")
    assert (config.d_model, config.embedding_width) == (max(widths[1:]), widths[0])
    model, _ = load_model(tmp_path / "out", "cpu")
    tokens, state = random_tokens(50), model.new_state(1)
    got = prefill(model, tokens, state)
    assert deviations(got, gated_rnn.logits(module, tokens)) < DEVIATIONS
    assert not any(tensor[-1, 0, widths[-1] :].any() for tensor in state.tensors())
    eight = convert(tmp_path / "w.pt", tmp_path / "int8", quantize="int8")
    assert eight.quantization == "int8"
    model, _ = load_model(tmp_path / "int8", "cpu")
    state = model.new_state(1)
    assert bool(prefill(model, tokens, state).isfinite().all())
    assert not any(tensor[-1, 0, widths[-1] :].any() for tensor in state.tensors())


def _without(*names: str) -> Callable[[Weights], None]:
    def change(weights: Weights) -> None:
        for name in names:
            del weights[name]

    return change


def _with(name: str, *shape: int) -> Callable[[Weights], None]:
    def change(weights: Weights) -> None:
        weights[name] = torch.zeros(shape)

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_with("rnn.weight_ih_l0_reverse", 72, 10), "l0_reverse' shows a bidirectional layer, wh"),
        (_with("rnn.weight_hr_l0", 8, 24), r"weight_hr_l0' shows an LSTM with projections"),
        (_with("rnn.weight_hh_l1", 24, 24), r"l1' \[24, 24\] shows a torch.nn.RNN without gates"),
        (_with("rnn.weight_hh_l1", 96, 24), r"l1' \[96, 24\] shows 4 gates: LSTM layers"),
        (_with("rnn.weight_hh_l1", 70, 24), r"l1' \[70, 24\] is of no cell; \[3 n, n\] is one"),
        (_with("rnn.weight_hh_l1", 48, 24), r"l1' \[48, 24\] is of no cell"),
        (_with("rnn.weight_ih_l1", 72, 23), r"ih_l1' has shape \[72, 23\].*require \[72, 24\]"),
        (_with("rnn.bias_ih_l1", 71), r"bias_ih_l1' has shape \[71\].*require \[72\]"),
        (_without("rnn.weight_ih_l1"), r"'rnn.weight_ih_l1' is missing"),
        (_without("rnn.bias_hh_l1"), r"tensor 'rnn.bias_hh_l1' is missing; supported"),
        (_without("rnn.bias_ih_l0", "rnn.bias_hh_l0"), r"tensor 'rnn.bias_ih_l0' is missing"),
        (_without("rnn.weight_hh_l0"), r"'rnn.weight_hh_l0' is missing"),
        (_with("rnn.weight_hh_l3", 72, 24), r"'rnn.weight_ih_l3' is missing"),
        (_without("encoder.weight"), "one tensor of the embedding.*there are none"),
        (_with("embedding.weight", 61, 10), r"there are several \(encoder, embedding\)"),
        (_with("fc.weight", 61, 24), r"there are several \(decoder, fc\)"),
        (_without("decoder.weight"), "no head .* its width is 10, that of the last layer 24"),
        (_with("decoder.weight", 61, 23), r"decoder.weight' has shape .*require \[61, 24\]"),
        (_with("decoder.bias", 60), r"decoder.bias' has shape \[60\].*require \[61\]"),
        (_with("norm.weight", 24), r"'norm.weight' \[24\] is not part of a known layout"),
        (_with("h0", 2, 1, 24), r"'h0' \[2, 1, 24\] is not part of a known layout"),
        (_with("other.weight_hh_l0", 72, 24), r"in several modules \(other\., rnn\.\)"),
    ],
)
def test_other_models_are_refused_by_name(
    change: Callable[[Weights], None], message: str, tmp_path: Path
) -> None:
    weights = weights_of("gru", embedding=10)
    change(weights)
    torch.save(weights, tmp_path / "w.pt")
    with pytest.raises(CheckpointError, match=message):
        convert(tmp_path / "w.pt", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@kinds
@pytest.mark.parametrize(
    ("layout", "name"),
    [
        ("a module a layer", "rnns.1.bias_hh_l0"),
        ("cells", "cells.2.bias_ih"),
        ("cells", "cells.1.weight_hh"),
        ("dropped weights", "rnns.1.module.bias_ih_l0"),
    ],
)
def test_a_missing_tensor_has_its_name(kind: str, layout: str, name: str, tmp_path: Path) -> None:
    weights = LAYOUTS[layout](weights_of(kind, layers=3))
    del weights[name]
    torch.save(weights, tmp_path / "w.pt")
    with pytest.raises(CheckpointError, match=f"tensor '{re.escape(name)}' is missing"):
        convert(tmp_path / "w.pt", tmp_path / "out")


@kinds
def test_numbered_names_are_no_list_of_layers(kind: str, tmp_path: Path) -> None:
    """What a script does between `gru1` and `gru2` does not show."""
    weights = {
        re.sub(r"^rnn\.(\w+)_l(\d)$", r"net.gru\2.\1_l0", name): tensor
        for name, tensor in weights_of(kind).items()
    }
    torch.save(weights, tmp_path / "w.pt")
    with pytest.raises(CheckpointError, match=r"several modules \(net\.gru0\., net\.gru1\.\); su"):
        convert(tmp_path / "w.pt", tmp_path / "out")


def test_a_missing_layer_is_named(tmp_path: Path) -> None:
    weights = weights_of("lstm", layers=3)
    for name in [name for name in weights if name.endswith("_l1")]:
        del weights[name]
    torch.save(weights, tmp_path / "w.pt")
    with pytest.raises(CheckpointError, match=r"'rnn.weight_ih_l1' is missing"):
        convert(tmp_path / "w.pt", tmp_path / "out")


def test_a_plain_rnn_is_refused(tmp_path: Path) -> None:
    module = gated_rnn.published("gru")
    module.rnn = nn.RNN(24, 24, 2)
    torch.save(module.state_dict(), tmp_path / "w.pt")
    with pytest.raises(CheckpointError, match=r"w\.pt: .*shows a torch.nn.RNN without gates"):
        convert(tmp_path / "w.pt", tmp_path / "out")


@kinds
def test_a_whole_module_is_refused_with_the_line_that_exports_it(kind: str, tmp_path: Path) -> None:
    torch.save(gated_rnn.published(kind), tmp_path / "model.pt")
    line = r"torch\.save\(torch\.load\('model\.pt', weights_only=False\)\.state_dict\(\), 'weights"
    with pytest.raises(CheckpointError, match=f"contains Python objects.*{line}"):
        convert(tmp_path / "model.pt", tmp_path / "out")


@kinds
@pytest.mark.parametrize(
    ("stored", "dtype"),
    [(torch.float64, "float32"), (torch.bfloat16, "bfloat16"), (torch.float16, "float16")],
)
def test_types_are_kept(kind: str, stored: torch.dtype, dtype: str, tmp_path: Path) -> None:
    """Zeros in the place of absent biases have the type of the rest."""
    weights = {name: one.to(stored) for name, one in weights_of(kind, bias=False).items()}
    torch.save({"state_dict": weights, "epoch": 3}, tmp_path / "w.pt")
    assert convert(tmp_path / "w.pt", tmp_path / "out").dtype == dtype
    model, _ = load_model(tmp_path / "out", "cpu")
    assert {one.dtype for one in model.parameters()} == {getattr(torch, dtype)}
    assert not model.get_parameter("layers.1.recurrent.bias").any()


def test_other_state_dicts_are_still_of_the_default_family(tmp_path: Path) -> None:
    torch.save({"token_emb.weight": torch.zeros(11, 6)}, tmp_path / "w.pt")
    with pytest.raises(CheckpointError, match=r"supported are the state dicts of minGRU-pytorch"):
        convert(tmp_path / "w.pt", tmp_path / "out")
    assert MinRnnConfig.family == "minrnn"
