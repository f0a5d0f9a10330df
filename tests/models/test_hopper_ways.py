"""Which sizes HopperLM times, and which way those go that it has not timed."""

from __future__ import annotations

import pytest

from engine.graphs import buckets
from engine.models.hopper import _nearest, _to_be_timed, _Way


def test_powers_of_two_and_the_largest_are_timed() -> None:
    assert _to_be_timed(buckets(192)) == [1, 2, 4, 8, 16, 32, 64, 128, 192]
    assert _to_be_timed({512, 48, 64}) == [64, 512]
    assert _to_be_timed([]) == []


@pytest.mark.parametrize(
    ("size", "way"),
    [
        (33, _Way.CHAIN),
        (64, _Way.CHAIN),
        (90, _Way.CHAIN),
        (91, _Way.LIBRARY_AROUND),  # more than the root of 64 times 128
        (96, _Way.LIBRARY_AROUND),
        (180, _Way.LIBRARY_AROUND),
        (192, _Way.LIBRARY),
        (5000, _Way.LIBRARY),
    ],
)
def test_others_go_the_way_of_the_nearest_by_ratio(size: int, way: _Way) -> None:
    found = {256: _Way.LIBRARY, 64: _Way.CHAIN, 128: _Way.LIBRARY_AROUND}
    assert _nearest(found, size, _Way.CLUSTERS) is way


def test_few_go_no_way_of_the_library() -> None:
    for way in (_Way.LIBRARY, _Way.LIBRARY_AROUND, _Way.CHAIN_TO_HEAD):
        assert _nearest({64: way}, 32, _Way.CLUSTERS) is _Way.CHAIN
        assert _nearest({64: way}, 33, _Way.CLUSTERS) is way


def test_clusters_take_no_more_than_was_timed() -> None:
    assert _nearest({64: _Way.CLUSTERS}, 97, _Way.CHAIN) is _Way.CHAIN
    assert _nearest({64: _Way.CLUSTERS}, 96, _Way.CHAIN) is _Way.CLUSTERS
    assert _nearest({128: _Way.CLUSTERS}, 120, _Way.CHAIN) is _Way.CLUSTERS


def test_nothing_found() -> None:
    assert _nearest({}, 64, _Way.LIBRARY) is _Way.LIBRARY
    assert _nearest({64: _Way.CHAIN}, 0, _Way.LIBRARY) is _Way.LIBRARY
