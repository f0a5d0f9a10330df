"""Mamba-2 models: the function of the published weights, however a text is read."""

from __future__ import annotations

import json
from collections.abc import Callable
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
from engine.models.loader import load_model, quantize_model, save_model
from engine.models.mamba2.config import Mamba2Config
from engine.models.mamba2.lm import Mamba2LM
from engine.models.program import Conv, SsdRecurrence
from engine.models.quantize import dequantize
from engine.models.quantized import quantized_matrices
from tests.models import mamba2
from tests.models.test_mamba import (
    DEVIATIONS,
    TOLERANCE,
    deviations,
    model_of,
    prefill,
    random_tokens,
)
from tests.models.variants import DEVICES, int32, relative_error

LENGTHS = [1, 2, 7, 64, 257, 2049]
variants = pytest.mark.parametrize(
    "changes", [pytest.param(changes, id=name) for name, changes in mamba2.VARIANTS.items()]
)


class Case:
    """A model, and the published form that it was loaded from."""

    def __init__(self, folder: Path, changes: dict[str, Any]) -> None:
        self.values = {**mamba2.VALUES, **changes}
        self.weights = mamba2.published_weights(self.values)
        self.model = model_of(folder, self.values, self.weights)

    def logits(self, tokens: Tensor) -> Tensor:
        return mamba2.logits(self.values, self.weights, tokens)


@pytest.fixture
def case(request: pytest.FixtureRequest, tmp_path: Path) -> Case:
    """Of the variant in `changes`, or the plain one."""
    given = getattr(request.node, "callspec", None)
    return Case(tmp_path / "model", given.params.get("changes", {}) if given else {})


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
    tokens, slots = random_tokens(70).to(device), int32([2], device)
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
    model, tokens = case.model, random_tokens(150)
    whole = model.new_state(1)
    expected = prefill(model, tokens, whole)
    for boundary in (1, 2, 3, 4, 16, 17, 31, 64, 127, 128, 129, 149):
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


@pytest.mark.parametrize("kind", ["int8", "fp8"])
@pytest.mark.parametrize("changes", [{}, {"use_bias": True, "tie_word_embeddings": True}])
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
    seen: list[torch.dtype] = []
    model.layers[1].norm.register_forward_pre_hook(lambda _, given: seen.append(given[0].dtype))
    got = prefill(model, tokens, state)
    assert got.dtype == state["ssm"].dtype == torch.float32
    error = relative_error(got, mamba2.logits(case.values, rounded, tokens))
    assert error < (0.05 if dtype == torch.bfloat16 else 0.01)
    stepped = model.logits(model.step(tokens[:1].to(device), state, int32([0], device)))
    assert stepped.dtype == torch.float32 and seen == [torch.float32] * 2


def test_parameters_of_the_recurrence_stay_float32(case: Case, tmp_path: Path) -> None:
    """Beside bfloat16 weights, in memory and in own folders, which may have them in bfloat16."""
    ends = (".A_log", ".D", ".dt_bias")
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


def test_a_narrow_residual_stream_has_the_weights_type(case: Case) -> None:
    config = registry.config_from_dict({**case.values, "residual_in_fp32": False})
    model = registry.build(config).eval()
    model.load_state_dict(case.model.state_dict())
    model.bfloat16()
    seen: list[torch.dtype] = []
    model.layers[1].norm.register_forward_pre_hook(lambda _, given: seen.append(given[0].dtype))
    prefill(model, random_tokens(20), model.new_state(1))
    assert seen == [torch.bfloat16]


@pytest.mark.parametrize("changes", [mamba2.VARIANTS["groups"]])
def test_every_parameter_learns(case: Case, changes: dict[str, Any]) -> None:
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


def test_an_untrained_model_has_mamba_ssm_s_initial_values() -> None:
    config = Mamba2Config(
        vocab_size=9, d_model=8, n_layers=1, heads=4096, head_dim=1, state_size=3, conv_kernel=4
    )
    layer = Mamba2LM(config).layers[0]
    a = layer.A_log.detach().exp()
    assert 1 <= a.min() < 1.1 and 15.9 < a.max() < 16.001 and abs(float(a.mean()) - 8.5) < 0.5
    dt = functional.softplus(layer.dt_bias).detach()
    assert 0.00099 < dt.min() < 0.0011 and 0.09 < dt.max() < 0.1001
    assert abs(float(dt.log().mean()) - float(torch.tensor(0.01).log())) < 0.1
    assert layer.conv.abs().max() <= 0.5 and layer.conv.std() > 0.2
    assert bool((layer.D == 1).all()) and bool((layer.gated_norm.weight == 1).all())


