"""The scan by chunks of sqrt(time) tokens: three multiply-adds a token, a depth of 2 sqrt(time).

1. All chunks step side by side: each token's h from the chunk's start, and the product of a.
2. The chunks' last tokens are finished one after another.
3. Every other token gets its share of the last token of the chunk before, all at once.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from loadtest.peers.textbook.work import Work


def scan(a: Tensor, b: Tensor) -> Tensor:
    """Return h [batch, time, channels]; the last chunk may be shorter."""
    time = b.shape[1]
    chunk = math.isqrt(time)
    product, h = torch.empty_like(a), torch.empty_like(b)
    product[:, ::chunk], h[:, ::chunk] = a[:, ::chunk], b[:, ::chunk]
    for t in range(1, chunk):
        now, before = slice(t, None, chunk), slice(t - 1, None, chunk)
        count = h[:, now].shape[1]
        torch.addcmul(b[:, now], a[:, now], h[:, before][:, :count], out=h[:, now])
        torch.mul(product[:, before][:, :count], a[:, now], out=product[:, now])
    for last in range(2 * chunk - 1, time, chunk):
        h[:, last].addcmul_(product[:, last], h[:, last - chunk])
    full = time // chunk
    if full > 1 and chunk > 1:
        chunks, products = (x[:, : full * chunk].unflatten(1, (full, chunk)) for x in (h, product))
        chunks[:, 1:, :-1].addcmul_(products[:, 1:, :-1], chunks[:, :-1, -1:])
    if rest := time - full * chunk:
        h[:, -rest:].addcmul_(product[:, -rest:], h[:, -rest - 1, None])
    return h


def work(time: int) -> Work:
    """Return what `scan` does for `time` tokens."""
    chunk = math.isqrt(time)
    full, rest = divmod(time, chunk)
    chunks = full + (rest > 0)
    inside = time - chunks  # tokens that follow another one in their chunk
    shared = (full - 1) * (chunk - 1)
    carried = (full - 1) + shared + rest
    accesses = 4 * chunks + 7 * inside + 4 * (full - 1) + 3 * shared + 3 * rest
    accesses += (full - 1 if shared else 0) + (1 if rest else 0)  # the tokens that were carried
    kernels = 2 + 2 * (chunk - 1) + (full - 1) + (1 if shared else 0) + (1 if rest else 0)
    depth = (chunk - 1) + (full - 1) + (1 if shared or rest else 0)
    return Work(2 * inside + carried, 0, accesses, kernels, depth)
