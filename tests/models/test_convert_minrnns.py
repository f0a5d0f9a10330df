"""Converted BorealisAI/minRNNs models against their equations, step by step in float64.

The reference below takes the weights under that project's names; it shares no code with the
converter, the models, or that project.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from engine.errors import CheckpointError
from engine.models.convert import convert
from engine.models.loader import load_model
from engine.models.minrnn.lm import LM
from tests.models.reference import g, gelu, sigmoid
from tests.models.variants import int32

VOCAB, WIDTH, INNER, HIDDEN, KERNEL, DEPTH = 31, 16, 40, 56, 4, 2
Weights = dict[str, Tensor]


@dataclass(frozen=True)
class Kind:
    """The options of that project's config.yaml that change the function."""

    lstm: bool
    use_init_hidden_state: bool = False
    use_coeff_norm: bool = True
    enable_conv: bool = False
    enable_ff: bool = True
    dropout: bool = True
    gamma: bool = True  # how its RMSNorm names its factor (and, named so, adds 1 to it)


KINDS = [
    Kind(lstm=False),
    Kind(lstm=False, use_init_hidden_state=True, enable_conv=True, dropout=False),
    Kind(lstm=False, enable_ff=False, gamma=False),
    Kind(lstm=True),
    Kind(lstm=True, use_init_hidden_state=True, enable_conv=True),
    Kind(lstm=True, use_coeff_norm=False, use_init_hidden_state=True, enable_ff=False),
    Kind(lstm=True, use_coeff_norm=False, enable_conv=True, gamma=False, dropout=False),
]


def random_weights(kind: Kind, seed: int = 0) -> Weights:
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator) / (shape[1] ** 0.5 if shape[1:] else 3)

    norm = "gamma" if kind.gamma else "weight"
    gates = 3 if kind.lstm else 2
    weights = {"token_emb.weight": random(VOCAB, WIDTH) * WIDTH**0.5}
    for layer in (f"layers.{index}" for index in range(DEPTH)):
        if kind.enable_conv:
            weights[f"{layer}.0.net.0.weight"] = torch.randn(WIDTH, 1, KERNEL, generator=generator)
            weights[f"{layer}.0.net.0.bias"] = random(WIDTH)
            weights[f"{layer}.0.net.1.weight"] = random(WIDTH, WIDTH, 1)
            weights[f"{layer}.0.net.1.bias"] = random(WIDTH)
        weights[f"{layer}.1.{norm}"] = random(WIDTH) + 0.5
        if kind.use_init_hidden_state:
            weights[f"{layer}.2.init_hidden_state"] = random(INNER) * 3
        weights[f"{layer}.2.to_hidden_and_gate.weight"] = random(gates * INNER, WIDTH)
        weights[f"{layer}.2.to_hidden_and_gate.bias"] = random(gates * INNER)
        weights[f"{layer}.2.to_out.weight"] = random(WIDTH, INNER)
        weights[f"{layer}.2.to_out.bias"] = random(WIDTH)
        weights[f"{layer}.3.{norm}"] = random(WIDTH) + 0.5
        if kind.enable_ff:
            down = 3 if kind.dropout else 2  # dropout is a module between the linear maps
            weights[f"{layer}.4.0.weight"] = random(HIDDEN, WIDTH)
            weights[f"{layer}.4.0.bias"] = random(HIDDEN)
            weights[f"{layer}.4.{down}.weight"] = random(WIDTH, HIDDEN)
            weights[f"{layer}.4.{down}.bias"] = random(WIDTH)
    weights[f"norm.{norm}"] = random(WIDTH) + 0.5
    weights["to_out.weight"] = random(VOCAB, WIDTH)
    return weights