@variants
def test_the_program_has_the_stages_of_a_layer(case: Case, changes: dict[str, Any]) -> None:
    a = case.model.channel_parameters()
    for index, stages in enumerate(case.model.program().layers):
        names = [type(stage).__name__ for stage in stages]
        assert names == ["Norm", "Linear", "Conv", "SsdRecurrence", "Linear", "Residual"]
        (stage,) = (one for one in stages if isinstance(one, SsdRecurrence))
        at = f"backbone.layers.{index}.mixer"
        assert torch.equal(stage.A, -case.weights[f"{at}.A_log"].exp())
        assert torch.equal(stage.A, a[index])  # type: ignore[arg-type]
        assert torch.equal(stage.norm_weight, case.weights[f"{at}.norm.weight"])
        assert stage.dt_limit == mamba2.limit_of(case.values)
        assert (stage.groups, stage.norm_eps) == (
            case.values["n_groups"],
            case.values["layer_norm_epsilon"],
        )
        (conv,) = (one for one in stages if isinstance(one, Conv))
        inner = case.values["num_heads"] * case.values["head_dim"]
        assert (conv.first, conv.state, stage.state) == (inner, "conv", "ssm")


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


@variants
def test_greedy_continuations_on_a_cpu_are_equal(case: Case, changes: dict[str, Any]) -> None:
    """In fp32 those of the equations, with int8 matrices those of plain torch."""
    plain = quantize_model(case.model, "int8")
    exact, coarse = CpuBackend(case.model), CpuBackend(plain)
    _follow(exact, lambda text: case.logits(text)[-1], 2 * DEVIATIONS)
    _follow(coarse, lambda text: prefill(plain, text, plain.new_state(1))[-1], 1e-4)


def _follow(
    backend: CpuBackend, expected_after: Callable[[Tensor], Tensor], tolerance: float
) -> None:
    """Compare the best token at every position where it is best by more than `tolerance`."""
    text, state, slot, told = random_tokens(20), backend.new_state(1), int32([0]), 0
    row = backend.logits(backend.prefill(text, int32([0, 20]), state, slot))[-1]
    for _ in range(30):
        expected = expected_after(text)
        best, second = expected.topk(2).values
        if best - second > tolerance * expected.std():
            assert int(row.argmax()) == int(expected.argmax())
            told += 1
        token = expected.argmax().int().view(1)
        text = torch.cat([text, token])
        row = backend.step(token, state, slot)[0]
    assert told > 25


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
    reason = "cell 'mamba2', but its kernels have only mingru, minlstm and hgrn"
    assert fused_gemm.refuses_model(case.model.bfloat16()) == reason
    reason = "cell 'mamba2', but its kernels have only mingru and minlstm"
    assert refusal(case.model, cluster_decode.SUPPORT) == reason


@variants
def test_a_published_config_is_read(changes: dict[str, Any]) -> None:
    values = {**mamba2.VALUES, **changes}
    assert registry.published_family(values).name == "mamba2"
    config = registry.config_from_dict(values)
    assert isinstance(config, Mamba2Config)
    assert config.tie_embeddings == values["tie_word_embeddings"]
    assert (config.heads, config.head_dim) == (values["num_heads"], values["head_dim"])
    assert (config.groups, config.dt_limit) == (values["n_groups"], mamba2.limit_of(values))
    assert config.state_bytes == sum(
        4 * tensor.numel() for tensor in Mamba2LM(config).new_state(1).tensors()
    )
    written = json.loads(json.dumps(config.to_dict(), allow_nan=False))
    assert registry.config_from_dict(written) == config
    del values["architectures"]  # model_type tells, too
    assert registry.config_from_dict(values) == config


def test_absent_fields_have_the_classes_defaults() -> None:
    theirs = pytest.importorskip("transformers").Mamba2Config()
    config = registry.config_from_dict({"architectures": ["Mamba2ForCausalLM"]})
    assert isinstance(config, Mamba2Config)
    assert (config.vocab_size, config.d_model) == (theirs.vocab_size, theirs.hidden_size)
    assert (config.n_layers, config.heads) == (theirs.num_hidden_layers, theirs.num_heads)
    assert (config.head_dim, config.state_size) == (theirs.head_dim, theirs.state_size)
    assert (config.groups, config.dt_limit) == (theirs.n_groups, theirs.time_step_limit)
    assert (config.conv_kernel, config.bias) == (theirs.conv_kernel, theirs.use_bias)
    assert (config.conv_bias, config.norm_eps) == (
        theirs.use_conv_bias,
        theirs.layer_norm_epsilon,
    )
    assert (config.residual_in_fp32, config.tie_embeddings) == (
        theirs.residual_in_fp32,
        theirs.tie_word_embeddings,
    )


