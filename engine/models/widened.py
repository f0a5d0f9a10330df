"""A copy of a quantised LM whose matrices are 16 bits wide, for those who multiply many tokens.

A product of many tokens takes as long in 8 bits as in 16: it is bound by arithmetic, and 8-bit
weights would have to be widened for every one of them.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from engine.models.lm import LM
from engine.models.quantized import quantized_matrices
from engine.quantization import dequantize


def widened(model: LM) -> LM:
    """`model`, quantised, with its matrices in the type of its norms, on its device and in
    evaluation mode. What is not quantised is shared.

    A weight is its 8-bit value times its row's scale, rounded: by at most 2^-9 of it in bfloat16,
    a quarter of what int8's own rounding does to a matrix.
    """
    config = dataclasses.replace(model.config, quantization=None)
    with torch.device("meta"):
        wide = LM(config)
    weights: dict[str, Tensor] = model.state_dict()
    for matrix, scale in quantized_matrices(model).items():
        values = dequantize(weights[matrix], weights.pop(scale))
        weights[matrix] = values.to(model.norm.weight.dtype)
    wide.load_state_dict(weights, assign=True)
    return wide.requires_grad_(False).eval()


def bytes_of_copy(model: LM) -> int:
    """What `widened` takes of the device's memory."""
    size = model.norm.weight.element_size()
    return size * sum(model.get_parameter(name).numel() for name in quantized_matrices(model))
