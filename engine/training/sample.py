"""Samples a model's text, as token ids, for a checkpoint's README."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.models.language_model import LanguageModel


@torch.inference_mode()
def sample_ids(
    model: LanguageModel, prompt: Tensor, count: int, *, temperature: float, seed: int
) -> Tensor:
    """Sample `count` ids [count] after prompt [tokens] from the softmax at a temperature."""
    device = prompt.device
    generator = torch.Generator(device).manual_seed(seed)
    state = model.new_state(1)
    slots = torch.zeros(1, dtype=torch.int32, device=device)
    bounds = torch.tensor([0, prompt.numel()], dtype=torch.int32, device=device)
    hidden = model.prefill(prompt.int(), bounds, state, slots)[-1:]  # [1, d_model]
    drawn = []
    for _ in range(count):
        odds = (model.logits(hidden).float() / temperature).softmax(-1)
        token = torch.multinomial(odds[0], 1, generator=generator)  # [1]
        drawn.append(token)
        hidden = model.step(token.int(), state, slots)
    return torch.cat(drawn)
