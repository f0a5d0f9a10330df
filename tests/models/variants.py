"""The models that the tests go over: every cell, with each option on and off."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from engine.config import ModelConfig
from engine.models import registry
from engine.models.backends.blocks import BlockModel, compile_blocks
from engine.models.minrnn.config import MinRnnConfig
from engine.models.minrnn.lm import LM

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]

_OPTIONS: dict[str, dict[str, object]] = {
    "plain": {},
    "conv": {"conv_kernel": 4},
    "conv-of-2-without-bias": {"conv_kernel": 2, "conv_bias": False},
    "biases": {"cell_bias": True, "out_bias": True, "head_bias": True},
    "initial-state": {"learned_initial_state": True, "conv_kernel": 3},
    "linear-candidate": {"candidate": "linear", "learned_initial_state": True},
    "tied": {"tie_embeddings": True, "mlp_bias": False},
    "no-mlp": {"mlp_ratio": 0.0, "conv_kernel": 3},
    "expansion-1": {"expansion": 1.0, "out_projection": False, "mlp_ratio": 1.5},
}
# Options that each take a path of their own with HGRN's cell; the others run with the slow tests.
_QUICK_WITH_HGRN = ("plain", "conv", "biases")
VARIANTS = [
    *(
        pytest.param({"cell": cell, **options}, id=f"{cell}-{name}")
        for cell in ("mingru", "minlstm")
        for name, options in _OPTIONS.items()
    ),
    pytest.param(
        {"cell": "minlstm", "normalize_gates": False, "conv_kernel": 3}, id="minlstm-own-gates"
    ),
    *(
        pytest.param(
            {"cell": "hgrn", **options},
            id=f"hgrn-{name}",
            marks=() if name in _QUICK_WITH_HGRN else pytest.mark.slow,
        )
        for name, options in _OPTIONS.items()
        if "candidate" not in options
    ),
    pytest.param({"cell": "hgrn", "lower_bounds": False}, id="hgrn-no-lower-bounds"),
    pytest.param({"cell": "sru", "conv_kernel": 3}, id="sru-conv"),
    pytest.param({"cell": "sru", **_OPTIONS["biases"]}, id="sru-biases"),
    pytest.param({"cell": "sru", **_OPTIONS["expansion-1"]}, id="sru-expansion-1"),
    pytest.param(
        {"cell": "sru", "learned_initial_state": True, "tie_embeddings": True},
        id="sru-initial-state",
    ),
]

# The models that csrc/cpu_model computes.
PACKED_VARIANTS = [one for one in VARIANTS if one.values[0]["cell"] != "sru"]


def config_of(options: dict[str, object]) -> MinRnnConfig:
    values = {"vocab_size": 29, "d_model": 20, "n_layers": 2, "expansion": 1.5, **options}
    return MinRnnConfig(**values)  # type: ignore[arg-type]


def build(options: dict[str, object], device: str = "cpu", seed: int = 0) -> LM:
    """A random model whose every parameter matters: norms' weights and biases are not their
    initial ones and zeros."""
    torch.manual_seed(seed)
    model = LM(config_of(options)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or name.endswith(("bias", "lower_bounds")):
                parameter.add_(0.3 * torch.randn_like(parameter))
    return model.to(device)


def int32(values: list[int], device: str = "cpu") -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def relative_error(got: Tensor, expected: Tensor) -> float:
    """The largest difference, in units of the largest expected magnitude."""
    got, expected = got.detach().double().cpu(), expected.detach().double().cpu()
    return float((got - expected).abs().max() / expected.abs().max())


def blocks_of(config: ModelConfig) -> BlockModel:
    """Return the blocks of a model without memory for its weights."""
    with torch.device("meta"):
        return compile_blocks(registry.build(config))