def reference_logits(kind: Kind, weights: Weights, tokens: Tensor) -> Tensor:
    """tokens [time] -> [time, vocab]: "Were RNNs All We Needed?", sections 3.1, 3.2, appendix B."""
    w = {name: tensor.double() for name, tensor in weights.items()}

    def norm(x: Tensor, name: str) -> Tensor:
        factor = w[f"{name}.gamma"] + 1 if kind.gamma else w[f"{name}.weight"]
        return x / x.square().mean().sqrt() * factor

    def linear(x: Tensor, name: str) -> Tensor:
        return w[f"{name}.weight"] @ x + w[f"{name}.bias"]

    h = [
        g(w[f"layers.{n}.2.init_hidden_state"])
        if kind.use_init_hidden_state
        else torch.zeros(INNER).double()
        for n in range(DEPTH)
    ]
    inputs: list[list[Tensor]] = [[] for _ in range(DEPTH)]
    rows = []
    for token in tokens.tolist():
        x = w["token_emb.weight"][token]
        for n in range(DEPTH):
            at = f"layers.{n}"
            if kind.enable_conv:
                inputs[n].append(x)
                y = w[f"{at}.0.net.0.bias"].clone()
                for back, past in enumerate(reversed(inputs[n][-KERNEL:])):
                    y += past * w[f"{at}.0.net.0.weight"][:, 0, KERNEL - 1 - back]
                x = x + w[f"{at}.0.net.1.weight"][:, :, 0] @ y + w[f"{at}.0.net.1.bias"]
            pre = linear(norm(x, f"{at}.1"), f"{at}.2.to_hidden_and_gate")
            if kind.lstm:
                candidate, f, i = g(pre[:INNER]), *map(sigmoid, pre[INNER:].chunk(2))
                total = f + i if kind.use_coeff_norm else 1
                h[n] = f / total * h[n] + i / total * candidate
            else:
                candidate, z = g(pre[:INNER]), sigmoid(pre[INNER:])
                h[n] = (1 - z) * h[n] + z * candidate
            x = x + linear(h[n], f"{at}.2.to_out")
            if kind.enable_ff:
                down = 3 if kind.dropout else 2
                x = x + linear(gelu(linear(norm(x, f"{at}.3"), f"{at}.4.0")), f"{at}.4.{down}")
        rows.append(w["to_out.weight"] @ norm(x, "norm"))
    return torch.stack(rows)


@pytest.fixture(params=KINDS, ids=str)
def kind(request: pytest.FixtureRequest) -> Iterator[Kind]:
    yield request.param


def converted(kind: Kind, folder: Path) -> LM:
    # Where that project's training script keeps the weights in its checkpoints.
    content = {"model": random_weights(kind), "step": 5, "best_metric": 0.5}
    torch.save(content, folder / "ckpt.tar")
    gates = False if kind.lstm and not kind.use_coeff_norm else None
    convert(folder / "ckpt.tar", folder / "converted", normalize_gates=gates)
    return load_model(folder / "converted", "cpu")[0]


def test_logits_follow_the_equations(kind: Kind, tmp_path: Path) -> None:
    model = converted(kind, tmp_path)
    tokens = torch.randint(0, VOCAB, (70,), generator=torch.Generator().manual_seed(3))
    expected = reference_logits(kind, random_weights(kind), tokens)
    state, slots = model.new_state(1), int32([0])
    hidden = [model.prefill(tokens[:50], int32([0, 50]), state, slots)]
    hidden += [model.step(token, state, slots) for token in tokens[50:].split(1)]
    got = model.logits(torch.cat(hidden)).detach().double()
    assert (got - expected).abs().max() < 1e-4
    exact = model.double()(tokens.unsqueeze(0))[0].detach()
    assert (exact - expected).abs().max() < 1e-5  # float32's rounding of gamma + 1 remains


def test_the_config_says_what_the_weights_show(kind: Kind, tmp_path: Path) -> None:
    config = converted(kind, tmp_path).config
    assert config.cell == ("minlstm" if kind.lstm else "mingru")
    assert (config.vocab_size, config.d_model, config.n_layers) == (VOCAB, WIDTH, DEPTH)
    assert (config.inner, config.mlp_hidden) == (INNER, HIDDEN if kind.enable_ff else 0)
    assert config.conv_kernel == (KERNEL if kind.enable_conv else 0)
    assert config.learned_initial_state == kind.use_init_hidden_state
    assert config.normalize_gates == (kind.use_coeff_norm or not kind.lstm)
    assert config.cell_bias and config.out_bias and config.out_projection


def test_unnormalised_gates_are_a_different_function() -> None:
    """The weights do not show it, hence the option."""
    weights, tokens = random_weights(Kind(lstm=True)), torch.arange(20)
    normalised = reference_logits(Kind(lstm=True), weights, tokens)
    own = reference_logits(Kind(lstm=True, use_coeff_norm=False), weights, tokens)
    assert (normalised - own).abs().max() > 0.1


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("layers.0.1.running_mean", (WIDTH,), "'layers.0.1.running_mean' shows BatchNorm"),
        ("layer_in.weight", (WIDTH, 3), "'layer_in.weight' shows a model of vectors"),
        ("to_out.weight", (9, WIDTH), r"'to_out.weight' has shape \[9, 16\], .* \[31, 16\]"),
        ("to_out.bias", (VOCAB,), r"'to_out.bias' \[31\] is not part of a known layout"),
        ("layers.1.2.init_hidden_state", (INNER,), "layers.1 differs from layers.0"),
    ],
)
def test_what_is_not_such_a_model_is_refused(
    name: str, shape: tuple[int, ...], message: str, tmp_path: Path
) -> None:
    torch.save({**random_weights(Kind(lstm=True)), name: torch.zeros(shape)}, tmp_path / "w.pt")
    with pytest.raises(CheckpointError, match=message):
        convert(tmp_path / "w.pt", tmp_path / "out")
    assert not (tmp_path / "out").exists()
