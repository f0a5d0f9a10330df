"""HGRN models: the function of the published weights, however a text is read."""

from __future__ import annotations

import itertools
import json
import re
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional

from engine.config import ModelConfig, Quantization
from engine.errors import CheckpointError, ConfigError
from engine.models import registry
from engine.models.backends import cluster_decode
from engine.models.backends.blocks import compile_blocks, refusal
from engine.models.hgrn.config import HgrnConfig
from engine.models.hgrn.lm import HgrnLM
from engine.models.language_model import LanguageModel
from engine.models.loader import load_model, quantize_model
from engine.models.quantize import dequantize
from engine.models.quantized import quantized_matrices
from engine.models.recurrence import lower_bounds_of
from engine.models.state import ModelState
from tests.models import hgrn
from tests.models.variants import DEVICES, int32, relative_error

LENGTHS = [1, 2, 7, 64, 257, 2049]
DEVIATIONS = 1e-4  # how far fp32 logits may be from float64's, in standard deviations of these
TOLERANCE = 1e-5  # fp32 against fp32, relative to the largest logit or state
variants = pytest.mark.parametrize(
    "changes", [pytest.param(changes, id=name) for name, changes in hgrn.VARIANTS.items()]
)
CONVOLVED: dict[str, Any] = {"use_short_conv": True, "expand_ratio": 1.5}


