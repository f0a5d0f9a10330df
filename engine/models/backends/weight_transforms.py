"""What backends make of a model's weights: norms folded into matrices, and 8-bit matrices widened.

Norms of layers whose weights are ones let what reads them read the residual stream. A product of
many tokens takes as long in 8 bits as in 16: it is bound by arithmetic, and 8-bit weights would
have to be widened for every one of them; so those who multiply many tokens have a copy of a
quantised LM whose matrices are 16 bits wide.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import cast

import torch
from torch import Tensor, nn

from engine.models import registry
from engine.models.minrnn.lm import LM, Layer
from engine.models.quantize import dequantize
from engine.models.quantized import quantized_matrices

_BLOCK = 2**24  # weights that are widened at once


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


def widened(model: LM) -> LM:
    """`model`, quantised, with its matrices in the type of its norms, on its device and in
    evaluation mode. What is not quantised is shared.

    A weight is its 8-bit value times its row's scale, rounded.
    """
    config = dataclasses.replace(model.config, quantization=None)
    with torch.device("meta"):
        wide = registry.build(config)
    weights: dict[str, Tensor] = model.state_dict()
    for matrix, scale in quantized_matrices(model).items():
        weights[matrix] = _wide(weights[matrix], weights.pop(scale), model.norm.weight.dtype)
    wide.load_state_dict(weights, assign=True)
    return wide.requires_grad_(False).eval()


def _wide(values: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """[rows, columns], some rows after another: in fp32 all would take twice as much memory."""
    wide = torch.empty(values.shape, dtype=dtype, device=values.device)
    rows = max(1, _BLOCK // max(1, values.shape[1]))
    for to, *of in zip(wide.split(rows), values.split(rows), scale.split(rows), strict=True):
        to.copy_(dequantize(*of))
    return wide


def bytes_of_copy(model: LM) -> int:
    """What `widened` takes of the device's memory."""
    size = model.norm.weight.element_size()
    return size * sum(model.get_parameter(name).numel() for name in quantized_matrices(model))
