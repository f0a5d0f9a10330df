"""Mamba models: the function of the published weights, however a text is read."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional

from engine.config import Quantization
from engine.errors import CheckpointError, ConfigError
from engine.models import registry
from engine.models.backends import cluster_decode, cpu, fused_gemm
from engine.models.backends.blocks import refusal
from engine.models.backends.cpu import CpuBackend
from engine.models.backends.eager import EagerBackend
from engine.models.backends.selector import explain_backend, select_backend
from engine.models.convert import convert
from engine.models.language_model import LanguageModel
from engine.models.loader import load_model, quantize_model, save_model
from engine.models.mamba.config import MambaConfig
from engine.models.mamba.lm import MambaLM
from engine.models.program import SelectiveRecurrence
from engine.models.quantize import dequantize
from engine.models.quantized import quantized_matrices
from engine.models.state import ModelState
from tests.models import mamba
from tests.models.variants import DEVICES, int32, relative_error

LENGTHS = [1, 2, 7, 64, 257, 1025]
DEVIATIONS = 1e-4  # how far fp32 logits may be from float64's, in standard deviations of these
TOLERANCE = 1e-5  # fp32 against fp32, relative to the largest logit or state
variants = pytest.mark.parametrize(
    "changes", [pytest.param(changes, id=name) for name, changes in mamba.VARIANTS.items()]
)


def model_of(folder: Path, values: dict[str, Any], weights: mamba.Weights) -> LanguageModel:
    """The model that is loaded from a published folder."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(values))
    save_file(
        {name: tensor.clone() for name, tensor in weights.items()}, folder / "model.safetensors"
    )
    return load_model(folder, "cpu")[0]


class Case:
    """A model, and the published form that it was loaded from."""

    def __init__(self, folder: Path, changes: dict[str, Any]) -> None:
        self.values = {**mamba.VALUES, **changes}
        self.weights = mamba.published_weights(self.values)
        self.model = model_of(folder, self.values, self.weights)

    def logits(self, tokens: Tensor) -> Tensor:
        return mamba.logits(self.values, self.weights, tokens)


@pytest.fixture
def case(request: pytest.FixtureRequest, tmp_path: Path) -> Case:
    """Of the variant in `changes`, or the plain one."""
    given = getattr(request.node, "callspec", None)
    return Case(tmp_path / "model", given.params.get("changes", {}) if given else {})


