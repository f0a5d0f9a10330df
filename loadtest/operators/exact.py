"""float64 references, over all tokens of a few channels.

`exact_scan` cuts time into about sqrt(time) blocks that step side by side, and then carries each
block's last state into the next: the same recurrence in float64, in 2 sqrt(time) steps instead of
time, so that a million tokens can be checked in every run.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from loadtest.operators.shapes import ScanShape

CHANNELS = 16
TAIL = 1024  # the last tokens, whose error is looked at on its own


def channel_sample(channels: int, device: torch.device) -> Tensor:
    """Return up to CHANNELS indices spread over all channels, with the first and the last."""
    count = min(CHANNELS, channels)
    return torch.linspace(0, channels - 1, count, device=device).round().long()


def exact_scan(a: Tensor, b: Tensor) -> Tensor:
    """Return h_t = a_t h_{t-1} + b_t from h = 0, for float64 [batch, time, channels]."""
    batch, time, channels = a.shape
    block = max(1, math.isqrt(time))
    blocks = -(-time // block)
    padding = (0, 0, 0, blocks * block - time)
    a = torch.nn.functional.pad(a, padding).view(batch, blocks, block, channels)
    b = torch.nn.functional.pad(b, padding).view(batch, blocks, block, channels)
    h, product = torch.empty_like(b), torch.empty_like(a)
    h[:, :, 0], product[:, :, 0] = b[:, :, 0], a[:, :, 0]
    for t in range(1, block):
        torch.addcmul(b[:, :, t], a[:, :, t], h[:, :, t - 1], out=h[:, :, t])
        torch.mul(product[:, :, t - 1], a[:, :, t], out=product[:, :, t])
    for index in range(1, blocks):
        h[:, index] += product[:, index] * h[:, index - 1, -1:]
    return h.view(batch, blocks * block, channels)[:, :time]


def exact_scan_backward(a: Tensor, h: Tensor, grad_h: Tensor) -> tuple[Tensor, Tensor]:
    """Return (grad_a, grad_b) of `exact_scan`.

    grad_b runs backwards in time: grad_b_t = grad_h_t + a_{t+1} grad_b_{t+1}, and grad_a_t =
    grad_b_t h_{t-1}.
    """
    next_a = torch.nn.functional.pad(a[:, 1:], (0, 0, 0, 1))
    grad_b = exact_scan(next_a.flip(1), grad_h.flip(1)).flip(1)
    before = torch.nn.functional.pad(h[:, :-1], (0, 0, 1, 0))
    return grad_b * before, grad_b


def unpack(x: Tensor, shape: ScanShape) -> Tensor:
    """Return packed [tokens, channels] as [sequences, longest, channels], padded with zeros."""
    longest = max(shape.lengths)
    if not shape.packed:
        return x.reshape(len(shape.lengths), longest, -1)
    lengths = torch.tensor(shape.lengths, device=x.device)
    inside = torch.arange(longest, device=x.device) < lengths[:, None]  # [sequences, longest]
    padded = x.new_zeros(*inside.shape, x.shape[1])
    padded[inside] = x
    return padded


def largest_error(found: Tensor, exact: Tensor) -> float:
    """Return the largest difference over the standard deviation of `exact`; NaN if any is."""
    return float((found.double() - exact).abs().max() / exact.std())


def relative_error(found: Tensor, exact: Tensor) -> float:
    """Return the relative 2-norm of found - exact for [batch, time, channels].

    It is that of everything or of the last TAIL tokens, whichever is larger; infinite if the exact
    part is zero and the found one is not.
    """
    worst = 0.0
    for part in (slice(None), slice(-TAIL, None)):
        difference = float((found[:, part].double() - exact[:, part]).norm())
        size = float(exact[:, part].norm())
        error = difference / size if size else (0.0 if difference == 0 else math.inf)
        worst = error if math.isnan(error) else max(worst, error)
    return worst
