"""Trie: the longest text that another one begins with, and what it takes to know it."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from engine.cache.radix_tree import RadixNode, RadixTree
from engine.protocol.token_ids import pack_ids

Texts = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=9), max_size=12)


def common(a: list[int], b: list[int]) -> int:
    for length in range(min(len(a), len(b)), -1, -1):
        if a[:length] == b[:length]:
            return length
    return 0


def nodes_of(trie: RadixTree[Any]) -> list[RadixNode[Any]]:
    """All but the root."""
    left, found = [trie.root], []
    while left:
        children = list(left.pop().children.values())
        left.extend(children)
        found.extend(children)
    return found


@given(Texts, st.lists(st.integers(0, 2), min_size=1, max_size=9), st.data())
def test_it_finds_what_a_dictionary_would(
    texts: list[list[int]], asked: list[int], data: st.DataObject
) -> None:
    trie: RadixTree[str] = RadixTree()
    kept: dict[tuple[int, ...], RadixNode[str]] = {}
    for text in texts:
        length = data.draw(st.integers(1, len(text)))
        node = kept[tuple(text[:length])] = trie.insert(pack_ids(text), length)
        node.value = str(text[:length])
        assert node.length == length
    for key in data.draw(st.lists(st.sampled_from(sorted(kept)), unique=True)) if kept else ():
        node = kept.pop(key)
        node.value = None
        trie.tidy(node)
    path, same = trie.walk(pack_ids(asked))
    found = {node.length: node.value for node in path if node.value is not None}
    assert found == {len(key): str(list(key)) for key in kept if key == tuple(asked[: len(key)])}
    assert same == max((common(list(key), asked) for key in kept), default=0)
    nodes = nodes_of(trie)
    assert all(node.value is not None or len(node.children) > 1 for node in nodes), (
        "as few as can be"
    )
    assert trie.bytes == sum(len(node.run) + 400 for node in nodes)
    assert trie.empty == (not kept)


def test_a_node_that_somebody_reads_to_stays() -> None:
    trie: RadixTree[str] = RadixTree()
    node = trie.insert(pack_ids([1, 2, 3]), 2)
    node.reader = 7
    trie.tidy(node)
    assert trie.walk(pack_ids([1, 2, 9]))[0] == [node]
    node.reader = -1
    trie.tidy(node)
    assert trie.empty and trie.bytes == 0


def test_long_texts_that_begin_alike_are_held_once() -> None:
    trie: RadixTree[str] = RadixTree()
    stem = list(range(100_000))
    for end in range(50):
        trie.insert(pack_ids([*stem, end]), len(stem) + 1).value = "kept"
    assert trie.bytes < 4 * len(stem) + 60_000
    path, same = trie.walk(pack_ids([*stem, 7, 8]))
    assert [node.length for node in path] == [100_000, 100_001] and same == 100_001