def random_tokens(count: int, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    vocabulary = mamba.VALUES["vocab_size"]
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
def test_logits_are_those_of_the_equations(
    case: Case, changes: dict[str, Any], device: str
) -> None:
    case.model.to(device)
    for length in LENGTHS:
        tokens = random_tokens(length, seed=length)
        got = prefill(case.model, tokens, case.model.new_state(1))
        assert deviations(got, case.logits(tokens)) < DEVIATIONS


@pytest.mark.slow
@variants
def test_logits_of_a_long_text_are_too(case: Case, changes: dict[str, Any]) -> None:
    tokens = random_tokens(2049)
    got = prefill(case.model, tokens, case.model.new_state(1))
    assert deviations(got, case.logits(tokens)) < DEVIATIONS


@variants
def test_in_float64_they_are_equal_to_twelve_digits(case: Case, changes: dict[str, Any]) -> None:
    tokens = random_tokens(257)
    got = case.model.double()(tokens.unsqueeze(0))[0]
    assert deviations(got, case.logits(tokens)) < 1e-12


@pytest.mark.parametrize("device", DEVICES)
@variants
def test_steps_and_training_compute_what_prefill_does(
    case: Case, changes: dict[str, Any], device: str
) -> None:
    model = case.model.to(device)
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
def test_a_prompt_split_anywhere_is_the_whole(case: Case, changes: dict[str, Any]) -> None:
    model, tokens = case.model, random_tokens(37)
    whole = model.new_state(1)
    expected = prefill(model, tokens, whole)
    for boundary in range(1, 37):
        state = model.new_state(1)
        parts = [prefill(model, part, state) for part in tokens.tensor_split([boundary])]
        assert relative_error(torch.cat(parts), expected) < TOLERANCE
        for ours, theirs in zip(state.tensors(), whole.tensors(), strict=True):
            assert relative_error(ours, theirs) < TOLERANCE


@variants
def test_a_packed_batch_is_every_sequence_alone(case: Case, changes: dict[str, Any]) -> None:
    model, lengths, slots = case.model, [1, 7, 130, 2], [5, 0, -1, 3]
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
def test_greedy_continuations_are_equal(case: Case, changes: dict[str, Any]) -> None:
    model, state, text = case.model, case.model.new_state(1), random_tokens(20)
    row, told = prefill(model, text, state)[-1:], 0
    for _ in range(30):
        expected = case.logits(text)[-1]
        best, second = expected.topk(2).values
        if best - second > 2 * DEVIATIONS * expected.std():
            assert int(row.argmax()) == int(expected.argmax())
            told += 1
        token = expected.argmax().int().view(1)
        text = torch.cat([text, token])
        row = model.logits(model.step(token, state, int32([0])))
    assert told > 25


@pytest.mark.parametrize("kind", ["int8", "fp8"])
@pytest.mark.parametrize("changes", [{}, {**mamba.FALCON, "use_bias": True}])
def test_quantised_models_compute_with_the_dequantised_weights(
    case: Case, changes: dict[str, Any], kind: Quantization
) -> None:
    exact = case.model
    model = quantize_model(exact, kind)
    expected = {f"layers.{n}.{name}.weight" for n in range(3) for name in ("in_proj", "out_proj")}
    expected.add("embedding.weight" if exact.config.tie_embeddings else "head.weight")
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
def test_sixteen_bit_weights(case: Case, dtype: torch.dtype, device: str) -> None:
    """State, logits and the residual stream stay fp32."""
    model = case.model.to(device, dtype)
    rounded = {name: tensor.to(dtype) for name, tensor in case.weights.items()}
    tokens, state = random_tokens(60), model.new_state(1)
    got = prefill(model, tokens, state)
    assert got.dtype == state["ssm"].dtype == torch.float32
    assert (
        model.prefill(tokens.to(device), int32([0, 60], device), state, int32([0], device)).dtype
        == dtype
    )
    error = relative_error(got, mamba.logits(case.values, rounded, tokens))
    assert error < (0.05 if dtype == torch.bfloat16 else 0.01)
    stepped = model.logits(model.step(tokens[:1].to(device), state, int32([0], device)))
    assert stepped.dtype == torch.float32


def test_parameters_of_the_recurrence_stay_float32(case: Case, tmp_path: Path) -> None:
    """Beside bfloat16 weights, in memory and in own folders, which may have them in bfloat16."""
    ends = (".A_log", ".D", ".dt_proj.bias")
    exact = case.model.state_dict()
    model, config = load_model(tmp_path / "model", "cpu", "bfloat16")
    save_model(tmp_path / "own", model, config, "bfloat16")
    own, read = load_model(tmp_path / "own", "cpu")
    assert read.dtype == "bfloat16" and cpu.supports(own) == cpu.supports(case.model)
    for name, tensor in own.state_dict().items():
        assert torch.equal(tensor, model.state_dict()[name])
        assert tensor.dtype == (torch.float32 if name.endswith(ends) else torch.bfloat16)
        if name.endswith(ends):
            assert torch.equal(tensor, exact[name])
    coarse = own.bfloat16()
    save_file(dict(coarse.state_dict()), tmp_path / "own" / "model.safetensors")
    old, _ = load_model(tmp_path / "own", "cpu")
    assert old.state_dict()["layers.0.A_log"].dtype == torch.float32
    assert torch.equal(old.state_dict()["layers.0.A_log"].bfloat16(), coarse.layers[0].A_log)


def test_the_residual_stream_has_the_type_that_the_config_says(case: Case) -> None:
    types = {}
    for wide in (True, False):
        config = registry.config_from_dict({**case.values, "residual_in_fp32": wide})
        model = registry.build(config).eval()
        model.load_state_dict(case.model.state_dict())
        model.bfloat16()
        seen: list[torch.dtype] = []
        model.layers[1].norm.register_forward_pre_hook(
            lambda _, given, seen=seen: seen.append(given[0].dtype)
        )
        tokens = random_tokens(200)
        state = model.new_state(1)
        got = prefill(model, tokens, state)
        model.step(tokens[:1], state, int32([0]))
        model(tokens.unsqueeze(0))
        types[wide] = set(seen)
        assert got.dtype == torch.float32
    assert types == {True: {torch.float32}, False: {torch.bfloat16}}


def test_every_parameter_learns(case: Case) -> None:
    model = case.model.train()
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


def test_an_untrained_model_has_the_paper_s_initial_values() -> None:
    config = MambaConfig(
        vocab_size=9, d_model=8, n_layers=1, inner=4096, state_size=3, dt_rank=1, conv_kernel=4
    )
    layer = MambaLM(config).layers[0]
    assert torch.equal(layer.A_log[7].exp().round(), torch.tensor([1.0, 2.0, 3.0]))
    dt = functional.softplus(layer.dt_proj.bias).detach()
    assert 0.00099 < dt.min() < 0.0011 and 0.09 < dt.max() < 0.1001
    assert abs(float(dt.log().mean()) - float(torch.tensor(0.01).log())) < 0.1
    assert layer.conv.abs().max() <= 0.5 and layer.conv.std() > 0.2


@variants
def test_the_program_has_the_stages_of_a_layer(case: Case, changes: dict[str, Any]) -> None:
    a = case.model.channel_parameters()
    for index, stages in enumerate(case.model.program().layers):
        names = [type(stage).__name__ for stage in stages]
        assert names == ["Norm", "Linear", "Conv", "SelectiveRecurrence", "Linear", "Residual"]
        (stage,) = (one for one in stages if isinstance(one, SelectiveRecurrence))
        stored = case.weights[f"backbone.layers.{index}.mixer.A_log"]
        assert torch.equal(stage.A, -stored.exp()) and torch.equal(stage.A, a[index])  # type: ignore[arg-type]
        assert stage.norm_eps == case.values.get("mixer_rms_eps")


@variants
def test_a_cpu_has_kernels_for_it(case: Case, changes: dict[str, Any]) -> None:
    """The logits and continuations of the equations, from packed weights."""
    device, text = torch.device("cpu"), random_tokens(140)
    assert explain_backend(case.model, device).name == "cpu"
    backend = select_backend(case.model, device, deterministic=True)
    assert isinstance(backend, CpuBackend)
    state, slot = backend.new_state(2), int32([1])
    hidden = backend.prefill(text[:130], int32([0, 130]), state, slot)
    got = [backend.logits(hidden), *(backend.step(one, state, slot) for one in text[130:].split(1))]
    assert deviations(torch.cat(got), case.logits(text)) < DEVIATIONS


def test_other_kernels_refuse_it_by_name_and_it_is_served(tmp_path: Path) -> None:
    case, device = Case(tmp_path / "model", {"conv_kernel": 9}), torch.device("cpu")
    reason = "convolutions of more than 8 taps"
    assert cpu.supports(case.model) == reason
    info = explain_backend(case.model, device)
    assert info.name == "eager" and ("cpu", False, reason) in [
        (path.name, path.used, path.reason) for path in info.paths
    ]
    assert isinstance(select_backend(case.model, device), EagerBackend)
    with pytest.raises(ConfigError, match=f"deterministic is not possible .*: {reason}; allowed"):
        select_backend(case.model, device, deterministic=True)
    reason = "cell 'mamba', but its kernels have only mingru, minlstm and hgrn"
    assert fused_gemm.refuses_model(case.model.bfloat16()) == reason
    reason = "cell 'mamba', but its kernels have only mingru and minlstm"
    assert refusal(case.model, cluster_decode.SUPPORT) == reason


@variants
def test_a_published_config_is_read(changes: dict[str, Any]) -> None:
    values = {**mamba.VALUES, **changes}
    assert registry.published_family(values).name == "mamba"
    config = registry.config_from_dict(values)
    assert isinstance(config, MambaConfig)
    assert config.tie_embeddings == values["tie_word_embeddings"]
    assert config.inner == values["intermediate_size"]
    assert config.selection_norm_eps == values.get("mixer_rms_eps")
    assert config.state_bytes == sum(
        4 * tensor.numel() for tensor in MambaLM(config).new_state(1).tensors()
    )
    assert registry.config_from_dict(config.to_dict()) == config


def test_absent_fields_have_the_classes_defaults() -> None:
    transformers = pytest.importorskip("transformers")
    for name in ("Mamba", "FalconMamba"):
        theirs = getattr(transformers, f"{name}Config")()
        config = registry.config_from_dict({"architectures": [f"{name}ForCausalLM"]})
        assert isinstance(config, MambaConfig)
        assert (config.vocab_size, config.d_model) == (theirs.vocab_size, theirs.hidden_size)
        assert (config.n_layers, config.inner) == (
            theirs.num_hidden_layers,
            theirs.intermediate_size,
        )
        assert (config.state_size, config.dt_rank) == (theirs.state_size, theirs.time_step_rank)
        assert (config.conv_kernel, config.bias) == (theirs.conv_kernel, theirs.use_bias)
        assert (config.conv_bias, config.norm_eps) == (
            theirs.use_conv_bias,
            theirs.layer_norm_epsilon,
        )
        assert (config.residual_in_fp32, config.tie_embeddings) == (
            theirs.residual_in_fp32,
            theirs.tie_word_embeddings,
        )
        assert config.selection_norm_eps == getattr(theirs, "mixer_rms_eps", None)
        by_type = {"model_type": theirs.model_type}
        assert registry.config_from_dict(by_type) == config


def test_the_published_sizes() -> None:
    given = {"d_model": 2560, "n_layer": 64, "vocab_size": 50277, "ssm_cfg": {}}
    config = registry.config_from_dict({**given, "pad_vocab_size_multiple": 8})  # 2.8 B
    assert isinstance(config, MambaConfig)
    assert (config.vocab_size, config.dt_rank, config.inner) == (50280, 160, 5120)
    assert config.state_bytes == 4 * 64 * 5120 * (16 + 3) == 24_903_680
    with torch.device("meta"):
        model = registry.build(config)
    assert sum(weight.numel() for weight in model.parameters()) == 2_768_345_600
    falcon = {**mamba.FALCON, "hidden_size": 4096, "num_hidden_layers": 64, "vocab_size": 65024}
    config = registry.config_from_dict({**falcon, "intermediate_size": 8192, "time_step_rank": 256})
    with torch.device("meta"):
        model = registry.build(config)
    assert sum(weight.numel() for weight in model.parameters()) == 7_272_665_088


@variants
def test_own_folders_keep_every_value(case: Case, changes: dict[str, Any], tmp_path: Path) -> None:
    convert(tmp_path / "model", tmp_path / "own")
    own, config = load_model(tmp_path / "own", "cpu")
    assert config == case.model.config
    state = own.state_dict()
    for name, tensor in case.model.state_dict().items():
        assert torch.equal(state[name], tensor)
    assert torch.equal(state["layers.0.A_log"], case.weights["backbone.layers.0.mixer.A_log"])
    save_model(tmp_path / "again", own, config, "bfloat16")
    assert load_model(tmp_path / "again", "cpu")[1].dtype == "bfloat16"


@pytest.mark.parametrize("changes", [{}, {"tie_word_embeddings": False, "use_bias": True}])
def test_a_folder_of_mamba_ssm_is_the_same_model(
    case: Case, changes: dict[str, Any], tmp_path: Path
) -> None:
    """Its config.json names no architecture, and its table is padded."""
    values, weights = mamba.as_mamba_ssm(
        case.values, case.weights, vocab_size=59, pad_vocab_size_multiple=61
    )
    folder = tmp_path / "ssm"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(values))
    torch.save(weights, folder / "pytorch_model.bin")
    model, config = load_model(folder, "cpu")
    assert (config.family, config.vocab_size, config.eos_token_id) == ("mamba", 61, None)
    expected = case.model.state_dict()
    assert all(torch.equal(expected[name], tensor) for name, tensor in model.state_dict().items())
    values |= {"eos_token_id": 7}  # may be added by hand, as the class has none
    (folder / "config.json").write_text(json.dumps(values))
    assert load_model(folder, "cpu")[1].eos_token_ids == (7,)
    named = registry.config_from_dict({**values, "architectures": ["MambaLMHeadModel"]})
    assert named.vocab_size == 61


