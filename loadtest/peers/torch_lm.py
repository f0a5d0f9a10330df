"""The decode step of a minserve model in plain PyTorch operators: what users write today."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import cast

import torch
from torch import Tensor
from torch.nn import functional

from engine.models.lm import LM, Layer


def _g(x: Tensor) -> Tensor:
    return torch.where(x >= 0, x + 0.5, x.sigmoid())


def _cell(gates: Tensor, hidden: Tensor, cell: str) -> Tensor:
    """The next state [batch, inner] fp32 from pre-activations [batch, gates * inner]."""
    if cell == "mingru":
        k, v = gates.float().chunk(2, dim=-1)
        return torch.lerp(hidden, _g(v), k.sigmoid())
    f, i, v = gates.float().chunk(3, dim=-1)
    forget = (functional.logsigmoid(f) - functional.logsigmoid(i)).sigmoid()
    return torch.lerp(_g(v), hidden, forget)


def decode_step(model: LM, batch: int) -> Callable[[Tensor], Tensor]:
    """tokens [batch] -> greedy next tokens [batch]; keeps its state between calls."""
    config = model.config
    weight = model.embedding.weight
    hidden = torch.zeros(config.n_layers, batch, config.inner, device=weight.device)
    taps = max(0, config.conv_kernel - 1)
    inputs = torch.zeros(
        config.n_layers, taps, batch, config.d_model, device=weight.device, dtype=weight.dtype
    )

    layers = cast("Iterable[Layer]", model.layers)

    @torch.inference_mode()
    def step(tokens: Tensor) -> Tensor:
        x = functional.embedding(tokens, weight)
        for index, layer in enumerate(layers):
            if layer.conv is not None:
                window = torch.cat((inputs[index], x[None]))  # [kernel, batch, d_model]
                mixed = (window * layer.conv.weight.t()[:, None]).sum(0)
                if layer.conv.bias is not None:
                    mixed = mixed + layer.conv.bias
                inputs[index] = window[1:]
                x = x + layer.conv.pointwise(mixed)
            gates = layer.cell.gates(layer.cell_norm(x))
            hidden[index] = _cell(gates, hidden[index], config.cell)
            x = x + layer.cell.out(hidden[index].to(x.dtype))
            if layer.mlp is not None:
                x = x + layer.mlp(x)
        return model.logits(cast("Tensor", model.norm(x))).argmax(-1)

    return step