def test_the_published_sizes() -> None:
    given = {"d_model": 2560, "n_layer": 64, "vocab_size": 50277, "ssm_cfg": {"layer": "Mamba2"}}
    config = registry.config_from_dict({**given, "pad_vocab_size_multiple": 16})  # 2.7 B
    assert isinstance(config, Mamba2Config)
    assert (config.vocab_size, config.heads, config.groups) == (50288, 80, 1)
    assert config.state_bytes == 4 * 64 * (80 * 64 * 128 + 3 * (5120 + 256)) == 171_900_928
    with torch.device("meta"):
        model = registry.build(config)
    assert sum(weight.numel() for weight in model.parameters()) == 2_702_599_680
    codestral = {**mamba2.VALUES, **mamba2.CODESTRAL, "hidden_size": 4096, "num_heads": 128}
    codestral |= {"head_dim": 64, "state_size": 128, "n_groups": 8, "num_hidden_layers": 64}
    config = registry.config_from_dict({**codestral, "vocab_size": 32768})
    with torch.device("meta"):
        model = registry.build(config)
    assert sum(weight.numel() for weight in model.parameters()) == 7_285_403_648


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


@pytest.mark.parametrize("changes", [mamba2.CODESTRAL, mamba2.VARIANTS["limits, tied"]])
def test_a_folder_of_mamba_ssm_is_the_same_model(
    case: Case, changes: dict[str, Any], tmp_path: Path
) -> None:
    """Its config.json names no architecture, and its table is padded."""
    values, weights = mamba2.as_mamba_ssm(
        case.values, case.weights, vocab_size=59, pad_vocab_size_multiple=61
    )
    folder = tmp_path / "ssm"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(values))
    torch.save(weights, folder / "pytorch_model.bin")
    model, config = load_model(folder, "cpu")
    assert (config.family, config.vocab_size, config.eos_token_id) == ("mamba2", 61, None)
    assert isinstance(config, Mamba2Config) and config.dt_limit == mamba2.limit_of(case.values)
    expected = case.model.state_dict()
    assert all(torch.equal(expected[name], tensor) for name, tensor in model.state_dict().items())
    named = registry.config_from_dict({**values, "architectures": ["MambaLMHeadModel"]})
    assert (named.family, named.vocab_size) == ("mamba2", 61)


@pytest.mark.parametrize("form", [{}, {"architectures": ["MambaLMHeadModel"]}])
@pytest.mark.parametrize(
    ("cell", "family"),
    [({"layer": "Mamba2"}, "mamba2"), ({"layer": "Mamba1"}, "mamba"), ({}, "mamba")],
)
def test_the_layer_of_mamba_ssm_decides_between_the_families(
    cell: dict[str, Any], family: str, form: dict[str, Any]
) -> None:
    values = {"d_model": 64, "n_layer": 1, "vocab_size": 9, "ssm_cfg": cell, **form}
    assert not registry.is_own(values)
    assert registry.published_family(values).name == family
    assert registry.config_from_dict(values).family == family


