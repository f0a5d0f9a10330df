"""The optimizers of a run: AdamW for all weights, or Muon for the layers' matrices and AdamW else.

AdamW: arXiv 1711.05101. Muon: momentum, orthogonalised by Newton-Schulz iterations (K. Jordan et
al., 2024), scaled to AdamW's update size (arXiv 2502.16982), so that both take one learning rate.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.optim import Optimizer

from engine.models.language_model import LanguageModel
from engine.training.recipe import Recipe


def optimizers_of(model: LanguageModel, recipe: Recipe, device: torch.device) -> list[Optimizer]:
    """Make the recipe's optimizers. Weight decay is for matrices alone.

    Biases, gains, initial states, parameters that have a vector of each layer, and what a family
    names (Mamba's A and convolutions) do not decay.
    """
    matrices: list[Tensor] = []
    vectors: list[Tensor] = []
    hidden: list[Tensor] = []  # matrices of the layers: products of their inputs
    for name, parameter in model.named_parameters():
        no_matrix = name in model.vectors_of_layers or name.endswith(model.no_matrices)
        if parameter.ndim < 2 or no_matrix:
            vectors.append(parameter)
        elif recipe.optimizer == "muon" and _is_product(name):
            hidden.append(parameter)
        else:
            matrices.append(parameter)
    found: list[Optimizer] = [
        torch.optim.AdamW(
            [
                {"params": matrices, "weight_decay": recipe.weight_decay},
                {"params": vectors, "weight_decay": 0.0},
            ],
            lr=recipe.learning_rate,
            betas=(recipe.beta1, recipe.beta2),
            fused=True if device.type == "cuda" else None,
        )
    ]
    if hidden:
        found.append(
            torch.optim.Muon(
                hidden,
                lr=recipe.learning_rate,
                weight_decay=recipe.weight_decay,
                adjust_lr_fn="match_rms_adamw",
            )
        )
    return found


def _is_product(name: str) -> bool:
    """Tell whether a matrix is one of a layer's products; a convolution's taps are none."""
    return name.startswith("layers.") and not name.endswith("conv.weight")
