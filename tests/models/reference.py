"""The language model once more, straight from the equations: one token after the other, float64.

Shares no code with engine.models; takes the weights under their checkpoint names.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.models.minrnn.config import MinRnnConfig


def sigmoid(x: Tensor) -> Tensor:
    return 1 / (1 + torch.exp(-x))


def g(x: Tensor) -> Tensor:
    return torch.where(x >= 0, x + 0.5, sigmoid(x))


def gelu(x: Tensor) -> Tensor:
    return x * 0.5 * (1 + torch.erf(x / 2**0.5))


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / torch.sqrt((x * x).mean() + eps) * weight


def logits(config: MinRnnConfig, weights: dict[str, Tensor], tokens: Tensor) -> Tensor:
    """tokens [time] -> [time, vocab_size], float64."""
    w = {name: tensor.detach().double().cpu() for name, tensor in weights.items()}

    def linear(x: Tensor, name: str) -> Tensor:
        y = w[f"{name}.weight"] @ x
        return y + w[f"{name}.bias"] if f"{name}.bias" in w else y

    hidden = []
    for layer in range(config.n_layers):
        initial = w.get(f"layers.{layer}.cell.initial")
        hidden.append(torch.zeros(config.inner).double() if initial is None else g(initial))
    lower_bounds = torch.zeros(config.n_layers, config.inner).double()
    if "lower_bounds" in w:
        shares = torch.exp(w["lower_bounds"]) / torch.exp(w["lower_bounds"]).sum(0)
        lower_bounds = torch.stack([shares[1 : n + 1].sum(0) for n in range(config.n_layers)])
    past = [[torch.zeros(config.d_model).double()] * config.conv_kernel for _ in hidden]
    rows = []
    for token in tokens.tolist():
        x = w["embedding.weight"][token]
        for layer in range(config.n_layers):
            at = f"layers.{layer}"
            if config.conv_kernel:
                past[layer] = [*past[layer][1:], x]
                y = (torch.stack(past[layer], dim=1) * w[f"{at}.conv.weight"]).sum(dim=1)
                y = y + w[f"{at}.conv.bias"] if config.conv_bias else y
                x = x + linear(y, f"{at}.conv.pointwise")
            y = rms_norm(x, w[f"{at}.cell_norm.weight"], config.norm_eps)
            pre = linear(y, f"{at}.cell.gates").split(config.inner)
            candidate = pre[-1] if config.candidate == "linear" else g(pre[-1])
            if config.cell == "mingru":
                forget, take = 1 - sigmoid(pre[0]), sigmoid(pre[0])
            elif config.cell == "hgrn":
                forget = lower_bounds[layer] + (1 - lower_bounds[layer]) * sigmoid(pre[1])
                take, candidate = 1 - forget, pre[0] * sigmoid(pre[0])
            elif config.cell == "sru":
                v_f, v_r = w[f"{at}.cell.weight_c"].split(config.inner)
                b_f, b_r = w[f"{at}.cell.gate_bias"].split(config.inner)
                forget = sigmoid(pre[1] + v_f * hidden[layer] + b_f)
                reset = sigmoid(pre[2] + v_r * hidden[layer] + b_r)
                take, candidate = 1 - forget, pre[0]
            else:
                forget, take = sigmoid(pre[0]), sigmoid(pre[1])
                if config.normalize_gates:
                    forget, take = forget / (forget + take), take / (forget + take)
            hidden[layer] = forget * hidden[layer] + take * candidate
            y = hidden[layer]
            if config.cell == "hgrn":
                y = rms_norm(y, w[f"{at}.cell.norm.weight"], config.norm_eps)
                y = y * pre[2] * sigmoid(pre[2])
            if config.cell == "sru":
                y = reset * y + (1 - reset) * pre[3]
            x = x + (linear(y, f"{at}.cell.out") if config.out_projection else y)
            if config.mlp_ratio:
                y = rms_norm(x, w[f"{at}.mlp.norm.weight"], config.norm_eps)
                x = x + linear(gelu(linear(y, f"{at}.mlp.up")), f"{at}.mlp.down")
        x = rms_norm(x, w["norm.weight"], config.norm_eps)
        head = w["embedding.weight" if config.tie_embeddings else "head.weight"]
        rows.append(head @ x + w["head_bias"] if config.head_bias else head @ x)
    return torch.stack(rows)
