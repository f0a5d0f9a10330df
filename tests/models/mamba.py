"""Mamba and Falcon-Mamba once more, straight from the equations, under published names.

Shares no code with engine.models: float64, the recurrence one token after the other.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

Weights = dict[str, Tensor]

# config.json of a small model, as transformers writes it
VALUES: dict[str, Any] = {
    "architectures": ["MambaForCausalLM"],
    "model_type": "mamba",
    "bos_token_id": 0,
    "conv_kernel": 4,
    "dtype": "float32",
    "eos_token_id": 2,
    "expand": 2,
    "hidden_act": "silu",
    "hidden_size": 24,
    "initializer_range": 0.1,
    "intermediate_size": 48,
    "layer_norm_epsilon": 1e-5,
    "num_hidden_layers": 3,
    "pad_token_id": 0,
    "rescale_prenorm_residual": False,
    "residual_in_fp32": True,
    "state_size": 16,
    "tie_word_embeddings": True,
    "time_step_rank": 2,
    "use_bias": False,
    "use_cache": True,
    "use_conv_bias": True,
    "use_mambapy": False,
    "vocab_size": 61,
}
FALCON: dict[str, Any] = {
    "architectures": ["FalconMambaForCausalLM"],
    "model_type": "falcon_mamba",
    "mixer_rms_eps": 1e-6,
    "tie_word_embeddings": False,
    "expand": 16,  # as published: intermediate_size is what holds
}
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "untied": {"tie_word_embeddings": False, "layer_norm_epsilon": 1e-3},
    "biases": {"use_bias": True, "use_conv_bias": False, "conv_kernel": 2},
    "other sizes": {"intermediate_size": 40, "state_size": 5, "time_step_rank": 7},
    "falcon": FALCON,
    "falcon, one layer": {**FALCON, "num_hidden_layers": 1, "mixer_rms_eps": 1e-2},
}


def published_weights(values: dict[str, Any], seed: int = 0) -> Weights:
    """Random weights, every one of which matters."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    def matrix(*shape: int) -> Tensor:
        return normal(*shape) * shape[-1] ** -0.5

    width, inner = values["hidden_size"], values["intermediate_size"]
    states, rank = values["state_size"], values["time_step_rank"]
    tied = values["tie_word_embeddings"]
    weights = {
        "backbone.embeddings.weight": matrix(values["vocab_size"], width) * (3 if tied else 5)
    }
    for layer in range(values["num_hidden_layers"]):
        at = f"backbone.layers.{layer}"
        mixer = {
            "in_proj.weight": matrix(2 * inner, width),
            "conv1d.weight": 1.5 * matrix(inner, 1, values["conv_kernel"]),
            "x_proj.weight": matrix(rank + 2 * states, inner),
            "dt_proj.weight": matrix(inner, rank),
            "dt_proj.bias": normal(inner) - 2,
            "A_log": torch.arange(1, states + 1).log() + 0.3 * normal(inner, states),
            "D": 1 + 0.3 * normal(inner),
            "out_proj.weight": matrix(width, inner),
        }
        if values["use_conv_bias"]:
            mixer["conv1d.bias"] = 0.3 * normal(inner)
        if values["use_bias"]:
            mixer["in_proj.bias"] = 0.3 * normal(2 * inner)
            mixer["out_proj.bias"] = 0.3 * normal(width)
        weights[f"{at}.norm.weight"] = 1 + 0.3 * normal(width)
        weights |= {f"{at}.mixer.{name}": tensor for name, tensor in mixer.items()}
    weights["backbone.norm_f.weight"] = 1 + 0.3 * normal(width)
    if not tied:
        weights["lm_head.weight"] = 3 * matrix(values["vocab_size"], width)
    return weights


def as_mamba_ssm(
    values: dict[str, Any], weights: Weights, **told: Any
) -> tuple[dict[str, Any], Weights]:
    """The same model as mamba_ssm writes it: it stores a tied head, too."""
    cell = {
        "d_state": values["state_size"],
        "d_conv": values["conv_kernel"],
        "expand": values["intermediate_size"] / values["hidden_size"],
        "dt_rank": values["time_step_rank"],
        "bias": values["use_bias"],
        "conv_bias": values["use_conv_bias"],
    }
    config = {
        "d_model": values["hidden_size"],
        "n_layer": values["num_hidden_layers"],
        "vocab_size": values["vocab_size"],
        "ssm_cfg": cell,
        "rms_norm": True,
        "residual_in_fp32": values["residual_in_fp32"],
        "fused_add_norm": True,
        "pad_vocab_size_multiple": 1,
        "tie_embeddings": values["tie_word_embeddings"],
        **told,
    }
    table = weights["backbone.embeddings.weight"]
    renamed = {"backbone.embedding.weight": table, "lm_head.weight": table} | {
        name: tensor for name, tensor in weights.items() if name != "backbone.embeddings.weight"
    }
    return config, renamed


def silu(x: Tensor) -> Tensor:
    return x / (1 + torch.exp(-x))


def rms_norm(x: Tensor, eps: float) -> Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps)


def convolve(x: Tensor, taps: Tensor) -> Tensor:
    """x [time, channels], taps [channels, 1, K]; zeros before the first token."""
    count = taps.shape[2]
    padded = torch.cat([x.new_zeros(count - 1, x.shape[1]), x])
    return sum(  # type: ignore[return-value]
        padded[k : k + len(x)] * taps[:, 0, k] for k in range(count)
    )


def logits(values: dict[str, Any], weights: Weights, tokens: Tensor) -> Tensor:
    """tokens [time] -> [time, vocab_size], float64."""
    w = {name: tensor.double() for name, tensor in weights.items()}
    eps, inner = values["layer_norm_epsilon"], values["intermediate_size"]
    states, rank = values["state_size"], values["time_step_rank"]
    residual = w["backbone.embeddings.weight"][tokens.long()]
    for layer in range(values["num_hidden_layers"]):
        at = f"backbone.layers.{layer}.mixer"
        pre = rms_norm(residual, eps) * w[f"backbone.layers.{layer}.norm.weight"]
        pre = pre @ w[f"{at}.in_proj.weight"].T + w.get(f"{at}.in_proj.bias", 0)
        x = convolve(pre[:, :inner], w[f"{at}.conv1d.weight"]) + w.get(f"{at}.conv1d.bias", 0)
        x, z = silu(x), pre[:, inner:]
        parts = (x @ w[f"{at}.x_proj.weight"].T).split([rank, states, states], dim=1)
        if "mixer_rms_eps" in values:
            parts = tuple(rms_norm(part, values["mixer_rms_eps"]) for part in parts)
        dt, b, c = parts
        dt = torch.log1p(torch.exp(dt @ w[f"{at}.dt_proj.weight"].T + w[f"{at}.dt_proj.bias"]))
        a, h, rows = -torch.exp(w[f"{at}.A_log"]), x.new_zeros(inner, states), []
        for t in range(len(x)):
            h = torch.exp(dt[t, :, None] * a) * h + dt[t, :, None] * b[t] * x[t, :, None]
            rows.append(h @ c[t])
        y = (torch.stack(rows) + w[f"{at}.D"] * x) * silu(z)
        y = y @ w[f"{at}.out_proj.weight"].T + w.get(f"{at}.out_proj.bias", 0)
        residual = residual + y
    head = "backbone.embeddings" if values["tie_word_embeddings"] else "lm_head"
    return rms_norm(residual, eps) * w["backbone.norm_f.weight"] @ w[f"{head}.weight"].T
