"""What every SharedStore promises, asked of each kind directly."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from engine.cache.shared import folder_store, redis_store, store
from engine.cache.shared.connect import open_shared_store
from engine.cache.shared.store import ABSENT, Lock, SharedStore, StateName
from engine.cache.storage import snapshot
from engine.cache.storage.snapshot import Snapshot, StateLayout
from engine.errors import StateBusy, StateConflict, StateQuota
from engine.protocol.token_ids import pack_ids
from engine.state_spec import StateSpec

LAYOUT = StateLayout("model", 257, (StateSpec("cell", 1, (64,)),))
NAME = StateName.of("emma", "session:1")
Open = Callable[..., SharedStore]

_tokens = (f"{number:032x}" for number in itertools.count(1))


@pytest.fixture
def opened(url: str) -> Iterator[Open]:
    """Returns another server's view of the same store at each call."""
    made: list[SharedStore] = []

    def another(model: str = "model") -> SharedStore:
        made.append(open_shared_store(url, model))
        return made[-1]

    yield another
    for one in made:
        one.close()


def lock(name: StateName = NAME) -> Lock:
    # a generation takes its second half from the first eight digits
    return Lock(name, next(_tokens)[::-1])


def content(
    tokens: int, name: StateName = NAME, ttl: float = 60.0, layout: StateLayout = LAYOUT
) -> bytes:
    state = bytes(layout.bytes)
    extra = {"owner": name.owner, "id": name.id, "ttl": repr(ttl), "created": "1000.0"}
    tail = pack_ids([tokens % 257])
    return snapshot.write(Snapshot(state, tail, tokens, extra=extra, turns=tokens), layout)


def store_one(of: SharedStore, tokens: int, name: StateName = NAME, ttl: float = 60.0) -> str:
    mine = lock(name)
    base = of.open(name, ABSENT, mine).generation
    return of.write(mine, base, content(tokens, name, ttl))


def test_what_one_server_stores_another_one_reads(opened: Open) -> None:
    first, second = opened(), opened()
    assert first.open(NAME, ABSENT).generation == ABSENT
    assert first.describe(NAME) is None
    generation = store_one(first, 5)
    found = second.open(NAME, ABSENT)
    assert (found.generation, found.content) == (generation, content(5))
    assert second.open(NAME, generation).content is None, "what is known is not sent again"
    again = store_one(second, 9)
    assert again != generation
    assert first.open(NAME, generation).content == content(9)
    described = first.describe(NAME)
    assert described is not None and described[0] == again
    entry = described[1].entry
    assert (entry.tokens, entry.turns, entry.ttl, entry.created) == (9, 9, 60.0, 1000.0)
    assert described[1].expires == pytest.approx(time.time() + 60, abs=5)


def test_states_of_other_models_and_owners_are_not_seen(opened: Open) -> None:
    store_one(opened(), 5)
    stranger = opened("another model")
    assert stranger.open(NAME, ABSENT).generation == ABSENT
    assert stranger.list_states(NAME.owner, "", 10) == ([], False)
    theirs = StateName.of("otto", "session:1")
    assert opened().open(theirs, ABSENT).generation == ABSENT
    assert opened().list_states(theirs.owner, "", 10) == ([], False)


def test_one_lock_at_a_time(opened: Open) -> None:
    first, second = opened(), opened()
    mine, theirs = lock(), lock()
    base = first.open(NAME, ABSENT, mine).generation
    with pytest.raises(StateBusy) as busy:
        second.open(NAME, ABSENT, theirs)
    assert 0 < (busy.value.retry_after or 0) <= store.LEASE_SECONDS
    assert second.open(NAME, ABSENT).generation == ABSENT, "it can be read"
    assert first.open(NAME, ABSENT, mine).generation == ABSENT, "its holder may ask again"
    second.unlock(theirs)  # changes nothing
    with pytest.raises(StateBusy):
        second.open(NAME, ABSENT, theirs)
    generation = first.write(mine, base, content(5))
    assert second.open(NAME, ABSENT, theirs).generation == generation, "a write gives it back"
    second.unlock(theirs)
    first.open(NAME, ABSENT, mine)