@pytest.mark.parametrize(
    "values", [{"model_type": "minserve", "ssm_cfg": {}}, {"cell": "mingru", "n_layers": 1}]
)
def test_a_mark_does_not_make_minserve_s_own_form_another(values: dict[str, Any]) -> None:
    assert registry.is_own(values)


def test_a_folder_with_tensors_of_another_layout_is_refused(case: Case, tmp_path: Path) -> None:
    assert (case.model.config.dtype, case.model.config.eos_token_id) == ("float32", 2)
    folder = tmp_path / "other"
    layer_norm = {**case.weights, "backbone.layers.0.norm.bias": torch.zeros(24)}
    with pytest.raises(CheckpointError, match=r"norm\.bias.*unexpected"):
        model_of(folder, case.values, layer_norm)
    del case.weights["backbone.layers.1.mixer.A_log"]
    with pytest.raises(CheckpointError, match=r"A_log.*missing"):
        model_of(folder, case.values, case.weights)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("hidden_act", "gelu"),
        ("quantization_config", {"quant_method": "gptq"}),
        ("expand", None),
        ("expand", 10**400),
        ("expand", 1e-9),
        ("hidden_size", 0),
        ("intermediate_size", "48"),
        ("layer_norm_epsilon", 10**400),
        ("mixer_rms_eps", 2),
        ("tie_word_embeddings", 1),
        ("residual_in_fp32", "yes"),
        ("use_bias", None),
        ("use_conv_bias", 0),
        ("conv_kernel", 1),
        ("state_size", 0),
        ("time_step_rank", "none"),
        ("num_hidden_layers", 0),
    ],
)
def test_what_is_not_served_is_refused_by_name(name: str, value: object) -> None:
    values = {**mamba.VALUES, **mamba.FALCON, name: value}
    if name == "expand":
        del values["intermediate_size"]
    with pytest.raises(ConfigError, match=f"^{name} is {re.escape(repr(value))}; ") as error:
        registry.config_from_dict(values)
    assert error.value.param == name