def model_of(values: dict[str, Any], weights: hgrn.Weights) -> LanguageModel:
    """The model that is loaded from a published folder."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        (folder / "config.json").write_text(json.dumps(values))
        save_file(weights, folder / "model.safetensors")
        return load_model(folder, "cpu")[0]


def build(changes: dict[str, Any]) -> tuple[LanguageModel, dict[str, Any], hgrn.Weights]:
    values = {**hgrn.VALUES, **changes}
    weights = hgrn.published_weights(values)
    return model_of(values, weights), values, weights


def random_tokens(count: int, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    vocabulary = hgrn.VALUES["vocab_size"]
    return torch.randint(vocabulary, (count,), generator=generator, dtype=torch.int32)


def prefill(model: LanguageModel, tokens: Tensor, state: ModelState, row: int = 0) -> Tensor:
    """Logits [tokens, vocab] of one more part of a sequence."""
    device = str(model.device)
    bounds, slots = int32([0, len(tokens)], device), int32([row], device)
    return model.logits(model.prefill(tokens.to(device), bounds, state, slots))


def deviations(got: Tensor, expected: Tensor) -> float:
    error = (got.detach().double().cpu() - expected).abs().max()
    return float(error / expected.std())


@pytest.mark.parametrize("device", DEVICES)
@variants
def test_logits_are_those_of_the_equations(changes: dict[str, Any], device: str) -> None:
    model, values, weights = build(changes)
    model.to(device)
    for length in LENGTHS:
        tokens = random_tokens(length, seed=length)
        expected = hgrn.logits(values, weights, tokens)
        assert deviations(prefill(model, tokens, model.new_state(1)), expected) < DEVIATIONS


@variants
def test_in_float64_they_are_equal_to_twelve_digits(changes: dict[str, Any]) -> None:
    model, values, weights = build(changes)
    tokens = random_tokens(257)
    got = model.double()(tokens.unsqueeze(0))[0]
    assert deviations(got, hgrn.logits(values, weights, tokens)) < 1e-12


@pytest.mark.parametrize("device", DEVICES)
@variants
def test_steps_and_training_compute_what_prefill_does(changes: dict[str, Any], device: str) -> None:
    model = build(changes)[0].to(device)
    tokens, slots = random_tokens(137).to(device), int32([2], device)
    whole, stepped = model.new_state(3), model.new_state(3)
    expected = prefill(model, tokens, whole, 2)
    steps = [model.logits(model.step(token, stepped, slots)) for token in tokens.split(1)]
    assert relative_error(torch.cat(steps), expected) < TOLERANCE
    assert relative_error(model(tokens.unsqueeze(0))[0], expected) < TOLERANCE
    for ours, theirs in zip(stepped.tensors(), whole.tensors(), strict=True):
        assert relative_error(ours[:, 2], theirs[:, 2]) < TOLERANCE
        assert not ours[:, :2].any()


@variants
def test_a_prompt_split_anywhere_is_the_whole(changes: dict[str, Any]) -> None:
    model, tokens = build(changes)[0], random_tokens(37)
    whole = model.new_state(1)
    expected = prefill(model, tokens, whole)
    for boundary in range(1, 37):
        state = model.new_state(1)
        parts = [prefill(model, part, state) for part in tokens.tensor_split([boundary])]
        assert relative_error(torch.cat(parts), expected) < TOLERANCE
        for ours, theirs in zip(state.tensors(), whole.tensors(), strict=True):
            assert relative_error(ours, theirs) < TOLERANCE


@variants
def test_a_packed_batch_is_every_sequence_alone(changes: dict[str, Any]) -> None:
    model, lengths, slots = build(changes)[0], [1, 7, 130, 2], [5, 0, -1, 3]
    sequences = [random_tokens(length, seed=length) for length in lengths]
    bounds = int32([0, 1, 8, 138, 140])
    state = model.new_state(6)
    hidden = model.prefill(torch.cat(sequences), bounds, state, int32(slots))
    for tokens, slot, got in zip(sequences, slots, hidden.split(lengths), strict=True):
        if slot >= 0:
            alone = model.new_state(1)
            expected = prefill(model, tokens, alone)
            assert relative_error(model.logits(got), expected) < TOLERANCE
            for ours, theirs in zip(state.tensors(), alone.tensors(), strict=True):
                assert relative_error(ours[:, slot], theirs[:, 0]) < TOLERANCE
    for tensor in state.tensors():
        assert not tensor[:, [1, 2, 4]].any()


@variants
def test_greedy_continuations_are_equal(changes: dict[str, Any]) -> None:
    model, values, weights = build(changes)
    state, text = model.new_state(1), random_tokens(20)
    row = prefill(model, text, state)[-1:]
    for _ in range(30):
        expected = hgrn.logits(values, weights, text)[-1]
        best, second = expected.topk(2).values
        if best - second > 2 * DEVIATIONS * expected.std():
            assert int(row.argmax()) == int(expected.argmax())
        token = expected.argmax().int().view(1)
        text = torch.cat([text, token])
        row = model.logits(model.step(token, state, int32([0])))


@pytest.mark.parametrize("kind", ["int8", "fp8"])
@pytest.mark.parametrize("changes", [CONVOLVED, {"tie_word_embeddings": True}])
def test_quantised_models_compute_with_the_dequantised_weights(
    changes: dict[str, Any], kind: Quantization
) -> None:
    exact = build(changes)[0]
    model, matrices = quantize_model(exact, kind), {"gates", "out", "mlp.up", "mlp.down"}
    expected = {f"layers.{n}.{name}.weight" for n in range(3) for name in matrices}
    tied = exact.config.tie_embeddings
    expected.add("embedding.weight" if tied else "head.weight")
    assert set(quantized_matrices(model)) == expected
    weights = dict(model.state_dict())
    for name, scale in quantized_matrices(model).items():
        weights[name] = dequantize(weights[name], weights.pop(scale))
    same = registry.build(exact.config).eval()
    same.load_state_dict(weights)
    tokens = random_tokens(60)
    got = prefill(model, tokens, model.new_state(1))
    assert relative_error(got, prefill(same, tokens, same.new_state(1))) < TOLERANCE
    error = (got - prefill(exact, tokens, exact.new_state(1))).norm()
    assert 0 < error / got.norm() < (0.05 if kind == "int8" else 0.2)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bit_weights(dtype: torch.dtype, device: str) -> None:
    """State and logits stay fp32; activations are rounded to 2^-9 or 2^-12 a few times a layer."""
    model, values, weights = build(CONVOLVED)
    model.to(device, dtype)
    rounded = {name: tensor.to(dtype) for name, tensor in weights.items()}
    tokens, state = random_tokens(60), model.new_state(1)
    got = prefill(model, tokens, state)
    assert got.dtype == state["hidden"].dtype == torch.float32
    error = relative_error(got, hgrn.logits(values, rounded, tokens))
    assert error < (0.05 if dtype == torch.bfloat16 else 0.006)


def test_every_parameter_learns() -> None:
    model = build(CONVOLVED)[0].train()
    period = torch.stack([random_tokens(6, seed) for seed in range(4)]).repeat(1, 4).long()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(12):
        logits = model(period[:, :-1])
        loss = functional.cross_entropy(logits.flatten(0, 1), period[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None and parameter.grad.abs().max() > 0, name
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.5 * losses[0]


def test_gradients_are_those_of_finite_differences() -> None:
    model = build({**CONVOLVED, "num_hidden_layers": 2, "hidden_size": 4, "intermediate_size": 6})
    exact, tokens = model[0].double(), random_tokens(5).unsqueeze(0)
    names = [name for name, _ in exact.named_parameters()]

    def logits_of(*parameters: Tensor) -> Tensor:
        given = dict(zip(names, parameters, strict=True))
        result: Tensor = torch.func.functional_call(exact, given, (tokens,))
        return result[0, :, :3]

    parameters = [tensor.detach().requires_grad_() for tensor in exact.parameters()]
    assert torch.autograd.gradcheck(logits_of, parameters, fast_mode=True)
    lower = names.index("lower_bounds")

    def of_bounds(raw: Tensor) -> Tensor:
        return logits_of(*parameters[:lower], raw, *parameters[lower + 1 :])

    assert torch.autograd.gradcheck(of_bounds, (parameters[lower],))


def test_lower_bounds_rise_from_zero() -> None:
    bounds = lower_bounds_of(torch.randn(5, 7), 5)
    rows = [bound for bound in bounds if bound is not None]
    assert len(rows) == 5 and not rows[0].any()
    assert all(bool((low < high).all()) for low, high in itertools.pairwise(rows))
    assert bool((rows[-1] < 1).all())
    assert lower_bounds_of(None, 2) == [None, None]
    even = lower_bounds_of(torch.zeros(4, 1).bfloat16(), 4)
    assert [float(bound) for bound in even if bound is not None] == [0, 0.25, 0.5, 0.75]


@variants
def test_the_program_has_the_stages_of_a_block(changes: dict[str, Any]) -> None:
    model, values, _ = build(changes)
    blocks = compile_blocks(model)
    inner = int(values["hidden_size"] * values["expand_ratio"])
    assert (blocks.gates, blocks.inner) == (3, inner)
    assert blocks.hidden == values["intermediate_size"]
    parameters = model.channel_parameters()
    for index, block in enumerate(blocks.blocks):
        assert [conv.first for conv in block.short_convs] == (
            [0, inner] if values["use_short_conv"] else []
        )
        assert block.gated_norm is not None and block.mlp is not None
        assert block.mlp.activation == "swiglu"
        bound = block.recurrence.lower_bound
        assert (bound is None) == (not values["use_lower_bound"])
        if bound is not None:
            assert torch.equal(bound, parameters[index])  # type: ignore[arg-type]


def test_kernels_without_the_cell_refuse_it_by_name() -> None:
    reason = refusal(build({})[0], cluster_decode.SUPPORT)
    assert reason is not None and reason.startswith("cell 'hgrn'")


@variants
def test_a_published_config_is_read(changes: dict[str, Any]) -> None:
    values = {**hgrn.VALUES, **changes}
    values.pop("old_mlp", None)
    assert registry.published_family(values).name == "hgrn"
    config = registry.config_from_dict(values)
    assert isinstance(config, HgrnConfig)
    assert config.tie_embeddings == values["tie_word_embeddings"]
    assert config.conv_kernel == (values["conv_size"] if values["use_short_conv"] else 0)
    assert config.state_bytes == sum(
        4 * tensor.numel() for tensor in HgrnLM(config).new_state(1).tensors()
    )
    assert registry.config_from_dict(config.to_dict()) == config


def test_a_folder_with_tensors_of_another_layout_is_refused() -> None:
    values = {**hgrn.VALUES, "use_short_conv": True}
    weights = hgrn.published_weights(values)
    model = model_of(values, weights)
    assert (model.config.dtype, model.config.eos_token_id) == ("float32", 2)
    shared = {**weights, "model.layers.0.attn.h_conv1d.weight": torch.zeros(24, 1, 4)}
    with pytest.raises(CheckpointError, match=r"h_conv1d.*unexpected"):
        model_of(values, shared)
    del weights["model.layers.1.attn.f_conv1d.weight"]
    with pytest.raises(CheckpointError, match=r"f_conv1d.*missing"):
        model_of(values, weights)


@pytest.mark.parametrize(
    ("given", "hidden"),
    [
        ({"hidden_size": 2048, "hidden_ratio": 4}, 5632),
        ({"hidden_size": 2560, "hidden_ratio": None}, 6912),
        ({"hidden_size": 96, "hidden_ratio": 2}, 256),
        ({"hidden_size": 96, "intermediate_size": 100}, 100),
    ],
)
def test_the_width_of_the_mlp_follows_from_its_ratio(given: dict[str, Any], hidden: int) -> None:
    config = registry.config_from_dict({**hgrn.VALUES, "intermediate_size": None, **given})
    assert isinstance(config, HgrnConfig)
    assert config.mlp_hidden == hidden


def test_the_published_sizes() -> None:
    given = {"architectures": ["HGRNForCausalLM"], "model_type": "hgrn"}
    config = registry.config_from_dict(given)  # defaults: 1.3 B
    assert (config.d_model, config.n_layers, config.state_bytes) == (2048, 24, 196_608)
    larger = registry.config_from_dict({**given, "hidden_size": 2560, "num_hidden_layers": 32})
    assert larger.state_bytes == 327_680
    assert registry.config_from_dict({**given, "rms_norm_eps": 1e-5}).norm_eps == 1e-5


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("attn", {"layers": [1], "num_heads": 4}),
        ("hidden_act", "powlu"),
        ("elementwise_affine", False),
        ("elementwise_affine", None),
        ("attnres_block_size", 2),
        ("quantization_config", {"quant_method": "gptq"}),
        ("share_conv_kernel", True),
        ("use_short_conv", "yes"),
        ("expand_ratio", None),
        ("hidden_ratio", -1),
        ("intermediate_size", "40"),
        ("hidden_size", "24"),
        ("hidden_size", True),
        ("hidden_size", 10**400),
        ("hidden_ratio", 10**400),
        ("expand_ratio", 10**400),
        ("expand_ratio", 1e-9),
        ("norm_eps", 10**400),
        ("tie_word_embeddings", 1),
        ("conv_size", 1),
        ("num_hidden_layers", 0),
    ],
)
def test_what_is_not_served_is_refused_by_name(name: str, value: object) -> None:
    values = {**hgrn.VALUES, "use_short_conv": True, "intermediate_size": None, name: value}
    with pytest.raises(ConfigError, match=f"^{name} is {re.escape(repr(value))}; ") as error:
        registry.config_from_dict(values)
    assert error.value.param == name


@pytest.mark.parametrize(
    ("name", "value"), [("expand_ratio", 16), ("hidden_ratio", 512), ("rms_norm_eps", 2)]
)
def test_a_refusal_says_what_was_given(name: str, value: object) -> None:
    values = {**hgrn.VALUES, "hidden_size": 2**17, "intermediate_size": None, name: value}
    del values["norm_eps"]
    with pytest.raises(ConfigError, match=f"^{name} is {value}; allowed: ") as error:
        registry.config_from_dict(values)
    assert error.value.param == name


def test_flags_that_change_no_result_are_harmless() -> None:
    plain: ModelConfig = registry.config_from_dict(hgrn.VALUES)
    flags = {"fuse_norm": False, "fuse_swiglu": False, "fuse_cross_entropy": False}
    assert registry.config_from_dict({**hgrn.VALUES, **flags, "use_l2warp": True}) == plain


@pytest.mark.parametrize(
    ("field", "value"),
    [("cell", "mingru"), ("inner", 0), ("mlp_hidden", 0), ("conv_kernel", 1), ("lower_bounds", 1)],
)
def test_own_configs_are_checked(field: str, value: object) -> None:
    good = {"vocab_size": 9, "d_model": 8, "n_layers": 1, "inner": 8, "mlp_hidden": 8}
    with pytest.raises(ConfigError) as error:
        registry.config_from_dict({"family": "hgrn", **good, field: value})
    assert error.value.param == field
