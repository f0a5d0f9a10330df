"""Rows of logits, and what is true of them, token by token."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def logits_with_ties(rows: int, vocab: int, device: str) -> Tensor:
    """Rounded to halves, so that every row holds many equal logits."""
    generator = torch.Generator().manual_seed(rows * vocab)
    return (torch.randn(rows, vocab, generator=generator) * 6).round().div(2).to(device)


def column(values: list[float], device: str, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.tensor(values, dtype=dtype, device=device).unsqueeze(-1)


def order(row: list[float]) -> list[int]:
    """Ids, best first, equal ones by lowest id."""
    return sorted(range(len(row)), key=lambda id: (-row[id], id))


def probabilities(row: list[float]) -> list[float]:
    best = max(row)
    weights = [math.exp(value - best) for value in row]
    return [weight / sum(weights) for weight in weights]
