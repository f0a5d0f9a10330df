"""Norms of layers whose weights are ones, so that what reads them may read the residual stream."""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

import torch
from torch import nn

from engine.models.minrnn.lm import LM, Layer


@torch.no_grad()
def move_norm_weights(model: LM) -> None:
    """Into the matrices that read the norms of its layers, which keep ones: RMSNorm(x) W^T =
    (x / rms) (weight * W)^T. What the model computes stays the same but for the rounding of these
    matrices, as do tensors that it had: other models may share them. Waits for the device."""
    for layer in cast("Iterable[Layer]", model.layers):
        _move(layer.cell_norm, cast("nn.Linear", layer.cell.gates))
        if layer.mlp is not None:
            _move(layer.mlp.norm, cast("nn.Linear", layer.mlp.up))
    device = model.norm.weight.device
    if device.type == "cuda":
        # Kernels may read weights before the one ahead on the stream has ended.
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()  # of the matrices that were replaced


def _move(norm: nn.RMSNorm, reader: nn.Linear) -> None:
    if bool((norm.weight != 1).any()):
        reader.weight = nn.Parameter(reader.weight * norm.weight, requires_grad=False)
        norm.weight = nn.Parameter(torch.ones_like(norm.weight), requires_grad=False)