@pytest.mark.parametrize(
    ("told", "cell"),
    [
        ({"rms_norm": False}, {}),
        ({"attn_layer_idx": [1]}, {}),
        ({"attn_cfg": {"num_heads": 4}}, {}),
        ({"d_intermediate": 64}, {}),
        ({"pad_vocab_size_multiple": 0}, {}),
        ({"vocab_size": None}, {}),
        ({"d_model": -1}, {}),
        ({"n_layer": 0}, {}),
        ({"tie_embeddings": 1}, {}),
        ({"ssm_cfg": [1]}, {}),
        ({}, {"layer": "Mamba3"}),
        ({}, {"expand": 0}),
        ({}, {"dt_rank": 0}),
        ({}, {"d_state": 0}),
        ({}, {"d_conv": 1}),
        ({}, {"bias": 1}),
        ({}, {"conv_bias": "no"}),
    ],
)
def test_what_is_not_served_of_mamba_ssm_is_too(told: dict[str, Any], cell: dict[str, Any]) -> None:
    values, _ = mamba.as_mamba_ssm(mamba.VALUES, mamba.published_weights(mamba.VALUES))
    values["ssm_cfg"] |= cell
    ((name, value),) = [*told.items(), *((f"ssm_cfg.{key}", one) for key, one in cell.items())]
    with pytest.raises(ConfigError, match=f"^{name} is {re.escape(repr(value))}; ") as error:
        registry.config_from_dict({**values, **told})
    assert error.value.param == name


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("cell", "mingru"),
        ("inner", 0),
        ("state_size", 0),
        ("dt_rank", 0),
        ("conv_kernel", 1),
        ("selection_norm_eps", 0),
        ("bias", 1),
    ],
)
def test_own_configs_are_checked(field: str, value: object) -> None:
    good = {"vocab_size": 9, "d_model": 8, "n_layers": 1, "inner": 8, "state_size": 4, "dt_rank": 1}
    registry.config_from_dict({"family": "mamba", **good})
    with pytest.raises(ConfigError) as error:
        registry.config_from_dict({"family": "mamba", **good, field: value})
    assert error.value.param == field
