"""The admission policy: room for other owners, and why there is none."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from engine.errors import QueueFull, ShareFull
from engine.protocol.queue_policy import QUEUE_PART, has_room, most_of_one, refusal


def test_one_owner_leaves_room_for_others() -> None:
    taken: Counter[str] = Counter()

    def fill(owner: str, most: int) -> None:
        while has_room(taken=taken.total(), own=taken[owner], more=1, most=most, owner=owner):
            taken[owner] += 1

    fill("a", 4096)
    assert taken["a"] == most_of_one(4096, "a") == 3072
    fill("b", 4096)
    assert taken["b"] == 768, "three quarters of what was left"
    fill("c", 4096)
    assert taken.total() < 4096
    taken.clear()
    fill("", 4096)
    assert taken[""] == most_of_one(4096, "") == 4096, "without keys there are no others"


@given(
    st.integers(0, 50),
    st.lists(st.tuples(st.sampled_from(["a", "b", "c", "d", ""]), st.integers(1, 20)), max_size=40),
)
def test_room_is_bounded_and_whoever_has_none_finds_some(
    most: int, asks: list[tuple[str, int]]
) -> None:
    taken: Counter[str] = Counter()
    for owner, more in asks:
        total = taken.total()
        if has_room(taken=total, own=taken[owner], more=more, most=most, owner=owner):
            taken[owner] += more
        assert taken.total() <= most
        assert all(taken[name] <= most_of_one(most, name) for name in taken)
        if taken.total() < most:
            assert has_room(taken=taken.total(), own=0, more=1, most=most, owner="new")
    for name in ("a", ""):
        best = most_of_one(most, name)
        assert best == 0 or has_room(taken=0, own=0, more=best, most=most, owner=name)
        assert not has_room(taken=0, own=0, more=best + 1, most=most, owner=name)


def test_at_most_share_holds_for_a_third_owner_too() -> None:
    assert QUEUE_PART == 3
    assert not has_room(taken=4, own=3, more=1, most=5, owner="a")
    assert has_room(taken=4, own=0, more=1, most=5, owner="b"), "the last place"


def test_a_refusal_tells_a_full_queue_from_a_full_share() -> None:
    assert refusal(taken=3, own=3, more=1, most=8, owner="a") is None
    assert refusal(taken=6, own=6, more=1, most=8, owner="a") is ShareFull
    assert refusal(taken=6, own=0, more=1, most=8, owner="b") is None
    assert refusal(taken=6, own=0, more=3, most=8, owner="b") is QueueFull
    assert refusal(taken=8, own=0, more=1, most=8, owner="") is QueueFull
    assert refusal(taken=7, own=7, more=1, most=8, owner="") is None
