"""Which sizes HopperBackend times, which way those go that it has not timed, which widths it
takes."""

from __future__ import annotations

import dataclasses

import pytest

from engine.config import ModelConfig
from engine.models.backends.dispatch import TO_A_HEAD, ExecutionPath, nearest, to_be_timed
from engine.models.backends.hopper import _possible_ways_of_prompts, supports_widths
from engine.runner.cuda_graphs import buckets


def test_powers_of_two_and_the_largest_are_timed() -> None:
    assert to_be_timed(buckets(192)) == [1, 2, 4, 8, 16, 32, 64, 128, 192]
    assert to_be_timed({512, 48, 64}) == [64, 512]
    assert to_be_timed([]) == []


@pytest.mark.parametrize(
    ("size", "way"),
    [
        (33, ExecutionPath.CHAIN),
        (64, ExecutionPath.CHAIN),
        (90, ExecutionPath.CHAIN),
        (91, ExecutionPath.LIBRARY_AROUND),  # more than the root of 64 times 128
        (96, ExecutionPath.LIBRARY_AROUND),
        (180, ExecutionPath.LIBRARY_AROUND),
        (192, ExecutionPath.LIBRARY),
        (5000, ExecutionPath.LIBRARY),
    ],
)
def test_others_go_the_way_of_the_nearest_by_ratio(size: int, way: ExecutionPath) -> None:
    found = {256: ExecutionPath.LIBRARY, 64: ExecutionPath.CHAIN, 128: ExecutionPath.LIBRARY_AROUND}
    assert nearest(found, size, ExecutionPath.CLUSTERS) is way


def test_few_go_no_way_of_the_library() -> None:
    for way in (ExecutionPath.LIBRARY, ExecutionPath.LIBRARY_AROUND, ExecutionPath.CHAIN_TO_HEAD):
        assert nearest({64: way}, 32, ExecutionPath.CLUSTERS) is ExecutionPath.CHAIN
        assert nearest({64: way}, 33, ExecutionPath.CLUSTERS) is way


def test_clusters_take_no_more_than_was_timed() -> None:
    assert nearest({64: ExecutionPath.CLUSTERS}, 97, ExecutionPath.CHAIN) is ExecutionPath.CHAIN
    assert nearest({64: ExecutionPath.CLUSTERS}, 96, ExecutionPath.CHAIN) is ExecutionPath.CLUSTERS
    assert (
        nearest({128: ExecutionPath.CLUSTERS}, 120, ExecutionPath.CHAIN) is ExecutionPath.CLUSTERS
    )


def test_a_way_with_a_limit_takes_no_more_rows() -> None:
    found, most = (
        {8: ExecutionPath.NARROW, 16: ExecutionPath.WHOLE, 32: ExecutionPath.CHAIN},
        {ExecutionPath.NARROW: 8, ExecutionPath.WHOLE: 16},
    )
    for size, way in (
        (5, ExecutionPath.NARROW),
        (9, ExecutionPath.WHOLE),
        (16, ExecutionPath.WHOLE),
        (17, ExecutionPath.CHAIN),
    ):
        assert nearest(found, size, ExecutionPath.CLUSTERS, most) is way
    assert (
        nearest({4: ExecutionPath.WHOLE, 8: ExecutionPath.WHOLE}, 5, ExecutionPath.NARROW, most)
        is ExecutionPath.WHOLE
    )
    assert (
        nearest({16: ExecutionPath.WHOLE}, 17, ExecutionPath.CLUSTERS, most)
        is ExecutionPath.CLUSTERS
    )


def test_nothing_found() -> None:
    assert nearest({}, 64, ExecutionPath.LIBRARY) is ExecutionPath.LIBRARY
    assert nearest({64: ExecutionPath.CHAIN}, 0, ExecutionPath.LIBRARY) is ExecutionPath.LIBRARY


def test_of_ways_that_are_alike_the_one_with_less_of_the_library_comes_first() -> None:
    assert TO_A_HEAD == (
        ExecutionPath.CHAIN_TO_HEAD,
        ExecutionPath.LIBRARY_AROUND,
        ExecutionPath.LIBRARY,
    )
    assert _possible_ways_of_prompts(33) == [
        ExecutionPath.CHAIN,
        ExecutionPath.LIBRARY_AROUND,
        ExecutionPath.LIBRARY,
    ]
    assert _possible_ways_of_prompts(32) == [ExecutionPath.CHAIN]


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
