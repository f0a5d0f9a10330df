"""Tiers: who gives way to whom, and how fast."""

from __future__ import annotations

from collections.abc import Iterator

from engine.cache.tiered_store import MOVED_AT_ONCE, MOVED_PER_PLAN, CachedState, TieredStateStore


def cached(tiers: TieredStateStore, count: int) -> Iterator[CachedState]:
    """So many new states of the prefix cache, as far as there is room for them."""
    for _ in range(count):
        state = CachedState(1, node=object())
        if tiers.allocate(state, for_cache=True):
            yield tiers.pin(state)


def filled(device_rows: int, host_rows: int) -> TieredStateStore:
    """A device full of states that stand."""
    tiers = TieredStateStore(device_rows, 100, host_rows)
    tiers.on_evict = lambda state: tiers.release(state)
    for state in list(cached(tiers, device_rows)):
        tiers.commit(state)
    tiers.begin_plan()
    return tiers


def test_new_states_displace_others_only_as_fast_as_these_can_move() -> None:
    tiers = filled(64, 1000)
    assert len(list(cached(tiers, 64))) == MOVED_AT_ONCE
    assert tiers.crowded and len(list(tiers.planned_moves())) == tiers.host_used == MOVED_AT_ONCE
    for _ in range(MOVED_AT_ONCE // MOVED_PER_PLAN - 1):
        tiers.begin_plan()
        assert tiers.crowded and not list(cached(tiers, 64)), "not before they can move together"
    tiers.begin_plan()
    assert not tiers.crowded
    assert len(list(cached(tiers, 64))) == MOVED_AT_ONCE


def test_a_few_at_a_time_always_find_room() -> None:
    tiers = filled(64, 1000)
    for _ in range(50):
        assert len(list(cached(tiers, MOVED_PER_PLAN))) == MOVED_PER_PLAN
        tiers.begin_plan()


def test_without_main_memory_they_are_forgotten_as_fast() -> None:
    tiers = filled(64, 0)
    assert len(list(cached(tiers, 64))) == MOVED_AT_ONCE
    assert not list(tiers.planned_moves()) and tiers.evictions["device"] == MOVED_AT_ONCE


def test_a_row_that_comes_free_is_taken() -> None:
    tiers = filled(64, 1000)
    tenants = list(cached(tiers, 64))
    assert tiers.crowded
    tiers.release(tenants[0])
    tiers.begin_plan()
    assert not tiers.crowded and len(list(cached(tiers, 64))) == 1


def test_who_has_a_name_coming_waits_for_no_allowance() -> None:
    tiers = filled(64, 0)
    list(cached(tiers, 64))
    named = CachedState(1)
    assert tiers.crowded and tiers.allocate(named) and named.has_row


def test_a_state_lies_in_one_tier_at_a_time() -> None:
    tiers = filled(2, 2)
    state = CachedState(1, node=object(), written=frozenset({"file"}))
    assert (state.has_row, state.on_device, state.on_host) == (False, False, False)
    assert tiers.allocate(tiers.pin(state))
    assert (state.has_row, state.on_device, state.on_host) == (True, True, False)
    state.place = ~0
    assert (state.has_row, state.on_device, state.on_host) == (True, False, True)
    tiers.move_to_disk(state)
    assert (state.has_row, state.on_device, state.on_host) == (False, False, False)


def test_a_use_counts_where_a_state_lies() -> None:
    """Also of those that a file alone has: the first of them to go is the one not used."""
    tiers = TieredStateStore(4, 100, 0)
    forgotten: list[CachedState] = []
    tiers.on_evict = forgotten.append
    states = [CachedState(1, node=object()) for _ in range(3)]
    for state in states:
        tiers.move_to_disk(tiers.pin(state))
    tiers.touch(states[0])
    assert tiers.evict("") and forgotten == [states[1]]
