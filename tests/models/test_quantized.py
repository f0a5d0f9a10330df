"""Quantised models: the function of their dequantised weights, in every read and every variant."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from engine.config import Quantization
from engine.errors import ConfigError
from engine.models.backends.weight_transforms import bytes_of_copy, widened
from engine.models.loader import quantize_model
from engine.models.minrnn.lm import LM
from engine.models.quantize import QUANTIZED_DTYPES, NotFiniteError, dequantize
from engine.models.quantized import QuantEmbedding, QuantLinear, quantized_matrices
from tests.models import reference
from tests.models.variants import DEVICES, VARIANTS, build, int32, relative_error

KINDS: tuple[Quantization, ...] = ("int8", "fp8")
kinds = pytest.mark.parametrize("kind", KINDS)
devices = pytest.mark.parametrize("device", DEVICES)
variants = pytest.mark.parametrize("options", VARIANTS)

TOLERANCE = 1e-5  # fp32, relative to the largest logit


def random_tokens(model: LM, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, model.config.vocab_size, shape, generator=generator)
    return tokens.to(model.device)


def dequantized(model: LM) -> dict[str, Tensor]:
    """The state dict of an unquantised model whose weights are those that `model` computes with."""
    weights = dict(model.state_dict())
    for name, scale in quantized_matrices(model).items():
        weights[name] = dequantize(weights[name], weights.pop(scale))
    return weights


def prefill(model: LM, tokens: Tensor) -> Tensor:
    """Logits [tokens, vocab] of one sequence from its beginning."""
    device = str(tokens.device)
    bounds, slots = int32([0, tokens.numel()], device), int32([0], device)
    return model.logits(model.prefill(tokens, bounds, model.new_state(1), slots))


@devices
@kinds
@variants
def test_every_read_computes_with_the_dequantised_weights(
    options: dict[str, object], kind: Quantization, device: str
) -> None:
    model = quantize_model(build(options, device), kind)
    tokens = random_tokens(model, 20).int()
    expected = reference.logits(model.config, dequantized(model), tokens)
    assert relative_error(prefill(model, tokens), expected) < TOLERANCE
    state, slots = model.new_state(1), int32([0], device)
    stepped = [model.logits(model.step(token, state, slots)) for token in tokens.split(1)]
    assert relative_error(torch.cat(stepped), expected) < TOLERANCE
    batch = model(tokens.view(2, 10))
    assert batch.dtype == torch.float32
    assert relative_error(batch[0], expected[:10]) < TOLERANCE


@kinds
@variants
def test_logits_stay_near_those_of_the_unquantised_model(
    options: dict[str, object], kind: Quantization
) -> None:
    exact = build(options)
    tokens = random_tokens(exact, 20)
    expected = reference.logits(exact.config, exact.state_dict(), tokens)
    error = (prefill(quantize_model(exact, kind), tokens).double() - expected).norm()
    # A weight is off by up to 1/254 of its row's largest (int8) or 1/16 of itself (fp8).
    assert 0 < error / expected.norm() < (0.03 if kind == "int8" else 0.12)


@kinds
@variants
def test_matrices_are_quantised_and_nothing_else(
    options: dict[str, object], kind: Quantization
) -> None:
    exact = build(options)
    model = quantize_model(exact, kind)
    assert model.config == dataclasses.replace(exact.config, quantization=kind)
    assert not model.training
    kept = {"embedding.weight"} - ({"embedding.weight"} if model.config.tie_embeddings else set())
    expected = {
        name
        for name, tensor in exact.state_dict().items()
        if tensor.ndim == 2
        and not name.endswith(("conv.weight", "lower_bounds"))
        and name not in kept
    }
    assert set(quantized_matrices(model)) == expected
    state, before = model.state_dict(), exact.state_dict()
    assert set(state) == set(before) | {name.replace("weight", "scale") for name in expected}
    for name, tensor in before.items():
        if name in expected:
            assert state[name].dtype == QUANTIZED_DTYPES[kind]
            assert state[name].shape == tensor.shape
        else:
            assert torch.equal(state[name], tensor)
    assert sum(p.numel() for p in model.parameters()) == sum(p.numel() for p in exact.parameters())


@devices
@kinds
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_product_in_sixteen_bits_is_rounded_once(
    kind: Quantization, dtype: torch.dtype, device: str
) -> None:
    torch.manual_seed(0)
    layer = QuantLinear(300, 70, True, kind)
    layer.load_state_dict(
        {
            "weight": torch.randn(70, 300).mul(40).to(QUANTIZED_DTYPES[kind]),
            "scale": torch.rand(70) / 1000,
            "bias": torch.randn(70),
        }
    )
    layer.to(device, dtype)
    assert layer.bias is not None
    x = torch.randn(2, 5, 300).to(device, dtype)
    got = layer(x)
    assert got.dtype == dtype and got.shape == (2, 5, 70)
    exact = x.double() @ dequantize(layer.weight, layer.scale).double().t() + layer.bias.double()
    rounding = torch.finfo(dtype).eps / 2
    assert ((got.double() - exact).abs() <= rounding * exact.abs() + 1e-5).all()


@devices
@kinds
def test_a_tied_table_is_looked_up_and_multiplied_with(kind: Quantization, device: str) -> None:
    torch.manual_seed(0)
    table = QuantEmbedding(9, 6, kind)
    table.weight.data = torch.randn(9, 6).mul(40).to(QUANTIZED_DTYPES[kind])
    table.scale = torch.rand(9)
    table.to(device)
    exact = dequantize(table.weight, table.scale)
    for tokens in (int32([3, 0, 8], device), torch.tensor([[1, 2], [8, 8]], device=device)):
        assert torch.equal(table(tokens, torch.float32), exact[tokens.long()])
        assert torch.equal(table(tokens, torch.bfloat16), exact[tokens.long()].bfloat16())
    x = torch.randn(4, 6, device=device)
    assert relative_error(table.product(x), x.double() @ exact.double().t()) < 1e-6


@devices
@kinds
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("cell", ["mingru", "minlstm"])
def test_sixteen_bit_activations(cell: str, tied: bool, kind: Quantization, device: str) -> None:
    """As in unquantised models: state and logits stay fp32, and the logits are near those of the
    same weights with fp32 activations."""
    options: dict[str, object] = {"cell": cell, "conv_kernel": 4, "tie_embeddings": tied}
    model = quantize_model(build(options, device).to(torch.bfloat16), kind)
    tokens = random_tokens(model, 60)
    expected = reference.logits(model.config, dequantized(model), tokens)
    got = prefill(model, tokens)
    assert got.dtype == model.new_state(1)["cell"].dtype == torch.float32
    assert relative_error(got, expected) < 0.03


@kinds
def test_a_change_of_type_leaves_the_quantised_weights(kind: Quantization) -> None:
    model = quantize_model(build({"cell": "mingru", "tie_embeddings": True}), kind)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.to(torch.bfloat16).double().float().half()
    own = {*quantized_matrices(model), *quantized_matrices(model).values()}
    for name, tensor in model.state_dict().items():
        if name in own:
            assert tensor.dtype == before[name].dtype
            assert torch.equal(tensor.float(), before[name].float())
        else:
            assert tensor.dtype == torch.float16
    assert prefill(model, random_tokens(model, 5)).isfinite().all()


@kinds
def test_a_quantised_model_takes_no_gradients(kind: Quantization) -> None:
    model = quantize_model(build({"cell": "minlstm", "conv_kernel": 3}), kind).train()
    assert not any(parameter.requires_grad for parameter in model.parameters())
    loss = model(random_tokens(model, 2, 9)).sum()
    with pytest.raises(RuntimeError, match="does not require grad"):
        loss.backward()


def test_a_quantised_model_is_not_quantised_again() -> None:
    model = quantize_model(build({"cell": "mingru"}), "int8")
    with pytest.raises(ConfigError, match="quantised as int8"):
        quantize_model(model, "fp8")


def test_a_weight_that_is_not_finite_is_named() -> None:
    model = build({"cell": "mingru"})
    with torch.no_grad():
        model.get_parameter("layers.1.mlp.up.weight")[3, 2] = torch.inf
    with pytest.raises(NotFiniteError, match=r"'layers\.1\.mlp\.up\.weight' .* not finite"):
        quantize_model(model, "int8")


@pytest.mark.gpu
@kinds
@pytest.mark.parametrize("tied", [False, True])
def test_a_graph_replays_a_quantised_step(kind: Quantization, tied: bool) -> None:
    """Serving never waits for the device, and a captured step is the step."""
    options: dict[str, object] = {"cell": "mingru", "conv_kernel": 3, "tie_embeddings": tied}
    model = quantize_model(build(options, "cuda").to(torch.bfloat16), kind)
    tokens, slots = random_tokens(model, 4), int32([0, 1, 2, 3], "cuda")
    expected_state, state = model.new_state(4), model.new_state(4)
    expected = model.logits(model.step(tokens, expected_state, slots))
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        model.logits(model.step(tokens, state, slots))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.inference_mode(), torch.cuda.graph(graph):
        got = model.logits(model.step(tokens, state, slots))
    fresh = model.new_state(4)
    state["cell"].copy_(fresh["cell"])
    assert state.get("conv") is not None and fresh.get("conv") is not None
    state["conv"].copy_(fresh["conv"])
    graph.replay()
    assert relative_error(got, expected) < 0.01
    assert relative_error(state["cell"], expected_state["cell"]) < 0.01


@kinds
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_widened_copy_is_the_model_with_rounded_weights(
    kind: Quantization, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = quantize_model(
        build({"cell": "minlstm", "conv_kernel": 3, "cell_bias": True}).to(dtype), kind
    )
    monkeypatch.setattr("engine.models.backends.weight_transforms._BLOCK", 100)  # some rows at once
    kept = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    wide = widened(model)
    assert wide.config == dataclasses.replace(model.config, quantization=None)
    exact, got = dequantized(model), wide.state_dict()
    assert got.keys() == exact.keys()
    for name, tensor in got.items():
        assert tensor.dtype == dtype and torch.equal(tensor, exact[name].to(dtype))
    copied = [name for name in got if got[name].data_ptr() != model.state_dict()[name].data_ptr()]
    assert set(copied) == set(quantized_matrices(model))
    assert bytes_of_copy(model) == sum(got[name].nbytes for name in copied)
    assert all(torch.equal(tensor, kept[name]) for name, tensor in model.state_dict().items())
