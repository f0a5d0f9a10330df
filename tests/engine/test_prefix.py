"""SharedPrefixes: which prefix is found, and what keeping one costs."""

from __future__ import annotations

import tracemalloc

import pytest

from engine.messages import pack_ids
from engine.prefix import Hit, SharedPrefixes
from engine.sequence import MOST_OWNER_BYTES, prefixes


def keep(shared: SharedPrefixes, prompt: bytes, length: int, owner: str = "") -> int:
    prefix = prefixes(prompt, [length], owner)[length]
    shared.claim(prefix, reader=1)
    row = shared.reserve(prefix, reader=1)
    shared.keep(prefix, reader=1)
    assert row is not None
    return row


def test_the_longest_that_the_prompt_begins_with() -> None:
    shared = SharedPrefixes(rows=8, first_row=100)
    prompt = pack_ids(range(50))
    rows = {length: keep(shared, prompt, length) for length in (3, 10, 40)}
    assert len(set(rows.values())) == 3
    assert shared.find(prompt, limit=49) == Hit(rows[40], 40)
    assert shared.find(prompt, limit=39) == Hit(rows[10], 10)
    assert shared.find(pack_ids(range(10)), limit=9) == Hit(rows[3], 3)
    assert shared.find(pack_ids(range(10)), limit=40) == Hit(rows[10], 10)
    assert shared.find(pack_ids(range(2)), limit=2) is None


@pytest.mark.parametrize("wrong", [0, 4, 9])
def test_one_other_token_is_another_prefix(wrong: int) -> None:
    shared = SharedPrefixes(rows=8, first_row=0)
    keep(shared, pack_ids(range(50)), 10)
    other = list(range(50))
    other[wrong] += 1
    assert shared.find(pack_ids(other), limit=49) is None


def test_each_owner_has_its_own() -> None:
    shared = SharedPrefixes(rows=8, first_row=0)
    prompt = pack_ids(range(50))
    names = ("", "a", "b", "a" * MOST_OWNER_BYTES)
    rows = {owner: keep(shared, prompt, 10, owner) for owner in names}
    assert len(set(rows.values())) == len(names)
    for owner, row in rows.items():
        assert shared.find(prompt, limit=49, owner=owner) == Hit(row, 10)
    assert shared.find(prompt, limit=49, owner="c") is None


def test_a_kept_prefix_costs_the_same_however_long_it_is() -> None:
    shared = SharedPrefixes(rows=8, first_row=0)
    tracemalloc.start()
    try:
        for start in range(8):
            keep(shared, pack_ids(range(start, start + 250_000)), 250_000)  # a megabyte
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held < 100_000
    assert shared.rows_used == 8
