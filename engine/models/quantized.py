"""Modules for quantised matrices: QuantLinear and QuantEmbedding, in place of torch's own.

Both have `weight`, 8-bit [rows, columns], and `scale`, fp32 [rows] (engine/models/quantize.py).
They are the reference for faster implementations: a product first converts the whole 8-bit matrix
to the activations' type. That is exact and works on every device, including fp8 on the CPU, but is
slower than an unquantised product.

A model with these modules cannot be trained.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Self

import torch
from torch import Tensor, nn
from torch.nn import functional

from engine.config import ModelConfig, Quantization
from engine.models.quantize import QUANTIZED_DTYPES, NotFiniteError, dequantize, quantize, widen


class _QuantMatrix(nn.Module):
    """`weight` [rows, columns] and `scale` [rows]; zeros and ones until weights are loaded.

    Only the weight is a parameter, so a model has as many parameters as when unquantised.
    """

    scale: Tensor

    def __init__(self, rows: int, columns: int, kind: Quantization) -> None:
        super().__init__()
        self.weight = nn.Parameter(
            torch.zeros(rows, columns, dtype=QUANTIZED_DTYPES[kind]), requires_grad=False
        )
        self.register_buffer("scale", torch.ones(rows, dtype=torch.float32))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Move to another device, but keep the types of weight and scale.

        `model.to(dtype)` also calls this; its dtype is meant for the rest of the model.
        """
        weight, scale = self.weight.data, self.scale
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if self.weight.dtype != weight.dtype:
            self.weight.data = weight.to(self.weight.device)
        if self.scale.dtype != scale.dtype:
            self.scale = scale.to(self.scale.device)
        return self

    def product(self, x: Tensor) -> Tensor:
        """Multiply x [..., columns] by the transposed matrix; return fp32 [..., rows].

        The 8-bit values are exact in every type of x. Products are summed in fp32 and scaled once,
        so the only error is the rounding of the sums.
        """
        if x.is_cuda and x.dtype != torch.float32:
            rows = x.flatten(0, -2)  # [n, columns]
            sums = torch.mm(rows, self.weight.to(x.dtype).t(), out_dtype=torch.float32)
            sums = sums.view(*x.shape[:-1], -1)
        else:
            sums = functional.linear(x.float(), widen(self.weight))
        return sums * self.scale


class QuantLinear(_QuantMatrix):
    """torch.nn.Linear with a quantised matrix: x [..., inputs] -> [..., outputs] in x's type.

    `bias` [outputs] (or None) has the type of the model's other weights.
    """

    def __init__(self, inputs: int, outputs: int, bias: bool, kind: Quantization) -> None:
        super().__init__(outputs, inputs, kind)
        self.bias = nn.Parameter(torch.zeros(outputs), requires_grad=False) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """Compute the linear map of x [..., inputs]."""
        y = self.product(x)
        return (y if self.bias is None else y + self.bias).to(x.dtype)


class QuantEmbedding(_QuantMatrix):
    """torch.nn.Embedding with a quantised table, one scale per token; also the head if tied."""

    def forward(self, tokens: Tensor, dtype: torch.dtype) -> Tensor:
        """Look up tokens [...] int32 or int64; return [..., columns] in `dtype`."""
        flat = tokens.flatten()
        # As bytes, because torch cannot gather fp8 rows on some devices.
        values = self.weight.view(torch.int8).index_select(0, flat).view(self.weight.dtype)
        rows = dequantize(values, self.scale.index_select(0, flat))
        return rows.to(dtype).view(*tokens.shape, -1)


def linear(
    config: ModelConfig, inputs: int, outputs: int, *, bias: bool
) -> nn.Linear | QuantLinear:
    """Return the linear map for a model of this config: torch.nn.Linear or QuantLinear."""
    if config.quantization is None:
        return nn.Linear(inputs, outputs, bias=bias)
    return QuantLinear(inputs, outputs, bias, config.quantization)


def quantized_matrices(model: nn.Module) -> dict[str, str]:
    """Return the state-dict names of the model's quantised weights, each with its scale's name."""
    return {
        f"{name}.weight": f"{name}.scale"
        for name, module in model.named_modules()
        if isinstance(module, _QuantMatrix)
    }


def quantize_weights(
    weights: Iterable[tuple[str, Tensor]], matrices: dict[str, str], kind: Quantization
) -> Iterator[tuple[str, Tensor]]:
    """Convert the named tensors of an unquantised model to those of the quantised one, one by one.

    `matrices` are the `quantized_matrices` of the latter. Raises NotFiniteError, naming the tensor,
    if a weight is not finite.
    """
    for name, tensor in weights:
        if name not in matrices:
            yield name, tensor
            continue
        try:
            values, scale = quantize(tensor, kind)
        except NotFiniteError as error:
            raise NotFiniteError(f"tensor {name!r} {error}") from error
        yield name, values
        yield matrices[name], scale
