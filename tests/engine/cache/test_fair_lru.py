"""Who gives way: owners share rows and what tries take, and none floods the others out."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass

import pytest

from engine.cache.fair_lru import FairLru, Weights
from engine.protocol.requests import KeepState
from tests.engine.cache.test_named_states import Finished, Talk, code, text


@dataclass(eq=False)
class Thing:
    owner: str
    used: int


def test_whoever_has_the_most_gives_way_first() -> None:
    shares: FairLru[Thing] = FairLru()
    things = [Thing(owner, i) for i, owner in enumerate("abbbca")]
    for thing in things:
        shares.add(thing)
    assert [thing.used for thing in shares] == [1, 2, 3, 0, 5, 4]
    shares.touch(things[1])
    assert [thing.used for thing in shares.of("b")] == [2, 3, 1]
    shares.discard(things[2])
    shares.discard(things[2])
    assert things[2] not in list(shares) and things[1] in list(shares)
    assert Counter(thing.owner for thing in shares) == Counter("abbca")


def test_long_histories() -> None:
    chance = random.Random(5)
    for owners in (1, 2, 3, 9):
        shares: FairLru[Thing] = FairLru()
        lists: dict[str, list[Thing]] = {}
        weights, sums = Weights(), Counter[str]()
        for step in range(2000):
            owner = chr(97 + chance.randrange(owners))
            mine = lists.setdefault(owner, [])
            if mine and chance.random() < 0.5:
                thing = mine.pop(chance.randrange(len(mine)))
                shares.discard(thing)
            else:
                thing = Thing(owner, step)
                mine.append(thing)
                shares.add(thing)
            if mine and chance.random() < 0.3:
                thing = mine.pop(0)
                mine.append(thing)
                shares.touch(thing)
            found = list(shares)
            most = max(map(len, lists.values()))
            assert len(found) == sum(map(len, lists.values()))
            if found:
                assert len(lists[found[0].owner]) == most
                assert found[:most] == lists[found[0].owner]
            more = chance.randrange(-sums[owner], 5)
            weights.add(owner, more)
            sums[owner] += more
            assert weights.total == sum(sums.values())
            heaviest = weights.heaviest()
            assert (heaviest is None) == (weights.total == 0)
            assert heaviest is None or sums[heaviest] == max(sums.values())


def cached(talk: Talk, prompt: bytes, owner: str) -> int:
    end = talk.run(prompt, 1, owner=owner)
    assert isinstance(end, Finished)
    return end.cached_tokens


@pytest.mark.parametrize(("share_slots", "host_rows"), [(8, 0), (0, 8), (4, 4)])
def test_one_owner_floods_no_other_out(share_slots: int, host_rows: int) -> None:
    talk = Talk(share_slots=share_slots, host_rows=host_rows)
    system = bytes(range(97, 117))
    assert [cached(talk, system, "alice") for _ in range(2)] == [0, 20]
    for number in range(300):
        cached(talk, bytes([97 + number % 26, 97 + number // 26]) * 10, "bob")
    assert cached(talk, system, "alice") == 20
    flooded = cached(talk, b"aa" * 10, "bob")
    assert flooded == 0, "its own oldest gave way"


def test_alone_an_owner_has_all_of_it() -> None:
    talk = Talk(share_slots=8)
    for number in range(4):
        cached(talk, bytes([97 + number]) * 20, "bob")
    assert [cached(talk, bytes([97 + number]) * 20, "bob") for number in range(4)] == [20] * 4


def test_long_texts_of_one_owner_displace_no_others() -> None:
    talk = Talk(share_slots=200, max_step_tokens=4096)
    talk.engine._cache.cache._tree_bytes = 40_000
    assert [cached(talk, b"a" * 20, "alice") for _ in range(2)] == [0, 20]
    for number in range(30):
        cached(talk, bytes([97 + number % 26]) * 1000 + bytes([number]), "bob")
    assert talk.engine._cache.cache._bytes.total <= 40_000
    assert cached(talk, b"a" * 20, "alice") == 20


def test_named_states_leave_rows_for_others() -> None:
    talk = Talk(share_slots=4, host_rows=12)

    def keep(id: str, owner: str) -> object:
        return talk.run(b"abc", keep=KeepState(id=id), owner=owner)

    ends = [keep(f"s{number}", "bob") for number in range(14)]
    kept = sum(isinstance(end, Finished) for end in ends)
    assert kept == 12, "three quarters of all rows"
    last = ends[-1]
    assert code(last) == "state_quota" and "one key" in last.message  # type: ignore[attr-defined, arg-type]
    again = talk.run(b"", 1, state="s0", keep=KeepState(id="s0"), owner="bob")
    assert text(again) == b"g", "in the place of another"
    assert isinstance(keep("s", "alice"), Finished)
    out = talk.ask("export", id="s1", owner="bob").content
    assert talk.code("import", content=out, target="new", owner="bob") == "state_quota"
    assert talk.code("import", content=out, target="s2", owner="bob") == "ok"
    assert talk.code("fork", id="s1", target="new", owner="bob") == "ok", "it takes no row"
    for number in (3, 4, 5, 6):
        assert talk.code("delete", id=f"s{number}", owner="bob") == "ok"
    assert isinstance(keep("t", "bob"), Finished)
    assert talk.engine._cache.tiers._requiring_rows.of == {"alice": 1, "bob": 9}
