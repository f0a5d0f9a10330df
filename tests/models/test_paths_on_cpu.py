"""The paths of several kernels per layer compute what the model does, on the CPU: their operators
for GPUs are replaced by the references of these."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.config import ModelConfig
from engine.models import registry
from engine.models.backends import cublas, fused_gemm, selective, state_space_layers
from engine.models.backends.autotune import TunedProducts
from engine.models.backends.cublas import CublasPath
from engine.models.backends.fused_gemm import FusedGemmPath
from engine.models.backends.lm_head import LmHead
from engine.models.backends.selective import LibraryProducts, SelectiveLayers, by_linear_map
from engine.models.backends.selector import explain_backend
from engine.models.backends.ssd_layers import SsdLayers
from engine.models.backends.state_space_layers import StateSpaceLayers
from engine.models.backends.tuning_cache import TuningCache
from engine.models.backends.weight_transforms import move_norm_weights
from engine.models.hgrn.config import HgrnConfig
from engine.models.language_model import LanguageModel
from engine.models.mamba.config import MambaConfig
from engine.models.mamba2.config import Mamba2Config
from engine.models.minrnn.config import MinRnnConfig
from engine.ops import conv_step, fused_norm, gemm, library
from engine.ops.selective import selected_step_reference
from tests.models.variants import int32, relative_error

_OURS = MinRnnConfig(
    cell="mingru",
    vocab_size=29,
    d_model=64,
    n_layers=2,
    cell_bias=True,
    out_bias=True,
    head_bias=True,
)
_HGRN = HgrnConfig(vocab_size=29, d_model=64, n_layers=3, inner=128, mlp_hidden=72)
CONFIGS: dict[str, ModelConfig] = {
    "mingru": dataclasses.replace(_OURS, conv_kernel=4),
    "minlstm": dataclasses.replace(_OURS, cell="minlstm", mlp_ratio=0.0),
    "hgrn-in-our-block": dataclasses.replace(_OURS, cell="hgrn", conv_kernel=3),
    "hgrn": _HGRN,
    "hgrn-without-bounds": dataclasses.replace(_HGRN, lower_bounds=False),
}


def build(config: ModelConfig) -> LanguageModel:
    """The same model at every call; none of its parameters is without effect."""
    torch.manual_seed(1)
    model = registry.build(config).eval().requires_grad_(False)
    for name, parameter in model.named_parameters():
        if "norm" in name or name.endswith(("bias", "lower_bounds")):
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model


def _norm_inputs(x: Tensor, weight: Tensor | None, squares: bool) -> tuple[Tensor, Tensor]:
    if weight is not None:
        return gemm.norm_inputs(x, weight)
    scaled, sums = gemm.norm_inputs(x, torch.ones(x.shape[1]))
    return scaled[:0], sums if squares else sums[:0]


def _linear_map(
    x: Tensor,
    squares: Tensor | None,
    eps: float,
    weight: Tensor,
    bias: Tensor | None = None,
    gelu: bool = False,
    logits: bool = False,
    fixed_order: bool = False,
) -> Tensor:
    return gemm.linear_map_reference(x, squares, eps, weight, bias, gelu).float()


def _linear_swiglu(
    x: Tensor,
    squares: Tensor | None,
    eps: float,
    weight: Tensor,
    bias: Tensor | None,
    fixed_order: bool,
) -> Tensor:
    return gemm.linear_swiglu_reference(x, squares, eps, weight, bias).float()


def _linear_residual(
    y: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    x: Tensor,
    norm_weight: Tensor | None,
    fixed_order: bool = False,
    ahead: Tensor | None = None,
    squares: bool = False,
    y_squares: Tensor | None = None,
    eps: float = 0.0,
) -> tuple[Tensor, Tensor]:
    x.copy_(gemm.linear_residual_reference(y, weight, bias, x, y_squares, eps))
    results = _norm_inputs(x, norm_weight, squares)
    if ahead is not None:
        x += ahead
    return results


def _linear_step(
    x: Tensor,
    squares: Tensor | None,
    eps: float,
    weight: Tensor,
    bias: Tensor | None,
    state: Tensor,
    slots: Tensor,
    cell: str,
    linear_candidate: bool,
    normalize_gates: bool,
    fixed_order: bool,
    lower_bound: Tensor | None,
) -> tuple[Tensor, Tensor]:
    given = x, squares, eps, weight, bias, state, slots, cell, linear_candidate, normalize_gates
    out, sums, after = gemm.linear_step_reference(*given, lower_bound)
    state.copy_(after)
    return out.float(), sums.float()


def _linear_embed(
    tokens: Tensor, table: Tensor, norm_weight: Tensor | None, squares: bool
) -> tuple[Tensor, Tensor, Tensor]:
    x = table[tokens.long()]
    return x, *_norm_inputs(x, norm_weight, squares)


def _rms_norm(x: Tensor, eps: float, weight: Tensor) -> Tensor:
    return fused_norm.rms_norm_reference(x, eps, weight).float()


def _normed_gelu(
    x: Tensor, eps: float, y: Tensor, bias: Tensor | None, ahead: Tensor | None
) -> None:
    for given, new in zip((y, x), fused_norm.gelu_reference(x, eps, y, bias, ahead), strict=True):
        given.copy_(new)


def _normed_swiglu(
    x: Tensor, eps: float, y: Tensor, bias: Tensor | None, ahead: Tensor | None
) -> Tensor:
    scale = (x.double().square().mean(1, keepdim=True) + eps).rsqrt()
    out = fused_norm.swiglu_reference(y * scale + (0 if bias is None else bias))
    if ahead is not None:
        x += ahead
    return out.float()


def _normed_step(
    x: Tensor,
    eps: float,
    y: Tensor,
    bias: Tensor | None,
    ahead: Tensor | None,
    state: Tensor,
    slots: Tensor,
    cell: str,
    linear_candidate: bool,
    normalize_gates: bool,
    lower_bound: Tensor | None,
) -> Tensor:
    given = x, eps, y, bias, state, slots, cell, linear_candidate, normalize_gates
    out, after = fused_norm.step_reference(*given, lower_bound)
    state.copy_(after)
    if ahead is not None:
        x += ahead
    return out.float()


@pytest.fixture
def _references(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, operators in (
        (
            fused_gemm,
            {
                "linear_map": _linear_map,
                "linear_swiglu": _linear_swiglu,
                "linear_residual_": _linear_residual,
                "linear_step": _linear_step,
                "linear_embed": _linear_embed,
                "rms_norm": _rms_norm,
            },
        ),
        (
            cublas,
            {
                "rms_norm": _rms_norm,
                "normed_gelu_": _normed_gelu,
                "normed_swiglu_": _normed_swiglu,
                "normed_step_": _normed_step,
            },
        ),
    ):
        for name, operator in operators.items():
            monkeypatch.setattr(module, name, operator)
    # torch's product with a float32 result is for CUDA alone.
    monkeypatch.setattr(TunedProducts, "single", lambda self, x, weight: x @ weight.t())


@pytest.mark.usefixtures("_references")
@pytest.mark.parametrize("path", ["chain", "chain in a fixed order", "products", "around a middle"])
@pytest.mark.parametrize("name", CONFIGS)
@torch.no_grad()
def test_paths_compute_what_the_model_does(name: str, path: str) -> None:
    config = CONFIGS[name]
    plain, model = build(config), build(config)
    move_norm_weights(model)
    chain = FusedGemmPath(model, LmHead.of(model), fixed_order=path == "chain in a fixed order")
    products = CublasPath(model, LmHead.of(model))
    middle = chain.middle if path == "around a middle" else None
    bounds, slots = int32([0, 5, 5, 14, 15]), int32([3, 0, 1, 5])
    prompt = torch.randint(29, (15,), dtype=torch.int32)
    ours, theirs = model.new_state(6), plain.new_state(6)
    if path.startswith("chain"):
        hidden = chain.prefill_to_hidden(prompt, bounds, ours, slots)
    else:
        hidden = products.prefill(prompt, bounds, ours, slots, middle)
    expected = plain.prefill(prompt, bounds, theirs, slots)
    assert relative_error(products.logits(hidden), plain.logits(expected)) < 1e-5
    for _ in range(2):
        tokens = torch.randint(29, (4,), dtype=torch.int32)
        if path.startswith("chain"):
            logits = chain.step_to_logits(tokens, ours, slots)
        else:
            logits = products.logits(products.step(tokens, ours, slots, middle))
        assert relative_error(logits, plain.logits(plain.step(tokens, theirs, slots))) < 1e-5
    for state, tensor in theirs.named.items():
        assert relative_error(ours[state], tensor) < 1e-5


_MAMBA2 = Mamba2Config(
    vocab_size=29, d_model=64, n_layers=3, heads=8, head_dim=16, state_size=12, groups=2, bias=True
)
_MAMBA = MambaConfig(
    vocab_size=29, d_model=64, n_layers=3, inner=128, state_size=16, dt_rank=8, bias=True
)
MAMBAS = {
    "mamba": _MAMBA,
    "narrow residual stream": dataclasses.replace(_MAMBA, residual_in_fp32=False, bias=False),
    "falcon-mamba": dataclasses.replace(
        _MAMBA, selection_norm_eps=1e-6, conv_bias=False, tie_embeddings=True
    ),
    "mamba-2": _MAMBA2,
    "limited time steps": dataclasses.replace(
        _MAMBA2, groups=1, least_dt=0.01, most_dt=0.5, bias=False, conv_bias=False
    ),
}


def _added_rms_norm(x: Tensor, y: Tensor | None, eps: float, weight: Tensor) -> Tensor:
    normed, total = fused_norm.added_norm_reference(x, y, eps, weight)
    x.copy_(total)
    return normed.float()


def _selected_step(*given: object) -> Tensor:
    y, after = selected_step_reference(*given)  # type: ignore[arg-type]
    given[7].copy_(after)  # type: ignore[attr-defined]
    return y.float()


def _linear_convolve(
    x: Tensor,
    squares: Tensor | None,
    eps: float,
    weight: Tensor,
    bias: Tensor | None,
    filter: Tensor,
    filter_bias: Tensor | None,
    state: Tensor,
    slots: Tensor,
    first: int,
) -> tuple[Tensor, Tensor]:
    y = _linear_map(x, squares, eps, weight, bias)
    inputs = y[:, first : first + len(filter)]
    convolved = conv_step(inputs, filter, filter_bias, state, slots, silu=True)
    inputs.fill_(torch.nan)  # they are not written
    return y, convolved


@pytest.mark.parametrize("products", ["library", "linear maps", "folded"])
@pytest.mark.parametrize("name", MAMBAS)
@torch.no_grad()
def test_mamba_with_kernels_between_products_computes_what_the_model_does(
    name: str, products: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state_space_layers, "added_rms_norm_", _added_rms_norm)
    for operator, reference in (("selected_step", _selected_step), ("linear_map", _linear_map)):
        monkeypatch.setattr(selective, operator, reference)
    monkeypatch.setattr(state_space_layers, "linear_map", _linear_map)
    monkeypatch.setattr(state_space_layers, "linear_convolve", _linear_convolve)
    monkeypatch.setattr(state_space_layers, "linear_residual_", _linear_residual)
    model = build(MAMBAS[name])
    assert selective.refuses_widths(model) is None
    layers: StateSpaceLayers
    layers = SsdLayers(model) if model.config.cell == "mamba2" else SelectiveLayers(model)
    library = LibraryProducts(model, layers, LmHead.of(model), TuningCache())
    product = library.product if products == "library" else by_linear_map
    bounds, slots = int32([0, 5, 5, 14, 15]), int32([3, 0, 1, 5])
    prompt = torch.randint(29, (15,), dtype=torch.int32)
    ours, theirs = model.new_state(6), model.new_state(6)
    hidden = layers.prefill(product, prompt, bounds, ours, slots)
    assert relative_error(hidden, model.prefill(prompt, bounds, theirs, slots)) < 1e-5
    for _ in range(2):
        tokens = torch.randint(29, (4,), dtype=torch.int32)
        if products == "folded":
            assert layers.folds
            hidden = layers.folded_step(tokens, ours, slots)
        else:
            hidden = layers.step(product, tokens, ours, slots)
        assert relative_error(hidden, model.step(tokens, theirs, slots)) < 1e-5
    for state, tensor in theirs.named.items():
        assert relative_error(ours[state], tensor) < 1e-5


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"heads": 12}, "widths do not meet"),  # 2 inner + 2 groups states + heads
        ({"d_model": 60}, "widths do not meet"),
        ({"groups": 4, "head_dim": 2}, "widths do not meet"),
        ({"state_size": 1028}, "more than 1024 states"),
        ({"quantization": "int8"}, "weights are int8"),
    ],
)
def test_other_mamba_2s_are_refused_by_what_they_are(
    changes: dict[str, Any], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reason is told where a model is explained for a GPU, too."""
    monkeypatch.setattr(library, "has_cuda_kernels", lambda: True)
    with torch.device("meta"):
        model = registry.build(dataclasses.replace(_MAMBA2, **changes)).bfloat16()
    assert (selective.refuses_widths(model) or "").startswith(reason)
    (told,) = (
        path for path in explain_backend(model, torch.device("cuda")).paths
        if path.name == selective.BACKEND
    )  # fmt: skip
    assert not told.used and (told.reason or "").startswith(reason)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"dt_rank": 12}, "widths do not meet"),
        ({"state_size": 8}, "widths do not meet"),
        ({"inner": 100}, "widths do not meet"),
        ({"quantization": "int8"}, "weights are int8"),
    ],
)
def test_other_mambas_are_refused_by_what_they_are(changes: dict[str, Any], reason: str) -> None:
    with torch.device("meta"):
        model = registry.build(dataclasses.replace(_MAMBA, **changes))
    assert (selective.refuses_widths(model) or "").startswith(reason)
