"""product_algorithms and product_: matrix products with a chosen cuBLASLt algorithm.

torch leaves the choice to cuBLAS, and offers no operator that lists the algorithms of cuBLASLt or
runs a given one.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.ops import library  # noqa: F401  (registers the operators)


def product_algorithms(x: Tensor, weight: Tensor, out: Tensor) -> Tensor:
    """Return the algorithms with which cuBLASLt can compute `product_(out, x, weight, ...)`.

    Args:
        x: [tokens, inputs], bfloat16 or float16.
        weight: [rows, inputs], of x's dtype.
        out: [tokens, rows], of x's dtype or float32. Nothing is read or written.

    All are contiguous, and they and their rows are aligned to 16 bytes.

    Returns:
        int64 [n, 8] on the CPU, one opaque row per algorithm, the library's first choice first: up
        to eight proposals that need no workspace, and each again without a cluster of blocks. Empty
        if torch has loaded no cuBLASLt, if that has no algorithm for the product, or without
        tokens.

    Raises:
        RuntimeError: shapes, dtypes or devices do not fit; NotImplementedError on the CPU.
    """
    found: Tensor = torch.ops.minserve.product_algorithms(x, weight, out)
    return found


def product_(
    out: Tensor, x: Tensor, weight: Tensor, algorithm: Tensor, *, add: bool = False
) -> None:
    """Compute out = x weight^T or, with `add`, out += x weight^T; sums are float32.

    Args:
        out, x, weight: as for product_algorithms; out is **changed in place**.
        algorithm: int64 [8], a row of product_algorithms for tensors of these shapes and dtypes.
        add: add to out.

    Raises:
        RuntimeError: shapes, dtypes, devices or the algorithm do not fit; NotImplementedError on
            the CPU.
    """
    torch.ops.minserve.product_(out, x, weight, algorithm, add)


def reference(out: Tensor, x: Tensor, weight: Tensor, *, add: bool = False) -> Tensor:
    """Reference of product_ in float64, without side effects."""
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
