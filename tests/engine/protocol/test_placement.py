"""Which engine keeps a state: its id and the name of its file say the same."""

from __future__ import annotations

from collections import Counter

from engine.cache.storage.file_store import StateFileStore, digest_in
from engine.protocol.placement import StatePlacement, engine_of_state, home_of_digest

IDS = [f"id-{number}" for number in range(1000)]


def test_states_are_spread_over_engines() -> None:
    for engines in (2, 3, 8):
        homes = Counter(engine_of_state("alice", id, engines) for id in IDS)
        assert set(homes) == set(range(engines))
        assert min(homes.values()) > 0.5 * len(IDS) / engines
    assert {engine_of_state("alice", id, 1) for id in IDS} == {0}


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
