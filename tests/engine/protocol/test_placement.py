"""Which engine keeps a state: its id and the name of its file say the same."""

from __future__ import annotations

import math
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.cache.storage.file_store import StateFileStore, digest_in
from engine.config import MOST_ENGINES
from engine.protocol.placement import (
    StatePlacement,
    engine_of_state,
    engines_in_order,
    home_of_digest,
)

IDS = [f"id-{number}" for number in range(4000)]
SIGMAS = 5  # by which a count of random draws may be off


def is_near(count: int, tries: int, share: float) -> bool:
    """Whether so many of independent tries, each with this probability, are no surprise."""
    return abs(count - tries * share) <= SIGMAS * math.sqrt(tries * share * (1 - share))


@pytest.mark.parametrize("engines", [1, 2, 3, 8, 40])
def test_states_are_spread_over_engines(engines: int) -> None:
    homes = Counter(engine_of_state("alice", id, engines) for id in IDS)
    assert set(homes) == set(range(engines))
    assert all(is_near(count, len(IDS), 1 / engines) for count in homes.values())


@given(st.text(), st.text(), st.integers(1, MOST_ENGINES - 1))
@settings(max_examples=300, deadline=None)
def test_a_further_engine_takes_states_and_moves_none_between_others(
    owner: str, id: str, engines: int
) -> None:
    before = engine_of_state(owner, id, engines)
    assert engine_of_state(owner, id, engines + 1) in (before, engines)
    order = engines_in_order(owner, id, engines + 1)
    assert [rank for rank in order if rank != engines] == engines_in_order(owner, id, engines)


@given(st.text(), st.text(), st.integers(1, MOST_ENGINES))
@settings(max_examples=300, deadline=None)
def test_the_order_has_every_engine_once_and_begins_with_the_one_that_keeps_the_state(
    owner: str, id: str, engines: int
) -> None:
    order = engines_in_order(owner, id, engines)
    assert sorted(order) == list(range(engines))
    assert order[0] == engine_of_state(owner, id, engines)


@pytest.mark.parametrize("engines", [1, 2, 3, 7])
def test_a_further_engine_takes_its_share(engines: int) -> None:
    moved = sum(engine_of_state("", id, engines + 1) == engines for id in IDS)
    assert is_near(moved, len(IDS), 1 / (engines + 1))


def test_states_of_a_missing_engine_are_spread_over_the_others() -> None:
    orders = [engines_in_order("alice", id, 5) for id in IDS]
    second = Counter(order[1] for order in orders if order[0] == 2)
    assert set(second) == {0, 1, 3, 4}
    assert all(is_near(count, second.total(), 1 / 4) for count in second.values())


def test_the_placement_is_the_same_in_every_version() -> None:
    """Files lie by it, so another rule needs folders of another name."""
    homes = [engine_of_state("alice", id, 5) for id in IDS[:12]]
    assert homes == [0, 3, 3, 1, 2, 3, 3, 0, 3, 3, 1, 0]
    assert engines_in_order("alice", "id-0", 5) == [0, 3, 4, 1, 2]


def test_owners_are_told_apart() -> None:
    """Else everybody's session "1" would be one engine's."""
    assert len({engine_of_state(f"owner-{number}", "session:1", 8) for number in range(100)}) == 8


def test_a_file_says_what_its_id_says() -> None:
    for id in IDS[:100]:
        digest = digest_in(StateFileStore.name("model", "alice", id), "model")
        assert digest is not None
        assert home_of_digest(digest, 5) == engine_of_state("alice", id, 5)


def test_names_of_others_say_nothing() -> None:
    name = StateFileStore.name("model", "alice", "id")
    for other in ("", "x", name[:-1], name[1:], f"{name}.writing", name.replace("-", "-g", 1)):
        assert digest_in(other, "model") is None
    assert digest_in(name, "another model") is None


def test_new_ids_are_kept_where_they_are_made() -> None:
    for rank in range(3):
        home = StatePlacement(rank, 3)
        ids = {home.new_id("alice") for _ in range(50)}
        assert len(ids) == 50
        assert {engine_of_state("alice", id, 3) for id in ids} == {rank}
