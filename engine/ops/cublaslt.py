"""product_algorithms and product_: matrix products of torch's library by an algorithm of choice.

torch leaves the choice to cuBLAS. What the algorithms of its sibling cuBLASLt are for a product,
and one of them by itself, cannot be had from torch's own operators.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.ops import library  # noqa: F401  (registers the operators)


def product_algorithms(x: Tensor, weight: Tensor, out: Tensor) -> Tensor:
    """The ways in which cuBLASLt can compute `product_(out, x, weight, ...)`, its first choice
    first: int64 [n, 8] on the CPU, a row each, in the library's own words: up to eight proposals
    that need no workspace, and each without a cluster of blocks. None where torch has loaded no
    cuBLASLt or that has none for such a product, and of no tokens.

    Args:
        x: [tokens, inputs], bfloat16 or float16.
        weight: [rows, inputs], of x's dtype.
        out: [tokens, rows], of x's dtype or float32. Nothing is read or written.

    All are contiguous, and they and their rows begin at multiples of 16 bytes.

    Raises:
        RuntimeError: shapes, dtypes or devices do not fit; NotImplementedError on the CPU.
    """
    found: Tensor = torch.ops.minserve.product_algorithms(x, weight, out)
    return found


def product_(
    out: Tensor, x: Tensor, weight: Tensor, algorithm: Tensor, *, add: bool = False
) -> None:
    """out = x weight^T, or, with `add`, out += x weight^T; sums in float32.

    Args:
        out, x, weight: as product_algorithms's; out is **changed in place**.
        algorithm: int64 [8], a row of product_algorithms for tensors of these shapes and dtypes.

    Raises:
        RuntimeError: shapes, dtypes or devices do not fit, or the algorithm does not;
            NotImplementedError on the CPU.
    """
    torch.ops.minserve.product_(out, x, weight, algorithm, add)


def reference(out: Tensor, x: Tensor, weight: Tensor, *, add: bool = False) -> Tensor:
    """product_ in float64 and functional."""
    product = x.double() @ weight.double().t()
    return product + out.double() if add else product


def _fake_algorithms(x: Tensor, weight: Tensor, out: Tensor) -> Tensor:
    count = torch.library.get_ctx().new_dynamic_size()
    return torch.empty(count, 8, dtype=torch.int64, device="cpu")


def _fake_product(
    out: Tensor, x: Tensor, weight: Tensor, algorithm: Tensor, add: bool = False
) -> None:
    return None


torch.library.register_fake("minserve::product_algorithms", _fake_algorithms)
torch.library.register_fake("minserve::product_", _fake_product)
