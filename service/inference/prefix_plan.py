"""Finds the prefixes that the prompts of one batch share, so that each of them is read once.

By itself the engine learns where two prompts diverge when it sees the second one. It then reads the
shared prefix again to cache a state there. In a batch all prompts are known before the first one is
read, so the first one can leave a state wherever another diverges from it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

from engine.protocol.token_ids import ID_BYTES

LEAST = 16  # tokens of a shared prefix; reading fewer again is as fast as an additional step
MOST_POINTS = 8  # shared prefixes of one prompt; the longest ones are used


# Identifies prompts that may share prefixes: they start from the same state, with the same salt.
Company = tuple[str, str]
Points = dict[tuple[Company, bytes], tuple[int, ...]]


def shared_prefixes(prompts: Iterable[tuple[Company, bytes]]) -> Points:
    """Return the `junctions` of prompts within each company; prompts without any are left out.

    Equal prompts may occur several times.
    """
    companies: dict[Company, set[bytes]] = {}
    for company, prompt in prompts:
        companies.setdefault(company, set()).add(prompt)
    found: Points = {}
    for company, distinct in companies.items():
        texts = list(distinct)
        for prompt, points in zip(texts, junctions(texts), strict=True):
            if points:
                found[company, prompt] = points
    return found


def junctions(prompts: Sequence[bytes]) -> list[tuple[int, ...]]:
    """Return for each packed prompt the lengths at which other prompts diverge from it.

    Lengths are in tokens, ascending, at least LEAST and less than the prompt's own length.
    """
    if len({prompt[: LEAST * ID_BYTES] for prompt in prompts}) == len(prompts):
        return [()] * len(prompts)  # the usual case: all prompts begin differently
    order = sorted(range(len(prompts)), key=prompts.__getitem__)
    # Sorted, prompts with a common prefix are neighbours.
    common = [_common(prompts[one], prompts[other]) for one, other in itertools.pairwise(order)]
    points: list[set[int]] = [set() for _ in prompts]
    for which, lengths in ((order, common), (order[::-1], common[::-1])):
        path: list[int] = []  # lengths of prefixes shared with earlier prompts, ascending
        for one, length in zip(which, [0, *lengths], strict=True):
            while path and path[-1] > length:
                path.pop()
            if length >= LEAST and path[-1:] != [length]:
                path.append(length)
            points[one].update(path[-MOST_POINTS:])
    return [
        tuple(sorted(found - {len(prompt) // ID_BYTES})[-MOST_POINTS:])
        for found, prompt in zip(points, prompts, strict=True)
    ]


def _common(one: bytes, other: bytes) -> int:
    """Return the length in tokens of the common prefix of two packed prompts (binary search)."""
    low, high = 0, min(len(one), len(other)) // ID_BYTES
    while low < high:
        middle = (low + high + 1) // 2
        if one[low * ID_BYTES : middle * ID_BYTES] == other[low * ID_BYTES : middle * ID_BYTES]:
            low = middle
        else:
            high = middle - 1
    return low
