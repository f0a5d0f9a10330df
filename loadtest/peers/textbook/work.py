"""What a scan does, counted."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Work:
    """What a scan of one channel of one sequence does, from the first token to the last.

    Complex numbers count as two.

    Args:
        multiply_adds: products and sums; a product with its sum is one.
        functions: exponentials and logarithms.
        accesses: numbers that its operators read from memory and write to it. Three for each token
            are the least: a, b and h.
        kernels: operators that it launches, for any number of sequences and channels.
        depth: operations of which each waits for the one before, if every number had a processor.
    """

    multiply_adds: int
    functions: int
    accesses: int
    kernels: int
    depth: int


def tree_depth(time: int) -> int:
    """Return the depth of a tree over `time` tokens: log2, rounded up."""
    return (time - 1).bit_length()
