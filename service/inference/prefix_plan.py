"""Beginnings: what the prompts of one batch have in common, so that each shared part is read once.

By itself the engine finds out where two prompts part when it sees the second one, whose beginning
it then reads again to keep a state there. Of a batch all prompts are known before the first is
read: so that one leaves a state wherever another parts from it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

from engine.protocol.token_ids import ID_BYTES

LEAST = 16  # tokens of a shared part: fewer are read in the time that another step takes
MOST_POINTS = 8  # of one prompt, the longest ones


Company = tuple[str, str]  # of prompts that begin at the same state and may know of each other
Points = dict[tuple[Company, bytes], tuple[int, ...]]


def shared_prefixes(prompts: Iterable[tuple[Company, bytes]]) -> Points:
    """`junctions` of each company's prompts, which may come several times; those without any are
    left out."""
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
    """For each packed prompt the lengths, in tokens and rising, of the beginnings within it at
    which others of these part from it."""
    if len({prompt[: LEAST * ID_BYTES] for prompt in prompts}) == len(prompts):
        return [()] * len(prompts)  # mostly
    order = sorted(range(len(prompts)), key=prompts.__getitem__)
    # Sorted, those with a common beginning stand together.
    common = [_common(prompts[one], prompts[other]) for one, other in itertools.pairwise(order)]
    points: list[set[int]] = [set() for _ in prompts]
    for which, lengths in ((order, common), (order[::-1], common[::-1])):
        path: list[int] = []  # lengths that this one shares with some before it, rising
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
    """How many tokens two prompts begin with alike: by halves, each of which is one comparison of
    memory."""
    low, high = 0, min(len(one), len(other)) // ID_BYTES
    while low < high:
        middle = (low + high + 1) // 2
        if one[low * ID_BYTES : middle * ID_BYTES] == other[low * ID_BYTES : middle * ID_BYTES]:
            low = middle
        else:
            high = middle - 1
    return low
