"""Kogge and Stone's scan, also Hillis and Steele's: the least depth, and log2(time) times the work.

After the step of distance d, a token's pair (product of a, h) covers the last 2 d tokens. In the
next step every token is combined with the one 2 d before it. Any length will do: a token without
one that far before it is finished.
"""

from __future__ import annotations

import torch
from torch import Tensor

from loadtest.peers.textbook.work import Work, tree_depth


def scan(a: Tensor, b: Tensor) -> Tensor:
    """Return h [batch, time, channels] in log2(time) steps, each from one buffer into another."""
    time = b.shape[1]
    if time == 1:
        return b.clone()
    product, h = a, b
    spare_products = [torch.empty_like(a) for _ in range(min(2, tree_depth(time) - 1))]
    spares = [torch.empty_like(b) for _ in range(min(2, tree_depth(time)))]
    distance = 1
    while distance < time:
        into = spares[0]
        into[:, :distance] = h[:, :distance]
        torch.addcmul(
            h[:, distance:],
            product[:, distance:],
            h[:, :-distance],
            out=into[:, distance:],
        )
        spares.reverse()
        h = into
        far = 2 * distance
        if far < time:  # the product up to the first token is no one's factor, so it is left out
            torch.mul(
                product[:, far:],
                product[:, distance:-distance],
                out=spare_products[0][:, far:],
            )
            product = spare_products[0]
            spare_products.reverse()
        distance = far
    return h


def work(time: int) -> Work:
    """Return what `scan` does for `time` tokens."""
    if time == 1:
        return Work(0, 0, 2, 1, 0)
    multiply_adds = accesses = kernels = 0
    distance = 1
    while distance < time:
        combined, products = time - distance, max(0, time - 2 * distance)
        multiply_adds += combined + products
        accesses += 2 * distance + 4 * combined + 3 * products
        kernels += 3 if products else 2
        distance *= 2
    return Work(multiply_adds, 0, accesses, kernels, tree_depth(time))
