"""NameIndex: the names of an owner in order, and who expires."""

from __future__ import annotations

from engine.cache.name_index import NameIndex
from engine.cache.resume_point import NamedState, ResumePoint
from engine.cache.tiered_store import CachedState


def named(owner: str, id: str, expires: float) -> NamedState:
    point = ResumePoint(CachedState(1, owner), b"\0\0\0\0", 2, False, ())
    return NamedState(owner, id, point, 0.0, expires, expires)


def test_names_are_listed_in_order_and_by_owner() -> None:
    index = NameIndex()
    for owner, id in (("a", "z"), ("b", "m"), ("a", "c"), ("a", "k")):
        index.add(named(owner, id, 5.0))
    found, more = index.after("a", "", 2)
    assert [one.id for one in found] == ["c", "k"] and more
    found, more = index.after("a", "k", 2)
    assert [one.id for one in found] == ["z"] and not more
    assert index.after("nobody", "", 9) == ([], False)
    assert index.remove(("a", "c")) is not None and index.remove(("a", "c")) is None
    assert index.count("a") == 2 and len(index) == 3 and ("b", "m") in index


def test_the_expired_are_taken_once_unless_their_time_is_set_anew() -> None:
    index = NameIndex()
    first, second, third = (named("a", id, time) for id, time in zip("xyz", (1, 2, 3), strict=True))
    for one in (third, first, second):
        index.add(one)
    assert not index.has_expired(0.5) and index.has_expired(1.0)
    index.set_expiry(first, 9.0)
    assert index.take_expired(2.5) == [second] and index.take_expired(2.5) == []
    index.set_expiry(second, 2.5)
    assert index.take_expired(2.5) == [second]
    index.remove(second.key)
    assert index.take_expired(10.0) == [third, first]
