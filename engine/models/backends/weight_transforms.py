"""Transformations of a model's weights: folds norms into matrices, and widens 8-bit matrices.

With norm weights of 1, the matrix after a norm can read the residual stream itself. A product of
many tokens takes as long in 8 bits as in 16, because it is bound by arithmetic, and would convert
the 8-bit weights every time. Backends that multiply many tokens therefore keep a copy of a
quantised LM with 16-bit matrices.
"""

from __future__ import annotations

import dataclasses
from typing import cast

import torch
from torch import Tensor, nn

from engine.models import registry
from engine.models.backends.blocks import compile_blocks
from engine.models.language_model import LanguageModel
from engine.models.quantize import dequantize
from engine.models.quantized import quantized_matrices

_BLOCK = 2**24  # weights converted at once


@torch.no_grad()
def move_norm_weights(model: LanguageModel) -> None:
    """Fold the weights of layers' norms into the matrices that read them, and set them to 1.

    RMSNorm(x) W^T = (x / rms) (weight * W)^T, and likewise with a gate behind the norm. The model
    computes the same except for the rounding of these matrices. The previous tensors are not
    modified, since other models may share them. Waits for the device.
    """
    for block in compile_blocks(model).blocks:
        _move(block.norm, cast("nn.Linear", block.gates))
        if block.gated_norm is not None and block.out is not None:
            _move(block.gated_norm, cast("nn.Linear", block.out))
        if block.mlp is not None:
            _move(block.mlp.norm, cast("nn.Linear", block.mlp.up))
    device = model.device
    if device.type == "cuda":
        # Kernels may prefetch weights before the previous kernel on the stream has ended.
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()  # memory of the replaced matrices


def _move(norm: nn.RMSNorm, reader: nn.Linear) -> None:
    if bool((norm.weight != 1).any()):
        reader.weight = nn.Parameter(reader.weight * norm.weight, requires_grad=False)
        norm.weight = nn.Parameter(torch.ones_like(norm.weight), requires_grad=False)


def widened(model: LanguageModel) -> LanguageModel:
    """Return a copy of a quantised model with matrices in the type of its activations.

    It is on the same device, in evaluation mode; tensors that are not quantised are shared. A
    weight is its 8-bit value times its row's scale, rounded.
    """
    config = dataclasses.replace(model.config, quantization=None)
    with torch.device("meta"):
        wide = registry.build(config)
    weights: dict[str, Tensor] = model.state_dict()
    for matrix, scale in quantized_matrices(model).items():
        weights[matrix] = _wide(weights[matrix], weights.pop(scale), model.activations)
    wide.load_state_dict(weights, assign=True)
    return wide.requires_grad_(False).eval()


def _wide(values: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the matrix [rows, columns], converted in blocks to save memory for the fp32 copy."""
    wide = torch.empty(values.shape, dtype=dtype, device=values.device)
    rows = max(1, _BLOCK // max(1, values.shape[1]))
    for to, *of in zip(wide.split(rows), values.split(rows), scale.split(rows), strict=True):
        to.copy_(dequantize(*of))
    return wide


def bytes_of_copy(model: LanguageModel) -> int:
    """Return the bytes of device memory that `widened` needs."""
    size = model.activations.itemsize
    return size * sum(model.get_parameter(name).numel() for name in quantized_matrices(model))
