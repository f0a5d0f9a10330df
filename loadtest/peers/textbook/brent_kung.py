"""Brent and Kung's scan: up a tree and down again. Little work, twice Kogge and Stone's depth.

Count tokens from 1. On the way up, the token t = m 2^k (m odd) comes to cover the last 2^k tokens.
On the way down it gets the result of token t - 2^k, which is finished because t - 2^k is divisible
by a higher power of two. Nothing here needs a length that is a power of two: tokens that would lie
behind the end are in no slice.
"""

from __future__ import annotations

from torch import Tensor

from loadtest.peers.textbook.work import Work


def scan(a: Tensor, b: Tensor) -> Tensor:
    """Return h [batch, time, channels], in place on copies of a and b."""
    product, h = a.clone(), b.clone()
    time = b.shape[1]
    distance = 1
    while 2 * distance <= time:
        _combine(product, h, 2 * distance - 1, distance)
        # The products up to the first token are no one's factors, so they are left out.
        into = product[:, 4 * distance - 1 :: 2 * distance]
        into *= product[:, 3 * distance - 1 :: 2 * distance][:, : into.shape[1]]
        distance *= 2
    while distance:
        _combine(product, h, 3 * distance - 1, distance)
        distance //= 2
    return h


def _combine(product: Tensor, h: Tensor, first: int, distance: int) -> None:
    """Combine every 2 * distance-th token from `first` on with the one `distance` before it."""
    into = h[:, first :: 2 * distance]
    before = h[:, first - distance :: 2 * distance][:, : into.shape[1]]
    into.addcmul_(product[:, first :: 2 * distance], before)


def work(time: int) -> Work:
    """Return what `scan` does for `time` tokens."""
    multiply_adds, accesses, kernels, depth = 0, 4 * time, 2, 0
    distance = 1
    while 2 * distance <= time:
        combined = time // (2 * distance)
        multiply_adds += 2 * combined - 1
        accesses += 4 * combined + 3 * (combined - 1)
        kernels += 2 if combined > 1 else 1
        depth += 1
        distance *= 2
    while distance:
        if combined := max(0, (time - distance) // (2 * distance)):
            multiply_adds += combined
            accesses += 4 * combined
            kernels += 1
            depth += 1
        distance //= 2
    return Work(multiply_adds, 0, accesses, kernels, depth)
