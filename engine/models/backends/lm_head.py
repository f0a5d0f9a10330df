"""LmHead: what a model multiplies hidden states with for logits, as GPU kernels want it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from engine.models.minrnn.lm import LM

#: A vocabulary of up to so many tokens is drawn from in no time, and clusters compute its logits
#: with the layers. Of a larger one a head apart reads the weights once for all sequences, and one
#: that finds the best token leaves a draw little to read.
SMALL_VOCABULARY = 1024


@dataclass(frozen=True, slots=True)
class LmHead:
    """A model's head with as many rows as products need: a multiple of 8, the last ones zeros. A
    copy where rows were missing."""

    weight: Tensor  # [rows, d_model]
    scale: Tensor | None  # [rows], where quantised
    bias: Tensor | None  # [rows]

    @classmethod
    def of(cls, model: LM) -> Self:
        module = model.embedding if model.head is None else model.head
        weight: Tensor = module.weight.detach()
        scale: Tensor | None = getattr(module, "scale", None)
        bias: Tensor | None = model.head_bias
        extra = -len(weight) % 8
        if extra:
            raw = weight.view(torch.int8) if weight.element_size() == 1 else weight
            weight = torch.cat([raw, raw.new_zeros(extra, raw.shape[1])]).view(weight.dtype)
            scale = None if scale is None else torch.cat([scale, scale.new_ones(extra)])
            bias = None if bias is None else torch.cat([bias, bias.new_zeros(extra)])
        dtype = model.norm.weight.dtype
        return cls(weight, scale, None if bias is None else bias.detach().to(dtype))
