"""How a step's prompt tokens are shared, so that neither long prompts nor short ones starve.

The sequence that was admitted first gets half of the budget, the others the rest, least remaining
first; what they leave goes to the first again.

Chunks end at multiples of SCAN_CHUNK, counted from where the sequence began to read, and at its
marks, from which the count begins anew. Where all marks are such multiples too (`whole_chunks`),
they change nothing of where the scans combine carries.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from engine.config import SCAN_CHUNK
from engine.sequence import Sequence


def share_budget(reading: Collection[Sequence], budget: int) -> list[tuple[Sequence, int]]:
    """Who of `reading`, in order of admission, reads how many prompt tokens."""
    if not reading:
        return []
    first, *others = reading
    half = max(budget // 2 // SCAN_CHUNK, 1) * SCAN_CHUNK
    left = budget - _chunk_length(first, min(half, budget), budget)
    shares = []
    for sequence in sorted(others, key=lambda other: other.remaining):
        length = _chunk_length(sequence, left, budget)
        if length:
            shares.append((sequence, length))
            left -= length
        if left == 0:
            break
    taken = sum(length for _, length in shares)
    return [(first, _chunk_length(first, budget - taken, budget)), *shares]


def whole_chunks(marks: Iterable[int]) -> list[int]:
    """The marks rounded down to multiples of SCAN_CHUNK, rising; none at 0."""
    return sorted({mark // SCAN_CHUNK * SCAN_CHUNK for mark in marks} - {0})


def _chunk_length(sequence: Sequence, available: int, budget: int) -> int:
    """How many tokens its next chunk may have, when `available` are left of the budget.

    0 where the chunk could not end at a multiple of SCAN_CHUNK; but a budget that is always
    smaller than that is used as it is.
    """
    needed = sequence.next_mark() - sequence.position
    if needed <= available or budget < SCAN_CHUNK:
        return min(needed, available)
    done = sequence.position - sequence.anchor
    return max((done + available) // SCAN_CHUNK * SCAN_CHUNK - done, 0)
