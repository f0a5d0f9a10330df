"""Which sizes HopperLM times, which way those go that it has not timed, which widths it takes."""

from __future__ import annotations

import dataclasses

import pytest

from engine.config import ModelConfig
from engine.models.backends.dispatch import TO_A_HEAD, Way, nearest, to_be_timed
from engine.models.backends.hopper import _possible_ways_of_prompts, supports_widths
from engine.runner.cuda_graphs import buckets


def test_powers_of_two_and_the_largest_are_timed() -> None:
    assert to_be_timed(buckets(192)) == [1, 2, 4, 8, 16, 32, 64, 128, 192]
    assert to_be_timed({512, 48, 64}) == [64, 512]
    assert to_be_timed([]) == []


@pytest.mark.parametrize(
    ("size", "way"),
    [
        (33, Way.CHAIN),
        (64, Way.CHAIN),
        (90, Way.CHAIN),
        (91, Way.LIBRARY_AROUND),  # more than the root of 64 times 128
        (96, Way.LIBRARY_AROUND),
        (180, Way.LIBRARY_AROUND),
        (192, Way.LIBRARY),
        (5000, Way.LIBRARY),
    ],
)
def test_others_go_the_way_of_the_nearest_by_ratio(size: int, way: Way) -> None:
    found = {256: Way.LIBRARY, 64: Way.CHAIN, 128: Way.LIBRARY_AROUND}
    assert nearest(found, size, Way.CLUSTERS) is way


def test_few_go_no_way_of_the_library() -> None:
    for way in (Way.LIBRARY, Way.LIBRARY_AROUND, Way.CHAIN_TO_HEAD):
        assert nearest({64: way}, 32, Way.CLUSTERS) is Way.CHAIN
        assert nearest({64: way}, 33, Way.CLUSTERS) is way


def test_clusters_take_no_more_than_was_timed() -> None:
    assert nearest({64: Way.CLUSTERS}, 97, Way.CHAIN) is Way.CHAIN
    assert nearest({64: Way.CLUSTERS}, 96, Way.CHAIN) is Way.CLUSTERS
    assert nearest({128: Way.CLUSTERS}, 120, Way.CHAIN) is Way.CLUSTERS
    assert nearest({512: Way.WIDE_CLUSTERS}, 1024, Way.LIBRARY) is Way.WIDE_CLUSTERS
    assert nearest({512: Way.WIDE_CLUSTERS}, 1025, Way.LIBRARY) is Way.LIBRARY


def test_a_way_with_a_limit_takes_no_more_rows() -> None:
    found, most = {8: Way.NARROW, 16: Way.WHOLE, 32: Way.CHAIN}, {Way.NARROW: 8, Way.WHOLE: 16}
    for size, way in ((5, Way.NARROW), (9, Way.WHOLE), (16, Way.WHOLE), (17, Way.CHAIN)):
        assert nearest(found, size, Way.CLUSTERS, most) is way
    assert nearest({4: Way.WHOLE, 8: Way.WHOLE}, 5, Way.NARROW, most) is Way.WHOLE
    assert nearest({16: Way.WHOLE}, 17, Way.CLUSTERS, most) is Way.CLUSTERS


def test_nothing_found() -> None:
    assert nearest({}, 64, Way.LIBRARY) is Way.LIBRARY
    assert nearest({64: Way.CHAIN}, 0, Way.LIBRARY) is Way.LIBRARY


def test_of_ways_that_are_alike_the_one_with_less_of_the_library_comes_first() -> None:
    assert TO_A_HEAD == (Way.CHAIN_TO_HEAD, Way.LIBRARY_AROUND, Way.LIBRARY)
    assert _possible_ways_of_prompts(33) == [Way.CHAIN, Way.LIBRARY_AROUND, Way.LIBRARY]
    assert _possible_ways_of_prompts(32) == [Way.CHAIN]


@pytest.mark.parametrize(
    ("changes", "taken"),
    [
        ({}, True),
        ({"vocab_size": 65_535 * 128}, True),
        ({"vocab_size": 65_535 * 128 + 1}, False),
        ({"d_model": 200}, False),
    ],
)
def test_widths_that_kernels_can_cut(changes: dict[str, int], taken: bool) -> None:
    config = ModelConfig(cell="mingru", vocab_size=66, d_model=384, n_layers=3)
    assert supports_widths(dataclasses.replace(config, **changes)) is taken
