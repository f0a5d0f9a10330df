"""A copy of a quantised LM whose matrices are 16 bits wide, for those who multiply many tokens.

A product of many tokens takes as long in 8 bits as in 16: it is bound by arithmetic, and 8-bit
weights would have to be widened for every one of them.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from engine.models.minrnn.lm import LM
from engine.models.quantize import dequantize
from engine.models.quantized import quantized_matrices

_BLOCK = 2**24  # weights that are widened at once


def widened(model: LM) -> LM:
    """`model`, quantised, with its matrices in the type of its norms, on its device and in
    evaluation mode. What is not quantised is shared.

    A weight is its 8-bit value times its row's scale, rounded.
    """
    config = dataclasses.replace(model.config, quantization=None)
    with torch.device("meta"):
        wide = LM(config)
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
