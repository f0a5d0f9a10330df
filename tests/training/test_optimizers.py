"""What decays and what Muon orthogonalises, of families that `minserve train` does not make."""

from __future__ import annotations

import pytest
import torch

from engine.config import ModelConfig
from engine.models import registry
from engine.models.mamba.config import MambaConfig
from engine.models.mamba2.config import Mamba2Config
from engine.training.optimizers import optimizers_of
from engine.training.recipe import Recipe

SHAPE = {"vocab_size": 9, "d_model": 8, "n_layers": 1, "state_size": 4}


@pytest.mark.parametrize(
    ("config", "products"),
    [
        (MambaConfig(**SHAPE, inner=8, dt_rank=2), {"in_proj", "x_proj", "dt_proj", "out_proj"}),
        (Mamba2Config(**SHAPE, heads=2, head_dim=8), {"in_proj", "out_proj"}),
    ],
    ids=["mamba", "mamba2"],
)
def test_what_mamba_s_recurrence_is_made_of_neither_decays_nor_is_orthogonalised(
    config: ModelConfig, products: set[str]
) -> None:
    model = registry.build(config)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    recipe = Recipe(optimizer="muon", weight_decay=0.3)
    adamw, muon = optimizers_of(model, recipe, torch.device("cpu"))

    def named(group: dict[str, list[torch.Tensor]]) -> set[str]:
        return {names[id(parameter)] for parameter in group["params"]}

    matrices, vectors = adamw.param_groups
    (orthogonal,) = muon.param_groups
    assert named(orthogonal) == {f"layers.0.{name}.weight" for name in products}
    assert named(matrices) == {"embedding.weight", "head.weight"}
    assert (matrices["weight_decay"], vectors["weight_decay"]) == (0.3, 0.0)
    assert named(vectors) == set(names.values()) - named(orthogonal) - named(matrices)
    assert {"layers.0.A_log", "layers.0.D", "layers.0.conv", "layers.0.conv_bias"} < named(vectors)
