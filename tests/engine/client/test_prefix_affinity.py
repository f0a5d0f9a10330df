"""Beginnings of prompts, and who has read them."""

from __future__ import annotations

from engine.client.prefix_affinity import (
    BLOCK_TOKENS,
    FIRST_BLOCKS,
    MOST_BLOCKS,
    PrefixAffinity,
    prefix_hashes,
)
from engine.protocol.token_ids import pack_ids


def prompt(*blocks: int, rest: int = 0) -> bytes:
    """So many blocks, each of one token, and some tokens more."""
    return pack_ids([token for token in blocks for _ in range(BLOCK_TOKENS)] + [99] * rest)


def hashes(*blocks: int, rest: int = 0, scope: str = "") -> list[int]:
    return prefix_hashes(scope, prompt(*blocks, rest=rest))


def test_a_beginning_has_the_same_hashes_whatever_follows() -> None:
    whole = hashes(1, 2, 3)
    assert len(set(whole)) == 3
    assert hashes(1, 2, 4)[:2] == whole[:2] and hashes(1, 2, 4)[2] != whole[2]
    assert hashes(1, 2, rest=BLOCK_TOKENS - 1) == whole[:2]
    assert hashes(2, 2, 3)[1:] != whole[1:]
    assert hashes(rest=BLOCK_TOKENS - 1) == []
    assert len(hashes(*range(MOST_BLOCKS + 5))) == MOST_BLOCKS
    assert not set(hashes(1, 2, 3, scope="other")) & set(whole)


def test_the_longest_beginning_that_somebody_has_read() -> None:
    affinity: PrefixAffinity[str] = PrefixAffinity()
    affinity.note(hashes(1, 2), "a")
    affinity.note(hashes(1, 3, 4), "b")
    assert affinity.find(hashes(1, 2, 7), "ab") == ("a", 2 * BLOCK_TOKENS)
    assert affinity.find(hashes(1, 3, 4, 5, 6), "ab") == ("b", 3 * BLOCK_TOKENS)
    assert affinity.find(hashes(1, 5), "ab") == ("b", BLOCK_TOKENS)  # who read it last
    assert affinity.find(hashes(1, 2, 7), "b") == ("b", BLOCK_TOKENS)  # of those who are there
    assert affinity.find(hashes(5), "ab") == (None, 0)
    affinity.keep_only("a")
    affinity.note(hashes(8), "b")  # by a router of before
    assert affinity.find(hashes(8), "ab") == (None, 0)
    assert affinity.find(hashes(1, 3, 4), "ab") == (None, 0)
    assert affinity.find(hashes(1, 2), "ab") == ("a", 2 * BLOCK_TOKENS)


def test_long_prompts_are_known_by_their_first_and_last_blocks() -> None:
    affinity: PrefixAffinity[str] = PrefixAffinity()
    long = hashes(*range(500))
    affinity.note(long, "a")
    assert len(affinity) < FIRST_BLOCKS + 10
    assert affinity.find([*long, 1, 2, 3], "a") == ("a", 500 * BLOCK_TOKENS)
    assert affinity.find(long[:300], "a") == ("a", FIRST_BLOCKS * BLOCK_TOKENS)


def test_what_was_not_used_for_long_is_forgotten() -> None:
    affinity: PrefixAffinity[str] = PrefixAffinity(most=10)
    for number in range(10):
        affinity.note(hashes(number), "a")
    affinity.note(hashes(0), "a")
    affinity.note(hashes(77), "a")
    assert len(affinity) == 10
    assert affinity.find(hashes(0), "a")[0] == "a"
    assert affinity.find(hashes(1), "a")[0] is None