def test_a_lock_that_is_not_renewed_ends(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (store, redis_store, folder_store):
        monkeypatch.setattr(module, "LEASE_SECONDS", 0.3)
    first, second = opened(), opened()
    mine, theirs = lock(), lock()
    base = first.open(NAME, ABSENT, mine).generation
    for _ in range(6):
        time.sleep(0.1)
        first.renew([mine])
        with pytest.raises(StateBusy):
            second.open(NAME, ABSENT, theirs)
    time.sleep(0.35)
    second.open(NAME, ABSENT, theirs)
    first.renew([mine])  # too late, and it does not take the lock back
    with pytest.raises(StateConflict):
        first.write(mine, base, content(5))
    assert second.write(theirs, base, content(7))
    with pytest.raises(StateConflict):
        first.write(mine, base, content(5))
    assert opened().open(NAME, ABSENT).content == content(7)


def test_a_lock_that_was_given_back_is_not_renewed(opened: Open) -> None:
    """The renewal may have begun before."""
    first, second = opened(), opened()
    mine, theirs = lock(), lock()
    base = first.open(NAME, ABSENT, mine).generation
    first.unlock(mine)
    first.renew([mine])
    second.open(NAME, ABSENT, theirs)
    second.unlock(theirs)
    first.open(NAME, ABSENT, mine)
    first.write(mine, base, content(5))
    first.renew([mine])
    second.open(NAME, ABSENT, theirs)


def test_a_lock_that_ended_but_that_nobody_took_still_writes(
    opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (store, redis_store, folder_store):
        monkeypatch.setattr(module, "LEASE_SECONDS", 0.05)
    first = opened()
    mine = lock()
    base = first.open(NAME, ABSENT, mine).generation
    time.sleep(0.1)
    assert first.write(mine, base, content(5)) == opened().open(NAME, ABSENT).generation


def test_a_version_that_was_replaced_cannot_be_gone_on_from(opened: Open) -> None:
    """Whatever the locks say: the version alone decides."""
    first, second = opened(), opened()
    mine = lock()
    base = first.open(NAME, ABSENT, mine).generation
    first.unlock(mine)
    store_one(second, 7)
    with pytest.raises(StateConflict):
        first.write(mine, base, content(5))
    generation = second.open(NAME, ABSENT).generation
    theirs = lock()
    second.open(NAME, ABSENT, theirs)
    second.remove(theirs, generation)
    with pytest.raises(StateConflict):
        first.write(mine, generation, content(5))
    assert second.open(NAME, ABSENT).generation == ABSENT
    store_one(second, 1)
    with pytest.raises(StateConflict):
        first.write(mine, generation, content(5))


def test_a_write_may_be_repeated(opened: Open) -> None:
    """As it must be when its answer was lost."""
    first = opened()
    mine = lock()
    base = first.open(NAME, ABSENT, mine).generation
    told = [first.write(mine, base, content(5)) for _ in range(3)]
    assert len(set(told)) == 1
    assert first.open(NAME, told[0], lock()).generation == told[0], "the lock is free"


def test_removing(opened: Open) -> None:
    first, second = opened(), opened()
    base = store_one(first, 5)
    mine, theirs = lock(), lock()
    first.open(NAME, ABSENT, mine)
    with pytest.raises(StateConflict):
        second.remove(theirs, base)
    first.remove(mine, base)
    first.remove(mine, base)  # repeating it is safe
    assert second.open(NAME, ABSENT, theirs).generation == ABSENT
    assert second.list_states(NAME.owner, "", 10) == ([], False)
    assert second.write(theirs, ABSENT, content(6))
    assert first.open(NAME, ABSENT).content == content(6)


def test_lists_are_in_order_and_in_pages(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redis_store, "LISTED_AT_ONCE", 3)
    first, second = opened(), opened()
    ids = ["b", "a", "session:1", "Z", "c.d", "c", "..", "x" * 128]
    for tokens, id in enumerate(ids, 1):
        store_one(first, tokens, StateName.of("emma", id))
    gone = lock(StateName.of("emma", "c"))
    first.remove(gone, first.open(gone.name, ABSENT, gone).generation)
    left = sorted(set(ids) - {"c"})
    found, more = second.list_states(NAME.owner, "", 100)
    assert ([one.id for one in found], more) == (left, False)
    assert [one.entry.tokens for one in found] == [1 + ids.index(id) for id in left]
    after, pages = "", []
    while True:
        page, more = second.list_states(NAME.owner, after, 2)
        pages += [one.id for one in page]
        if not more:
            break
        after = page[-1].id
    assert pages == left


def test_states_expire_after_their_last_use(opened: Open) -> None:
    first = opened()
    store_one(first, 5, ttl=0.5)
    for _ in range(4):
        time.sleep(0.3)
        assert first.open(NAME, ABSENT).content is not None
    time.sleep(0.3)
    assert first.describe(NAME) is not None
    time.sleep(0.3)
    assert first.list_states(NAME.owner, "", 10)[0], "a list is no use"
    time.sleep(0.3)
    assert first.open(NAME, ABSENT).generation == ABSENT
    assert first.describe(NAME) is None
    assert first.list_states(NAME.owner, "", 10) == ([], False)
    assert store_one(first, 6), "its name can be used again"


def test_a_state_does_not_expire_while_it_is_locked(
    opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (store, redis_store, folder_store):
        monkeypatch.setattr(module, "LEASE_SECONDS", 0.8)
    first = opened()
    base = store_one(first, 5, ttl=0.3)
    mine = lock()
    assert first.open(NAME, base, mine).generation == base
    for _ in range(3):
        time.sleep(0.5)
        first.renew([mine])
    first.write(mine, base, content(6, ttl=0.3))
    assert first.open(NAME, ABSENT).content == content(6, ttl=0.3)
    time.sleep(0.6)
    assert first.open(NAME, ABSENT).generation == ABSENT
    base = store_one(first, 5, ttl=0.3)
    first.open(NAME, base, mine)
    first.unlock(mine)
    time.sleep(0.6)
    assert first.open(NAME, ABSENT).generation == ABSENT


def test_a_state_that_is_only_read_stays_in_lists_and_counts(
    opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_store, "ADMITTED_SECONDS", 0.1)
    first = opened()
    base = store_one(first, 5, ttl=0.5)
    for known in (ABSENT, base, ABSENT, base):
        time.sleep(0.3)
        assert first.open(NAME, known).generation == base
    assert [one.id for one in first.list_states(NAME.owner, "", 10)[0]] == [NAME.id]
    other = lock(StateName(NAME.owner, "other"))
    with pytest.raises(StateQuota):
        first.open(other.name, ABSENT, other, most=1)


def test_a_state_that_is_over_is_not_counted(opened: Open) -> None:
    first = opened()
    for id in "abc":
        mine = lock(StateName(NAME.owner, id))
        first.open(mine.name, ABSENT, mine, most=1)
        first.write(mine, ABSENT, content(5, mine.name, ttl=0.2))
        time.sleep(0.4)


def test_who_finds_a_new_state_locked_leaves_it_counted(opened: Open) -> None:
    first, second = opened(), opened()
    mine, late = lock(), lock()
    base = first.open(NAME, ABSENT, mine, most=1).generation
    with pytest.raises(StateBusy):
        second.open(NAME, ABSENT, late, most=1)
    second.unlock(late)  # a caller need not know whether it was taken
    other = lock(StateName(NAME.owner, "other"))
    if isinstance(first, redis_store.RedisStore):  # a folder counts what is stored
        with pytest.raises(StateQuota):
            second.open(other.name, ABSENT, other, most=1)
    first.write(mine, base, content(5))
    with pytest.raises(StateQuota):
        second.open(other.name, ABSENT, other, most=1)


def test_a_removal_without_its_lock_spares_a_later_version(
    opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (store, redis_store, folder_store):
        monkeypatch.setattr(module, "LEASE_SECONDS", 0.3)
    first, second = opened(), opened()
    base = store_one(first, 5)
    paused = lock()
    first.open(NAME, ABSENT, paused)
    time.sleep(0.6)
    later = store_one(second, 6)
    with pytest.raises(StateConflict):
        first.remove(paused, base)
    assert second.open(NAME, ABSENT).generation == later


def test_an_owner_has_so_many_states_at_most(opened: Open) -> None:
    first, second = opened(), opened()
    for id in "ab":
        mine = lock(StateName.of("emma", id))
        first.open(mine.name, ABSENT, mine, most=2)
        first.write(mine, ABSENT, content(3, mine.name))
    third = lock(StateName.of("emma", "c"))
    with pytest.raises(StateQuota, match="up to 2"):
        second.open(third.name, ABSENT, third, most=2)
    again = lock(StateName.of("emma", "a"))
    there = second.open(again.name, ABSENT, again, most=2)
    assert there.content, "what is there may be replaced"
    second.remove(again, there.generation)
    second.open(third.name, ABSENT, third, most=2)
    second.unlock(third)  # a turn that stored nothing
    fourth = lock(StateName.of("emma", "d"))
    second.open(fourth.name, ABSENT, fourth, most=2)
    other = lock(StateName.of("otto", "a"))
    second.open(other.name, ABSENT, other, most=2)


def test_large_states_are_stored_in_parts(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redis_store, "INLINE_BYTES", 1000)
    monkeypatch.setattr(redis_store, "CHUNK_BYTES", 300)
    wide = StateLayout("model", 257, (StateSpec("cell", 1, (500,)),))
    first, second = opened(), opened()
    for tokens in (1, 2, 3):
        mine = lock()
        base = first.open(NAME, ABSENT, mine).generation
        first.write(mine, base, content(tokens, layout=wide))
        assert second.open(NAME, base).content == content(tokens, layout=wide)
    if isinstance(first, redis_store.RedisStore):
        lifetimes = [first._redis.pttl(key) for key in first._redis.scan_iter("*:[0-9]*")]
        assert lifetimes and min(lifetimes) > 50_000, "parts live as long as their state"
    store_one(first, 4)
    assert second.open(NAME, ABSENT).content == content(4), "smaller than before"
    gone = lock()
    first.remove(gone, first.open(NAME, ABSENT, gone).generation)
    if isinstance(first, redis_store.RedisStore):
        assert first._redis.keys("*") == [], "no part is left"


def attempt(
    of: SharedStore, base: str, content: bytes, barrier: threading.Barrier
) -> str | StateConflict:
    barrier.wait()
    try:
        return of.write(lock(), base, content)
    except StateConflict as error:
        return error


def test_of_many_writers_from_one_version_one_wins(opened: Open) -> None:
    """They hold no lock at all, as servers would that were paused for long."""
    views = [opened() for _ in range(6)]
    base = store_one(views[0], 1)
    for round in range(10):
        barrier = threading.Barrier(len(views))

        with ThreadPoolExecutor(len(views)) as pool:
            writes = [
                pool.submit(attempt, one, base, content(10 * round + i + 2), barrier)
                for i, one in enumerate(views)
            ]
            results = [one.result() for one in writes]
        won = [i for i, result in enumerate(results) if isinstance(result, str)]
        assert len(won) == 1, results
        found = views[0].open(NAME, ABSENT)
        assert found.generation == results[won[0]]
        assert found.content == content(10 * round + won[0] + 2)
        base = found.generation


def test_what_is_over_is_cleared_away(
    opened: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a folder by `tidy`, an hour after it was over or removed; never what is in use."""
    first = opened()
    store_one(first, 1, StateName.of("emma", "over"), ttl=0.1)
    store_one(first, 2, StateName.of("emma", "kept"))
    store_one(first, 3, StateName.of("otto", "gone"))
    gone = lock(StateName.of("otto", "gone"))
    first.remove(gone, first.open(gone.name, ABSENT, gone).generation)
    held = lock(StateName.of("emma", "held"))
    first.open(held.name, ABSENT, held)
    time.sleep(0.2)
    first.tidy()
    if isinstance(first, folder_store.FolderStore):
        assert len(list((tmp_path / "store").rglob("s-*"))) == 4, "not yet"
        monkeypatch.setattr(folder_store, "REMOVED_SECONDS", 0.0)
        first.tidy()
        left = {path.name for path in (tmp_path / "store").rglob("s-*")}
        assert left == {"s-kept", "s-held"}
    assert [one.id for one in first.list_states(NAME.owner, "", 9)[0]] == ["kept"]
    assert first.write(held, ABSENT, content(4, held.name))
    store_one(first, 5, StateName.of("otto", "gone"))
    assert first.open(StateName.of("otto", "gone"), ABSENT).content
