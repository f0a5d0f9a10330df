"""SRU models: the function of the `sru` package's modules, however a text is read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from engine.config import Quantization
from engine.errors import ConfigError
from engine.models import registry
from engine.models.backends import cluster_decode, cpu, cublas, persistent_decode, selective
from engine.models.backends.blocks import refusal
from engine.models.backends.eager import EagerBackend
from engine.models.backends.selector import explain_backend, select_backend
from engine.models.language_model import LanguageModel
from engine.models.loader import load_model, quantize_model, save_model
from engine.models.program import LayerNorm, Linear, Replace, SruRecurrence
from engine.models.quantize import dequantize
from engine.models.quantized import quantized_matrices
from engine.models.sru.config import SruConfig
from engine.models.state import ModelState
from tests.models import sru
from tests.models.variants import DEVICES, int32, relative_error

LENGTHS = [1, 2, 7, 64, 257, 2049]
DEVIATIONS = 1e-4  # how far fp32 logits may be from float64's, in standard deviations of these
TOLERANCE = 1e-5  # fp32 against fp32, relative to the largest logit or state
variants = pytest.mark.parametrize(
    "options", [pytest.param(options, id=name) for name, options in sru.VARIANTS.items()]
)
UNTIED: dict[str, Any] = {"embedding": 10, "projection_size": 7, "layer_norm": True}


def model_of(module: sru.Published) -> LanguageModel:
    """The model that its state dict is read as."""
    stored = {name: tensor.clone() for name, tensor in module.float().state_dict().items()}
    family = registry.state_dict_family(stored, None)
    assert family.name == "sru"
    config, weights = family.state_dict_layout(stored, sru.conversion_options(module.options))
    model = registry.build(config).eval()
    model.load_state_dict(
        {
            name: weights.value(name, tensor.shape, stored.__getitem__)
            for name, tensor in model.state_dict().items()
        }
    )
    return model


def build(**options: Any) -> tuple[LanguageModel, sru.Published]:
    module = sru.published(**options)
    return model_of(module), module


def random_tokens(count: int, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(sru.VOCABULARY, (count,), generator=generator, dtype=torch.int32)


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
def test_logits_are_those_of_the_package_s_equations(options: dict[str, Any], device: str) -> None:
    model, module = build(**options)
    model.to(device)
    for length in LENGTHS:
        tokens = random_tokens(length, seed=length)
        got = prefill(model, tokens, model.new_state(1))
        assert deviations(got, sru.logits(module, tokens)) < DEVIATIONS


@variants
def test_in_float64_they_are_equal_to_twelve_digits(options: dict[str, Any]) -> None:
    model, module = build(**options)
    tokens, exact = random_tokens(257), model.double()
    expected = sru.logits(module, tokens)
    assert deviations(exact(tokens.unsqueeze(0))[0], expected) < 1e-12
    state = exact.new_state(1)
    assert state["cell"].dtype == torch.float64
    assert deviations(prefill(exact, tokens, state), expected) < 1e-12


@pytest.mark.parametrize("device", DEVICES)
@variants
def test_steps_and_training_compute_what_prefill_does(options: dict[str, Any], device: str) -> None:
    model = build(**options)[0].to(device)
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
def test_a_prompt_split_anywhere_is_the_whole(options: dict[str, Any]) -> None:
    model, tokens = build(**options)[0], random_tokens(37)
    whole = model.new_state(1)
    expected = prefill(model, tokens, whole)
    for boundary in range(1, 37):
        state = model.new_state(1)
        parts = [prefill(model, part, state) for part in tokens.tensor_split([boundary])]
        assert relative_error(torch.cat(parts), expected) < TOLERANCE
        for ours, theirs in zip(state.tensors(), whole.tensors(), strict=True):
            assert relative_error(ours, theirs) < TOLERANCE


@pytest.mark.parametrize("device", DEVICES)
@variants
def test_a_packed_batch_is_every_sequence_alone(options: dict[str, Any], device: str) -> None:
    model, lengths, slots = build(**options)[0].to(device), [1, 7, 130, 2], [5, 0, -1, 3]
    sequences = [random_tokens(length, seed=length) for length in lengths]
    bounds, state = int32([0, 1, 8, 138, 140], device), model.new_state(6)
    packed = torch.cat(sequences).to(device)
    hidden = model.prefill(packed, bounds, state, int32(slots, device))
    for tokens, slot, got in zip(sequences, slots, hidden.split(lengths), strict=True):
        if slot >= 0:
            alone = model.new_state(1)
            expected = prefill(model, tokens, alone)
            assert relative_error(model.logits(got), expected) < TOLERANCE
            for ours, theirs in zip(state.tensors(), alone.tensors(), strict=True):
                assert relative_error(ours[:, slot], theirs[:, 0]) < TOLERANCE
    for tensor in state.tensors():
        assert not tensor[:, [1, 2, 4]].any()


@pytest.mark.parametrize("device", DEVICES)
def test_a_batch_of_steps_is_every_sequence_alone(device: str) -> None:
    """Padding rows change nothing, wherever their slot would be."""
    model, slots = build(**UNTIED)[0].to(device), [4, -1, 0, -7, 2]
    state = model.new_state(5)
    for row in (0, 1, 2, 4):
        prefill(model, random_tokens(3 + row, seed=row), state, row)
    before = [tensor.clone() for tensor in state.tensors()]
    tokens = random_tokens(5, seed=9).to(device)
    got = model.logits(model.step(tokens, state, int32(slots, device)))
    for place, slot in enumerate(slots):
        if slot >= 0:
            alone = model.new_state(1)
            prefill(model, random_tokens(3 + slot, seed=slot), alone)
            expected = model.logits(
                model.step(tokens[place : place + 1], alone, int32([0], device))
            )
            assert relative_error(got[place], expected[0]) < TOLERANCE
    for tensor, old in zip(state.tensors(), before, strict=True):
        assert torch.equal(tensor[:, [1, 3]], old[:, [1, 3]])


@variants
def test_greedy_continuations_are_equal(options: dict[str, Any]) -> None:
    model, module = build(**options)
    state, text = model.new_state(1), random_tokens(20)
    row = prefill(model, text, state)[-1:]
    for _ in range(30):
        expected = sru.logits(module, text)[-1]
        best, second = expected.topk(2).values
        if best - second > 2 * DEVIATIONS * expected.std():
            assert int(row.argmax()) == int(expected.argmax())
        token = expected.argmax().int().view(1)
        text = torch.cat([text, token])
        row = model.logits(model.step(token, state, int32([0])))


def test_a_copied_state_goes_on_alike() -> None:
    model, tokens = build()[0], random_tokens(40)
    state = model.new_state(2)
    prefill(model, tokens[:25], state, 0)
    for tensor in state.tensors():
        tensor[:, 1] = tensor[:, 0]
    expected = prefill(model, tokens[25:], state, 0)
    assert torch.equal(prefill(model, tokens[25:], state, 1), expected)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("quantization", ["int8", "fp8"])
@pytest.mark.parametrize("options", [UNTIED, {"tied": True}])
def test_quantised_models_compute_with_the_dequantised_weights(
    options: dict[str, Any], quantization: Quantization, device: str
) -> None:
    exact = build(**options)[0]
    model = quantize_model(exact, quantization)
    names = ("input", "down") if "projection_size" in options else ("input",)
    expected = {f"layers.{n}.{name}.weight" for n in range(2) for name in names}
    expected.add("embedding.weight" if exact.config.tie_embeddings else "head.weight")
    assert set(quantized_matrices(model)) == expected
    weights = dict(model.state_dict())
    for name, scale in quantized_matrices(model).items():
        weights[name] = dequantize(weights[name], weights.pop(scale))
    same = registry.build(exact.config).eval()
    same.load_state_dict(weights)
    tokens = random_tokens(60)
    want = prefill(same, tokens, same.new_state(1))
    on_device = model.to(device)
    assert relative_error(prefill(on_device, tokens, on_device.new_state(1)), want) < TOLERANCE
    state, slots = on_device.new_state(1), int32([0], device)
    steps = [model.step(token, state, slots) for token in tokens.to(device).split(1)]
    assert relative_error(model.logits(torch.cat(steps)), want) < TOLERANCE
    error = (want - prefill(exact, tokens, exact.new_state(1))).norm()
    assert 0 < error / want.norm() < (0.05 if quantization == "int8" else 0.2)


def test_a_quantised_model_knows_the_type_of_its_activations(tmp_path: Path) -> None:
    """Also one whose head is its embedding, and which has no norms and no bias of the head."""
    model, _ = build(tied=True, head_bias=False)
    save_model(tmp_path, model, model.config, "bfloat16")
    loaded, config = load_model(tmp_path, "cpu", "bfloat16", "int8")
    assert (loaded.activations, config.quantization) == (torch.bfloat16, "int8")
    hidden = loaded.prefill(random_tokens(9), int32([0, 9]), loaded.new_state(1), int32([0]))
    assert hidden.dtype == torch.bfloat16


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bit_weights(dtype: torch.dtype, device: str) -> None:
    """State and logits stay fp32; what a matrix multiplies is rounded to 2^-9 or 2^-12."""
    model, module = build(**UNTIED)
    model.to(device, dtype)
    module.load_state_dict(
        {name: tensor.to(dtype).float() for name, tensor in module.state_dict().items()}
    )
    tokens, state = random_tokens(60), model.new_state(1)
    expected = sru.logits(module, tokens)
    got = prefill(model, tokens, state)
    assert got.dtype == state["cell"].dtype == torch.float32
    bound = 0.05 if dtype == torch.bfloat16 else 0.006
    assert relative_error(got, expected) < bound
    stepped, slots = model.new_state(1), int32([0], device)
    steps = [model.step(token, stepped, slots) for token in tokens.to(device).split(1)]
    assert relative_error(model.logits(torch.cat(steps)), expected) < bound


def test_every_parameter_learns() -> None:
    model = build(**UNTIED)[0].train()
    period = torch.stack([random_tokens(6, seed) for seed in range(4)]).repeat(1, 4).long()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(20):
        logits = model(period[:, :-1])
        loss = functional.cross_entropy(logits.flatten(0, 1), period[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None and parameter.grad.abs().max() > 0, name
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.7 * losses[0]


def test_the_program_has_the_stages_of_the_layers() -> None:
    model, _ = build(projection_size=7, layer_norm=True, rescale=True, use_tanh=True)
    program = model.program()
    assert program.norm is None and program.head is model.head
    for stages in program.layers:
        norm, down, into, recurrence, last = stages
        assert isinstance(norm, LayerNorm) and isinstance(last, Replace)
        assert isinstance(down, Linear) and isinstance(into, Linear)
        assert isinstance(recurrence, SruRecurrence)
        assert (recurrence.state, recurrence.highway, recurrence.tanh) == ("cell", True, True)
        assert recurrence.scale_x == pytest.approx(3**0.5)
    model, _ = build(
        **{"embedding": 10, "proj_input_to_hidden_first": True},
        **{"layer_norm": True, "normalize_after": True, "v1": True},
    )
    first, second = model.program().layers
    assert [type(stage) for stage in first[:2]] == [Linear, Replace]
    for into, recurrence, norm, last in (first[2:], second):
        assert isinstance(into, Linear) and isinstance(norm, LayerNorm)
        assert isinstance(recurrence, SruRecurrence) and recurrence.weight_c is None
        assert isinstance(last, Replace)


def test_kernels_without_the_cell_refuse_it_by_name() -> None:
    model, _ = build()
    for path in (cpu, cublas, persistent_decode, cluster_decode, selective):
        reason = refusal(model, path.SUPPORT)
        assert reason is not None and reason.startswith("cell 'sru', but its kernels have")
    told = explain_backend(model, torch.device("cpu"))
    assert told.name == "eager"
    backend = select_backend(model, torch.device("cpu"))
    assert isinstance(backend, EagerBackend)
    with pytest.raises(
        ConfigError, match=r"deterministic is not possible .*allowed: false with the cell 'sru'"
    ):
        select_backend(model, torch.device("cpu"), deterministic=True)


def test_a_config_says_what_a_folder_holds() -> None:
    shape: dict[str, Any] = {"vocab_size": 29, "d_model": 8, "n_layers": 2, "d_embedding": 6}
    plain = SruConfig(**shape, projection=7, scale_x=1.5, tanh=True)
    normed = SruConfig(**shape, layer_norm=True, norm_eps=1e-6, weight_c=False, skip_term=False)
    assert plain.state_bytes == normed.state_bytes == 2 * 8 * 4
    assert (plain.inputs(0), plain.parts(0), plain.projected(0)) == (6, 4, 0)
    assert (plain.inputs(1), plain.parts(1), plain.projected(1)) == (8, 3, 7)
    assert (normed.parts(0), normed.parts(1)) == (3, 3)
    for config in (plain, normed):
        values = json.loads(json.dumps(config.to_dict()))
        assert ("norm_eps" in values) == config.layer_norm
        assert registry.config_from_dict(values) == config
        assert config.embedding_width == 6


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"cell": "gru"}, "cell is 'gru'; allowed: \"sru\""),
        ({"d_embedding": 0}, "d_embedding is 0; allowed: an integer from 1"),
        ({"projection": -1}, "projection is -1; allowed: an integer from 0"),
        ({"tie_embeddings": True}, "tie_embeddings is True; allowed: false, unless d_embedding"),
        ({"scale_x": float("nan")}, "scale_x is nan; allowed: a number from"),
        ({"normalize_after": True}, "normalize_after is True; allowed: false without layer_norm"),
        ({"tanh": 1}, "tanh is 1; allowed: true or false"),
    ],
)
def test_a_config_that_no_model_can_have_is_refused(changes: dict[str, Any], message: str) -> None:
    shape: dict[str, Any] = {"vocab_size": 29, "d_model": 8, "n_layers": 2, "d_embedding": 6}
    with pytest.raises(ConfigError, match=message):
        SruConfig(**{**shape, **changes})


@pytest.mark.parametrize("device", DEVICES)
def test_long_prompts_with_gates_that_do_not_see_the_state(device: str) -> None:
    """On a GPU chunks are read side by side: the same bits wherever they are cut."""
    model = build(v1=True, layer_norm=True)[0].to(device)
    tokens, whole = random_tokens(1500), model.new_state(1)
    expected = prefill(model, tokens, whole)
    for cut in (128, 1024):
        state = model.new_state(1)
        parts = [prefill(model, part, state) for part in tokens.tensor_split([cut])]
        assert relative_error(torch.cat(parts), expected) < TOLERANCE
        assert relative_error(state["cell"], whole["cell"]) < TOLERANCE


def package_module(module: sru.Published) -> torch.nn.Module:
    package = pytest.importorskip("sru", reason="the sru package is not installed")
    embedding, hidden, layers = module.shape
    theirs: torch.nn.Module = package.SRU(embedding, hidden, layers, **module.options).eval()
    theirs.load_state_dict(module.rnn.state_dict())
    return theirs


@pytest.mark.filterwarnings("ignore")
@variants
def test_the_equations_are_the_package_s(options: dict[str, Any]) -> None:
    """Its own code, with gradients on: without them it runs compiled code, of floats alone."""
    module = sru.published(**options)
    theirs = package_module(module).double()
    x = torch.randn(50, module.shape[0], dtype=torch.float64)
    expected, _ = theirs(x.unsqueeze(1))
    got = module.rnn.double()(x)
    assert relative_error(got, expected.squeeze(1)) < 1e-12
