"""Mamba-2 once more, straight from the equations, under published names.

Shares no code with engine.models: float64, the recurrence one token after the other.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from tests.models.mamba import Weights, convolve, rms_norm, silu

# config.json of a small model, as transformers writes it
VALUES: dict[str, Any] = {
    "architectures": ["Mamba2ForCausalLM"],
    "model_type": "mamba2",
    "bos_token_id": 0,
    "chunk_size": 256,
    "conv_kernel": 4,
    "dtype": "float32",
    "eos_token_id": 2,
    "expand": 2,
    "head_dim": 8,
    "hidden_act": "silu",
    "hidden_size": 24,
    "initializer_range": 0.1,
    "layer_norm_epsilon": 1e-5,
    "n_groups": 1,
    "num_heads": 6,
    "num_hidden_layers": 3,
    "pad_token_id": 1,
    "rescale_prenorm_residual": False,
    "residual_in_fp32": True,
    "state_size": 16,
    "tie_word_embeddings": False,
    "time_step_floor": 1e-4,
    "time_step_limit": [0.0, {"__float__": "Infinity"}],
    "time_step_max": 0.1,
    "time_step_min": 1e-3,
    "time_step_rank": 2,
    "use_bias": False,
    "use_cache": True,
    "use_conv_bias": True,
    "vocab_size": 61,
}
# Codestral-Mamba's own fields
CODESTRAL: dict[str, Any] = {
    "n_groups": 3,
    "intermediate_size": 48,
    "norm_before_gate": True,
    "rms_norm": True,
    "time_step_limit": [0.0, math.inf],
    "time_step_init_scheme": "random",
    "time_step_scale": 1.0,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "groups": CODESTRAL,
    "limits, tied": {
        "time_step_limit": [0.05, 0.25], "tie_word_embeddings": True, "layer_norm_epsilon": 1e-3,
    },
    "other sizes": {
        "use_bias": True, "use_conv_bias": False, "conv_kernel": 2, "expand": 1, "head_dim": 3,
        "num_heads": 8, "n_groups": 2, "state_size": 5,
    },
}  # fmt: skip


def published_weights(values: dict[str, Any], seed: int = 0) -> Weights:
    """Random weights, every one of which matters."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    def matrix(*shape: int) -> Tensor:
        return normal(*shape) * shape[-1] ** -0.5

    width, heads = values["hidden_size"], values["num_heads"]
    inner = heads * values["head_dim"]
    convolved = inner + 2 * values["n_groups"] * values["state_size"]
    tied = values["tie_word_embeddings"]
    weights = {
        "backbone.embeddings.weight": matrix(values["vocab_size"], width) * (3 if tied else 5)
    }
    for layer in range(values["num_hidden_layers"]):
        at = f"backbone.layers.{layer}"
        mixer = {
            "in_proj.weight": matrix(inner + convolved + heads, width),
            "conv1d.weight": 1.5 * matrix(convolved, 1, values["conv_kernel"]),
            "dt_bias": normal(heads) - 2,
            "A_log": torch.linspace(1, 16, heads).log() + 0.3 * normal(heads),
            "D": 1 + 0.3 * normal(heads),
            "norm.weight": 1 + 0.3 * normal(inner),
            "out_proj.weight": matrix(width, inner),
        }
        if values["use_conv_bias"]:
            mixer["conv1d.bias"] = 0.3 * normal(convolved)
        if values["use_bias"]:
            mixer["in_proj.bias"] = 0.3 * normal(inner + convolved + heads)
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
    """The same model as mamba_ssm writes it."""
    least, most = limit_of(values)
    config = {
        "d_model": values["hidden_size"],
        "d_intermediate": 0,
        "n_layer": values["num_hidden_layers"],
        "vocab_size": values["vocab_size"],
        "ssm_cfg": {
            "layer": "Mamba2",
            "d_state": values["state_size"],
            "d_conv": values["conv_kernel"],
            "expand": values["expand"],
            "headdim": values["head_dim"],
            "ngroups": values["n_groups"],
            "A_init_range": [1, 16],
            "dt_limit": [least, most],
            "bias": values["use_bias"],
            "conv_bias": values["use_conv_bias"],
            "chunk_size": 256,
        },
        "attn_layer_idx": [],
        "attn_cfg": {},
        "rms_norm": True,
        "residual_in_fp32": values["residual_in_fp32"],
        "fused_add_norm": True,
        "pad_vocab_size_multiple": 1,
        "tie_embeddings": values["tie_word_embeddings"],
        **told,
    }
    renamed = dict(weights)
    renamed["backbone.embedding.weight"] = renamed.pop("backbone.embeddings.weight")
    if values["tie_word_embeddings"]:
        renamed["lm_head.weight"] = renamed["backbone.embedding.weight"]
    return config, renamed


def limit_of(values: dict[str, Any]) -> tuple[float, float]:
    least, most = values["time_step_limit"]
    return least, math.inf if isinstance(most, dict) else most


def logits(values: dict[str, Any], weights: Weights, tokens: Tensor) -> Tensor:
    """tokens [time] -> [time, vocab_size], float64."""
    w = {name: tensor.double() for name, tensor in weights.items()}
    eps, heads, states = values["layer_norm_epsilon"], values["num_heads"], values["state_size"]
    groups, inner = values["n_groups"], heads * values["head_dim"]
    residual = w["backbone.embeddings.weight"][tokens.long()]
    for layer in range(values["num_hidden_layers"]):
        at = f"backbone.layers.{layer}.mixer"
        pre = rms_norm(residual, eps) * w[f"backbone.layers.{layer}.norm.weight"]
        pre = pre @ w[f"{at}.in_proj.weight"].T + w.get(f"{at}.in_proj.bias", 0)
        z, dt = pre[:, :inner], pre[:, -heads:]
        x = convolve(pre[:, inner:-heads], w[f"{at}.conv1d.weight"])
        x = silu(x + w.get(f"{at}.conv1d.bias", 0))
        x, b, c = x.split([inner, groups * states, groups * states], dim=1)
        x = x.reshape(-1, heads, values["head_dim"])
        b, c = (
            one.reshape(-1, groups, 1, states)
            .expand(-1, -1, heads // groups, -1)
            .reshape(-1, heads, 1, states)
            for one in (b, c)
        )
        dt = torch.log1p(torch.exp(dt + w[f"{at}.dt_bias"])).clamp(*limit_of(values))
        kept = torch.exp(-torch.exp(w[f"{at}.A_log"]) * dt)
        s, rows = x.new_zeros(heads, values["head_dim"], states), []
        for t in range(len(x)):
            s = kept[t, :, None, None] * s + (dt[t, :, None] * x[t]).unsqueeze(2) * b[t]
            rows.append((s * c[t]).sum(2))
        y = torch.stack(rows) + w[f"{at}.D"][:, None] * x
        y = (y.reshape(len(x), inner) * silu(z)).reshape(len(x), groups, -1)
        y = rms_norm(y, eps).reshape(len(x), inner) * w[f"{at}.norm.weight"]
        residual = residual + y @ w[f"{at}.out_proj.weight"].T + w.get(f"{at}.out_proj.bias", 0)
    head = "backbone.embeddings" if values["tie_word_embeddings"] else "lm_head"
    return rms_norm(residual, eps) * w["backbone.norm_f.weight"] @ w[f"{head}.weight"].T
