"""HGRN once more, straight from the equations, under the names of flash-linear-attention's folders.

Shares no code with engine.models: float64, the recurrence one token after the other.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

Weights = dict[str, Tensor]

# config.json of a small model, as that project writes it
VALUES: dict[str, Any] = {
    "architectures": ["HGRNForCausalLM"],
    "model_type": "hgrn",
    "attn": None,
    "attn_mode": "fused_recurrent",
    "conv_size": 4,
    "elementwise_affine": True,
    "eos_token_id": 2,
    "expand_ratio": 1,
    "fuse_norm": True,
    "fuse_swiglu": True,
    "hidden_act": "swish",
    "hidden_ratio": 4,
    "hidden_size": 24,
    "intermediate_size": 40,
    "norm_eps": 1e-6,
    "num_hidden_layers": 3,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "use_lower_bound": True,
    "use_short_conv": False,
    "vocab_size": 61,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "no lower bounds": {"use_lower_bound": False},
    "short convolutions": {"use_short_conv": True},
    "convolutions of 2, expanded": {"use_short_conv": True, "conv_size": 2, "expand_ratio": 1.5},
    "tied": {"tie_word_embeddings": True, "expand_ratio": 2, "norm_eps": 1e-3},
    "gate and up in one": {"old_mlp": True},
    "one layer": {"num_hidden_layers": 1},
}


def published_weights(values: dict[str, Any], seed: int = 0) -> Weights:
    """Random weights, every one of which matters; `old_mlp`: gate and up are one matrix."""
    generator = torch.Generator().manual_seed(seed)

    def matrix(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator) * shape[-1] ** -0.5

    def norm(channels: int) -> Tensor:
        return 1 + 0.3 * torch.randn(channels, generator=generator)

    width, hidden = values["hidden_size"], values["intermediate_size"]
    inner, layers = int(width * values["expand_ratio"]), values["num_hidden_layers"]
    weights = {"model.embeddings.weight": matrix(values["vocab_size"], width) * width**0.5}
    if values["use_lower_bound"]:
        weights["model.lower_bounds"] = torch.randn((layers, inner), generator=generator)
    for layer in range(layers):
        at = f"model.layers.{layer}"
        weights[f"{at}.attn_norm.weight"] = norm(width)
        for one in "ifg":
            weights[f"{at}.attn.{one}_proj.weight"] = 2 * matrix(inner, width)
        if values["use_short_conv"]:
            for one in "if":
                weights[f"{at}.attn.{one}_conv1d.weight"] = matrix(inner, 1, values["conv_size"])
        weights[f"{at}.attn.g_norm.weight"] = norm(inner)
        weights[f"{at}.attn.o_proj.weight"] = matrix(width, inner)
        weights[f"{at}.mlp_norm.weight"] = norm(width)
        gate, up = 2 * matrix(hidden, width), matrix(hidden, width)
        if values.get("old_mlp"):
            weights[f"{at}.mlp.gate_proj.weight"] = torch.cat([gate, up])
        else:
            weights[f"{at}.mlp.gate_proj.weight"] = gate
            weights[f"{at}.mlp.up_proj.weight"] = up
        weights[f"{at}.mlp.down_proj.weight"] = matrix(width, hidden)
    weights["model.norm.weight"] = norm(width)
    if not values["tie_word_embeddings"]:
        weights["lm_head.weight"] = 3 * matrix(values["vocab_size"], width)
    return weights


def _silu(x: Tensor) -> Tensor:
    return x / (1 + torch.exp(-x))


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * weight


def _convolve(x: Tensor, taps: Tensor) -> Tensor:
    """x [time, channels], taps [channels, 1, K]; zeros before the first token."""
    count = taps.shape[2]
    padded = torch.cat([x.new_zeros(count - 1, x.shape[1]), x])
    return sum(  # type: ignore[return-value]
        padded[k : k + len(x)] * taps[:, 0, k] for k in range(count)
    )


def logits(values: dict[str, Any], weights: Weights, tokens: Tensor) -> Tensor:
    """tokens [time] -> [time, vocab_size], float64."""
    w = {name: tensor.double() for name, tensor in weights.items()}
    eps = values["norm_eps"]
    lower_bounds = None
    if values["use_lower_bound"]:
        shares = torch.exp(w["model.lower_bounds"])
        shares = shares / shares.sum(0)
        lower_bounds = [shares[1 : layer + 1].sum(0) for layer in range(len(shares))]
    x = w["model.embeddings.weight"][tokens.long()]
    for layer in range(values["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        y = _rms_norm(x, w[f"{at}.attn_norm.weight"], eps)
        i, f, g = (y @ w[f"{at}.attn.{one}_proj.weight"].T for one in "ifg")
        if values["use_short_conv"]:
            i = _convolve(i, w[f"{at}.attn.i_conv1d.weight"])
            f = _convolve(f, w[f"{at}.attn.f_conv1d.weight"])
        f = 1 / (1 + torch.exp(-f))
        if lower_bounds is not None:
            f = lower_bounds[layer] + (1 - lower_bounds[layer]) * f
        h, rows = torch.zeros_like(i[0]), []
        for f_t, i_t in zip(f, i, strict=True):
            h = f_t * h + (1 - f_t) * _silu(i_t)
            rows.append(h)
        o = _rms_norm(torch.stack(rows), w[f"{at}.attn.g_norm.weight"], eps) * _silu(g)
        x = x + o @ w[f"{at}.attn.o_proj.weight"].T
        y = _rms_norm(x, w[f"{at}.mlp_norm.weight"], eps)
        gate = y @ w[f"{at}.mlp.gate_proj.weight"].T
        if values.get("old_mlp"):
            gate, up = gate.split(values["intermediate_size"], dim=1)
        else:
            up = y @ w[f"{at}.mlp.up_proj.weight"].T
        x = x + (_silu(gate) * up) @ w[f"{at}.mlp.down_proj.weight"].T
    head = "model.embeddings.weight" if values["tie_word_embeddings"] else "lm_head.weight"
    return _rms_norm(x, w["model.norm.weight"], eps) @ w[head].T
