"""Heinsen's two scans (arXiv 2311.06281): in log space, by two prefix sums of torch's.

With A_t = log a_1 + ... + log a_t, h_t = exp(A_t + log(exp(log b_1 - A_1) + ... + exp(log b_t -
A_t))). The first form takes positive numbers. The second takes the logarithms of negative ones as
complex numbers, log(-x) = log x + i pi, and so takes any but zeros.

A_t grows with t, and its rounding error is a relative error of h: 4,096 tokens with a of 1e-4 reach
-38,000, where float32 numbers lie 0.004 apart. With a = 0 the result is not a number.
"""

from __future__ import annotations

import torch
from torch import Tensor

from loadtest.peers.textbook.work import Work, tree_depth


def positive(a: Tensor, b: Tensor, dim: int = 1) -> Tensor:
    """Return h over dimension `dim`, for positive a and b."""
    sums = a.log().cumsum(dim)
    return (sums + (b.log() - sums).logcumsumexp(dim)).exp()


def general(a: Tensor, b: Tensor, dim: int = 1) -> Tensor:
    """Return h over dimension `dim`, for a and b of either sign; two-byte types by complex64."""
    dtype = torch.complex128 if a.dtype == torch.float64 else torch.complex64
    return positive(a.to(dtype), b.to(dtype), dim).real.to(a.dtype)


def positive_work(time: int) -> Work:
    """Return what `positive` does for `time` tokens.

    A prefix sum counts one sum for each token and has the depth of a tree, as in the paper. On a
    CPU, and over another dimension than the last, torch's prefix sums walk and have depth `time`.
    """
    return Work(4 * time, 5 * time, 16 * time, 7, 2 * tree_depth(time) + 4)


def general_work(time: int) -> Work:
    """Return what `general` does for `time` tokens in float32: the same with complex numbers."""
    real = positive_work(time)
    return Work(
        2 * real.multiply_adds,
        2 * real.functions,
        2 * real.accesses + 6 * time,
        real.kernels + 2,
        real.depth + 1,
    )
