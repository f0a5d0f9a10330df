"""Which models kernels take: the reason where they do not."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from engine.models import registry
from engine.models.backends import cluster_decode, cpu, cublas, fused_gemm, persistent_decode
from engine.models.backends.blocks import compile_blocks, lower_bounds, refusal
from engine.models.backends.cpu import CpuBackend
from engine.models.backends.eager import EagerBackend
from engine.models.backends.fused_gemm import supports_widths
from engine.models.backends.selector import select_backend
from engine.models.hgrn.config import HgrnConfig
from engine.models.minrnn.config import MinRnnConfig
from engine.models.minrnn.lm import LM
from engine.models.program import (
    Conv,
    Elementwise,
    GatedNorm,
    Linear,
    Norm,
    Recurrence,
    Residual,
    Stage,
)
from tests.models.variants import blocks_of

CONFIG = MinRnnConfig(cell="mingru", vocab_size=66, d_model=384, n_layers=1)
CPU = torch.device("cpu")
REFUSAL = "cell 'other', but its kernels have only mingru and minlstm"


def of_another_cell() -> LM:
    """A model of a recurrence that kernels do not have, with as many gates as one of theirs."""
    model = LM(CONFIG).eval()
    for layer in model.layers:
        layer.cell.recurrence = dataclasses.replace(layer.cell.recurrence, cell="other")
    return model


def test_no_kernel_takes_a_cell_for_another() -> None:
    model = of_another_cell()
    assert cpu.supports(LM(CONFIG)) is None
    of_cpu = REFUSAL.replace(" and minlstm", ", minlstm, hgrn, mamba, mamba2, gru and lstm")
    assert cpu.supports(model) == of_cpu
    with pytest.raises(ValueError, match="other"):
        CpuBackend(model)
    assert isinstance(select_backend(model, CPU), EagerBackend)


@pytest.mark.gpu
def test_no_kernel_on_a_gpu_takes_a_cell_for_another() -> None:
    cuda, model = torch.device("cuda"), of_another_cell().to("cuda", torch.bfloat16)
    assert cluster_decode.supports(model, cuda) == REFUSAL
    for path in (fused_gemm, cublas, persistent_decode):
        assert path.supports(model, cuda) == REFUSAL.replace(" and minlstm", ", minlstm and hgrn")
    served = select_backend(model, cuda)
    assert isinstance(served, EagerBackend)
    assert [path.name for path in served.paths] == ["torch"]


@pytest.mark.gpu
def test_which_kernels_take_hgrn() -> None:
    cuda = torch.device("cuda")
    config = HgrnConfig(vocab_size=66, d_model=384, n_layers=1, inner=384, mlp_hidden=512)
    model = registry.build(config).to("cuda", torch.bfloat16)
    assert cluster_decode.supports(model, cuda) == REFUSAL.replace("other", "hgrn")
    for path in (fused_gemm, cublas, persistent_decode):
        assert path.supports(model, cuda) is None
        convolved = registry.build(dataclasses.replace(config, conv_kernel=4))
        reason = path.supports(convolved.to("cuda", torch.bfloat16), cuda)
        assert reason == "convolutions between gates and recurrence"


def test_kernels_for_gpus_say_that_there_is_none() -> None:
    model = LM(CONFIG).bfloat16()
    for path in (fused_gemm, cublas, persistent_decode, cluster_decode):
        assert path.supports(model, CPU) == "not on a GPU"


@pytest.mark.parametrize(
    ("changes", "taken"),
    [
        ({}, True),
        ({"vocab_size": 65_535 * 128}, True),
        ({"vocab_size": 65_535 * 128 + 1}, False),
        ({"d_model": 200}, False),
    ],
)
def test_widths_that_kernels_can_cut(changes: dict[str, int], taken: bool) -> None:
    assert supports_widths(blocks_of(dataclasses.replace(CONFIG, **changes))) is taken


@pytest.mark.parametrize(("inner", "hidden", "taken"), [(64, 72, True), (72, 72, False)])
def test_widths_behind_an_output_gate(inner: int, hidden: int, taken: bool) -> None:
    with torch.device("meta"):
        model = registry.build(
            HgrnConfig(vocab_size=9, d_model=64, n_layers=1, inner=inner, mlp_hidden=hidden)
        )
    assert supports_widths(compile_blocks(model)) is taken


def test_an_output_gate_comes_with_its_norm(monkeypatch: pytest.MonkeyPatch) -> None:
    config = HgrnConfig(vocab_size=9, d_model=8, n_layers=1, inner=8, mlp_hidden=8)
    model = registry.build(config)
    assert refusal(model, cublas.SUPPORT) is None
    whole = model.program()
    layers = [[one for one in layer if not isinstance(one, GatedNorm)] for layer in whole.layers]
    without = dataclasses.replace(whole, layers=tuple(map(tuple, layers)))
    monkeypatch.setattr(model, "program", lambda: without)
    assert refusal(model, cublas.SUPPORT) == "cell 'hgrn' without a gated norm"


def _other_norm(eps: float) -> Norm:
    return Norm(torch.nn.RMSNorm(8, eps=eps))


def _other_linear(rows: int, bias: bool = False) -> Linear:
    return Linear(torch.nn.Linear(8, rows, bias=bias))


# stages of one layer of HGRN: Norm, Linear, Recurrence, GatedNorm, Linear, Residual, Norm, Linear,
# Elementwise, Linear, Residual
@pytest.mark.parametrize(
    ("at", "stages", "reason"),
    [
        (slice(0, 1), [_other_norm(0.5)], "norms of different epsilons"),
        (slice(3, 4), [GatedNorm(torch.nn.RMSNorm(8))], "norms of different epsilons"),
        (slice(6, 7), [_other_norm(0.5)], "norms of different epsilons"),
        (slice(1, 2), [_other_linear(12 * 3)], "layers differ in the recurrence's channels"),
        (slice(1, 2), [_other_linear(8 * 3, bias=True)], "layers differ in biases"),
        (slice(2, 3), [Recurrence("hgrn", "other")], "layers differ in the recurrence"),
        (slice(4, 5), [], "layers differ in the out projection"),
        (slice(6, 11), [], "layers differ in the MLP"),
        (slice(8, 9), [Elementwise("gelu")], "layers differ in the MLP"),
        (
            slice(2, 2),
            [Conv(torch.nn.Parameter(torch.ones(8, 4)), None, "i_conv")],
            "layers differ in the convolutions behind the gates",
        ),
        (
            slice(0, 0),
            [
                Conv(torch.nn.Parameter(torch.ones(8, 4)), None, "conv"),
                _other_linear(8),
                Residual(),
            ],
            "layers differ in the convolution before the norm",
        ),
    ],
)
def test_a_layer_unlike_the_first_is_refused(
    monkeypatch: pytest.MonkeyPatch, at: slice, stages: list[Stage], reason: str
) -> None:
    config = HgrnConfig(vocab_size=9, d_model=8, n_layers=2, inner=8, mlp_hidden=8)
    model = registry.build(config)
    assert refusal(model, cpu.SUPPORT) is None
    whole = model.program()
    last = list(whole.layers[1])
    last[at] = stages
    unlike = dataclasses.replace(whole, layers=(whole.layers[0], tuple(last)))
    monkeypatch.setattr(model, "program", lambda: unlike)
    assert refusal(model, cpu.SUPPORT) == reason
    assert cpu.supports(model) == reason


def test_a_last_norm_of_another_epsilon_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = LM(CONFIG)
    other = dataclasses.replace(model.program(), norm=torch.nn.RMSNorm(384, eps=0.5))
    monkeypatch.setattr(model, "program", lambda: other)
    assert refusal(model, cluster_decode.SUPPORT) == "norms of different epsilons"


def test_lower_bounds_are_those_of_the_weights() -> None:
    config = HgrnConfig(vocab_size=9, d_model=8, n_layers=3, inner=8, mlp_hidden=8)
    model = registry.build(config)
    raw = model.get_parameter("lower_bounds")
    torch.nn.init.normal_(raw, generator=torch.Generator().manual_seed(1))
    model.bfloat16()
    bounds = lower_bounds(compile_blocks(model).blocks)
    shares = raw.detach().double().softmax(0)
    for layer, bound in enumerate(bounds):
        assert bound is not None and bound.dtype == torch.float32 and not bound.requires_grad
        expected = shares[1 : layer + 1].sum(0)
        torch.testing.assert_close(bound.double(), expected, rtol=1e-5, atol=1e-6)
    without = registry.build(dataclasses.replace(config, lower_bounds=False))
    assert lower_bounds(compile_blocks(without).blocks) == [None] * 3