def test_a_folder_with_tensors_of_another_layout_is_refused(case: Case, tmp_path: Path) -> None:
    assert (case.model.config.dtype, case.model.config.eos_token_id) == ("float32", 2)
    folder = tmp_path / "other"
    wide = {**case.weights, "backbone.layers.0.mixer.D": torch.ones(48)}
    with pytest.raises(CheckpointError, match=r"mixer\.D.*\[48\].*\[6\]"):
        model_of(folder, case.values, wide)
    del case.weights["backbone.layers.1.mixer.norm.weight"]
    with pytest.raises(CheckpointError, match=r"mixer\.norm\.weight.*missing"):
        model_of(folder, case.values, case.weights)


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("hidden_act", "gelu", "'silu', 'swish'"),
        ("quantization_config", {"quant_method": "gptq"}, "null"),
        ("rms_norm", False, "True"),
        ("hidden_size", 0, "an integer from 1 to 131072"),
        ("expand", 10**400, "a number that makes 1 to 1048576 channels: at most 43690"),
        ("num_heads", 5, "6, which is expand * hidden_size / head_dim"),
        ("num_heads", "6", "6, which is expand * hidden_size / head_dim"),
        ("head_dim", 7, "a divisor of the 48 channels"),
        ("head_dim", None, "a divisor of the 48 channels"),
        ("n_groups", 4, "divisors of 6 heads"),
        ("n_groups", 0, "an integer from 1 to 1048576"),
        ("state_size", 0, "an integer from 1 to 4096"),
        ("conv_kernel", 1, "an integer from 2 to 256"),
        ("layer_norm_epsilon", 2, "a number between 0 and 1"),
        ("tie_word_embeddings", 1, "true or false"),
        ("residual_in_fp32", "yes", "true or false"),
        ("use_bias", None, "true or false"),
        ("use_conv_bias", 0, "true or false"),
        ("num_hidden_layers", 0, "an integer from 1 to 4096"),
        *(
            ("time_step_limit", limit, "two numbers from 0 up, the second of which may be Infinity")
            for limit in (
                [-1, 1], [1, 0.5], [0], [0, None], [0, "1"], 1, [float("inf"), float("inf")],
                [0, float("nan")], [True, 1], {"__float__": "Infinity"},
            )
        ),
    ],
)  # fmt: skip
def test_what_is_not_served_is_refused_by_name(name: str, value: object, allowed: str) -> None:
    with pytest.raises(ConfigError) as error:
        registry.config_from_dict({**mamba2.VALUES, name: value})
    assert error.value.message == f"{name} is {value!r}; allowed: {allowed}"
    assert error.value.param == name


@pytest.mark.parametrize(
    ("told", "cell", "allowed"),
    [
        ({"rms_norm": False}, {}, "True"),
        ({"attn_layer_idx": [1]}, {}, "[], null"),
        ({"attn_cfg": {"num_heads": 4}}, {}, "{}, null"),
        ({"d_intermediate": 64}, {}, "0, null"),
        ({"vocab_size": None}, {}, "an integer from 1 to 16777216"),
        ({"n_layer": 0}, {}, "an integer from 1 to 4096"),
        ({}, {"rmsnorm": False}, "True"),
        ({}, {"norm_before_gate": True}, "False"),
        ({}, {"D_has_hdim": True}, "False"),
        ({}, {"d_ssm": 24}, "null, 48"),
        ({}, {"headdim": 7}, "a divisor of the 48 channels"),
        ({}, {"ngroups": 4}, "divisors of 6 heads"),
        ({}, {"expand": 0}, "a number that makes 1 to 1048576 channels: at most 43690"),
        ({}, {"d_state": 0}, "an integer from 1 to 4096"),
        ({}, {"d_conv": 1}, "an integer from 2 to 256"),
        ({}, {"bias": 1}, "true or false"),
        ({}, {"conv_bias": "no"}, "true or false"),
        ({}, {"dt_limit": [1, 0]}, "two numbers from 0 up, the second of which may be Infinity"),
    ],
)
def test_what_is_not_served_of_mamba_ssm_is_too(
    told: dict[str, Any], cell: dict[str, Any], allowed: str
) -> None:
    values, _ = mamba2.as_mamba_ssm(mamba2.VALUES, mamba2.published_weights(mamba2.VALUES))
    values["ssm_cfg"] |= cell
    ((name, value),) = [*told.items(), *((f"ssm_cfg.{key}", one) for key, one in cell.items())]
    with pytest.raises(ConfigError) as error:
        registry.config_from_dict({**values, **told})
    assert error.value.message == f"{name} is {value!r}; allowed: {allowed}"
    assert error.value.param == name


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("cell", "mamba"),
        ("heads", 0),
        ("head_dim", 2**20),
        ("state_size", 0),
        ("groups", 3),
        ("conv_kernel", 1),
        ("least_dt", -1),
        ("least_dt", None),
        ("most_dt", 0.001),
        ("most_dt", float("inf")),
        ("bias", 1),
    ],
)
def test_own_configs_are_checked(field: str, value: object) -> None:
    good = {"vocab_size": 9, "d_model": 8, "n_layers": 1, "heads": 2, "head_dim": 8}
    good |= {"state_size": 4, "least_dt": 0.01}
    registry.config_from_dict({"family": "mamba2", **good})
    with pytest.raises(ConfigError) as error:
        registry.config_from_dict({"family": "mamba2", **good, field: value})
    assert error.value.param == field
