"""Engines of several servers on one store: a session goes on at any of them, one turn at a time."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from engine.cache import named_states
from engine.cache.shared import client, folder_store, redis_store, store
from engine.protocol.events import Finished
from engine.protocol.failed import Failed
from engine.protocol.requests import KeepState
from engine.protocol.state_calls import StateCall
from tests.engine.cache.test_named_states import Talk, code, text

Server = Callable[..., Talk]


@pytest.fixture
def server(url: str) -> Iterator[Server]:
    """Starts one more server on the store."""
    talks: list[Talk] = []

    def another(**options: Any) -> Talk:
        talk = Talk(state_store=url, **options)
        if talks:
            talk.runner.outside = talks[0].runner.outside
        talks.append(talk)
        return talk

    yield another
    for talk in talks:
        talk.engine.close()


def turn(talk: Talk, more: bytes, count: int = 3, number: int = 0, id: str = "s") -> bytes:
    """A turn of a session."""
    return text(run_turn(talk, more, count, number, id))


def run_turn(
    talk: Talk, more: bytes, count: int = 3, number: int = 0, id: str = "s"
) -> Finished | Failed:
    keep = KeepState(id=id)
    return talk.run(more, count, state=id, state_optional=True, keep=keep, turn=number)


def listed(talk: Talk, **fields: Any) -> list[str]:
    return [state.id for state in talk.ask("list", **fields).states]


def expire_soon(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """Let locks end so soon."""
    for module in (store, redis_store, folder_store, client):
        monkeypatch.setattr(module, "LEASE_SECONDS", seconds)
    monkeypatch.setattr(client, "RENEW_SECONDS", seconds / 4)
    monkeypatch.setattr(client, "LOCK_WATCH_SECONDS", seconds / 10)


@pytest.mark.parametrize("options", [{}, {"share_slots": 0}, {"most_steps": 4, "overlaps": True}])
def test_a_session_changes_servers_at_every_turn(server: Server, options: dict[str, Any]) -> None:
    servers = [server(**options) for _ in range(3)]
    assert turn(servers[0], b"abc") == b"def"
    expected, tokens = b"ghijklmnopqrstuvw", 6
    for at in range(5):
        assert turn(servers[(at + 1) % 3], b"") == expected[3 * at : 3 * at + 3]
        tokens += 3
        for one in servers:
            (told,) = one.ask("get", id="s").states
            assert (told.tokens, told.turns, told.stored) == (tokens, at + 2, True)


def test_a_turn_at_the_same_server_reads_nothing_from_the_store(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = server(), server()
    brought: list[int] = []
    parse = client.parse
    monkeypatch.setattr(client, "parse", lambda *args: brought.append(1) or parse(*args))
    for _ in range(4):
        turn(one, b"a")
    assert not brought
    turn(other, b"a")
    turn(other, b"a")
    assert len(brought) == 1


def test_states_without_a_row_are_read_again(server: Server) -> None:
    one, other = server(share_slots=1, host_rows=1), server(share_slots=0, host_rows=2)
    for at in range(20):
        assert turn(one, b"abc", 1, id=f"s{at}") == b"d"
    for at in range(20):
        assert turn(other, b"", 2, id=f"s{at}") == b"ef"
        assert text(one.run(b"", 1, state=f"s{at}")) == b"g"


def test_one_turn_at_a_time(server: Server) -> None:
    one, other = server(), server()
    turn(one, b"abc")
    under_way = one.submit(b"", 4, state="s", keep=KeepState(id="s"))
    while not one.engine._scheduler._decoding.sequences:
        one.step()
    assert code(run_turn(other, b"", 1)) == "state_busy"
    late = one.submit(b"", 1, state="s", keep=KeepState(id="s"))
    one.step()
    assert code(one.ends[late]) == "state_busy"
    for action in ("delete", "move"):
        assert other.code(action, id="s") == "state_busy"  # type: ignore[arg-type]
    assert other.code("fork", id="s", target="s") == "state_busy"
    assert text(other.run(b"", 1, state="s")) == b"g", "as it is, it may be used"
    one.engine.abort("c", [under_way])
    one.finish()
    assert turn(other, b"", 1) == b"g", "a turn that was aborted has not been"


def test_an_answer_ends_when_every_server_can_go_on_from_it(server: Server) -> None:
    one, other = server(), server()
    for more in (b"abc", b"k", b"r"):
        id = one.submit(more, 2, state="s", state_optional=True, keep=KeepState(id="s"))
        while id not in one.ends:
            one.step()
        told = one.ends[id]
        assert isinstance(told, Finished) and told.state is not None
        assert other.ask("get", id="s").states[0].tokens == told.state.tokens
        assert other.code("move", id="s", target="t") == "ok", "nobody has it any more"
        assert other.code("move", id="t", target="s") == "ok"


def test_calls_are_seen_by_all(server: Server) -> None:
    one, other = server(), server()
    turn(one, b"abc")
    for here, there in ((one, other), (other, one)):
        content = here.ask("export", id="s").content
        assert here.code("fork", id="s", target="t") == "ok"
        assert listed(there) == ["s", "t"] and there.code("get", id="t") == "ok"
        assert here.code("import", content=content, target="u") == "ok"
        assert text(there.run(b"", 1, state="u")) == b"g"
        assert here.code("move", id="u", target="v") == "ok"
        assert listed(there) == ["s", "t", "v"]
        assert there.code("get", id="u") == "state_not_found"
        assert here.code("delete", id="t") == here.code("delete", id="v") == "ok"
        assert there.code("get", id="t") == "state_not_found"
        assert code(there.run(b"a", 1, state="t")) == "state_not_found"
        assert listed(there) == ["s"]
        assert there.code("delete", id="v") == "state_not_found"
    for bad in ("import", "fork"):
        fields = {"content": b"nothing"} if bad == "import" else {"id": "none"}
        assert one.code(bad, target="w", **fields) != "ok"  # type: ignore[arg-type]
        assert other.code("fork", id="s", target="w") == "ok", "its lock was given back"
        assert other.code("delete", id="w") == "ok"


def test_new_ids_and_owners(server: Server) -> None:
    one, other = server(), server()
    end = one.run(b"abc", 1, keep=KeepState(), owner="emma")
    assert isinstance(end, Finished) and end.state is not None and end.state.stored
    id = end.state.id
    assert text(other.run(b"", 1, state=id, owner="emma")) == b"e"
    assert code(other.run(b"", 1, state=id, owner="otto")) == "state_not_found"
    assert code(other.run(b"", 1, state=id)) == "state_not_found"
    assert listed(other, owner="otto") == [] and listed(other, owner="emma") == [id]
    assert other.code("delete", id=id, owner="otto") == "state_not_found"
    assert other.code("get", id="a/b", owner="emma") == "state_not_found"
    assert code(other.run(b"a", 1, state="../x", owner="emma")) == "state_not_found"
    assert code(other.run(b"a", 1, keep=KeepState(id="a/b"))) == "invalid_request"


def test_turns_are_numbered(server: Server) -> None:
    one, other = server(), server()
    assert code(run_turn(one, b"abc", number=2)) == "turn_ahead"
    assert turn(one, b"abc", number=1) == b"def"
    repeated = run_turn(other, b"abc", number=1)
    assert code(repeated) == "turn_done"
    assert isinstance(repeated, Failed) and "1 turns and has 6 tokens" in repeated.message
    assert repeated.param == "turn"
    assert turn(other, b"", number=2) == b"ghi"
    assert code(run_turn(one, b"", number=2)) == "turn_done"
    assert code(run_turn(one, b"", number=4)) == "turn_ahead"
    assert turn(one, b"", number=3) == b"jkl"
    assert turn(one, b"") == b"mno", "a turn without a number is the next one"
    assert code(run_turn(other, b"", number=4)) == "turn_done"


def test_a_snapshot_has_had_its_turns(server: Server) -> None:
    one = server(max_states=1)
    turn(one, b"abc")
    content = one.ask("export", id="s").content
    (brief,) = one.ask("import", content=content, brief=True).states
    assert code(one.run(b"", 1, state=brief.id, turn=1)) == "turn_done"
    assert text(one.run(b"", 1, state=brief.id, turn=2)) == b"g"
    assert one.code("delete", id=brief.id) == "ok"
    assert one.code("get", id=brief.id) == "state_not_found"


def test_the_quota_counts_the_states_of_all_servers(server: Server) -> None:
    one, other = server(max_states=2), server(max_states=2)
    turn(one, b"a", id="a")
    turn(other, b"a", id="b")
    assert code(run_turn(one, b"a", id="c")) == "state_quota"
    assert one.code("fork", id="a", target="c") == "state_quota"
    assert one.code("move", id="a", target="c") == "ok", "there are not more of them then"
    assert one.code("move", id="c", target="a") == "ok"
    assert one.code("move", id="a", target="a") == "ok"
    for action in ("delete", "move"):
        assert one.code(action, id="none") == "state_not_found"  # type: ignore[arg-type]
    assert turn(one, b"", id="b") == b"efg"
    assert other.code("delete", id="a") == "ok"
    assert turn(one, b"a", id="c") == b"bcd"


def test_a_session_of_a_server_that_has_died_goes_on(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    expire_soon(monkeypatch, 0.8)
    one, other = server(), server()
    turn(one, b"abc")
    one.submit(b"", 4, state="s", keep=KeepState(id="s"))
    while not one.engine._scheduler._decoding.sequences:
        one.step()
    shared = one.engine._cache.shared
    assert shared is not None
    shared._closed.set()  # it renews nothing any more
    assert turn(other, b"", 2) == b"gh", "as soon as the lock has ended"
    shared._closed.clear()
    one.finish()
    assert code(one.ends[one.next]) == "state_conflict", "it was paused, and comes too late"
    assert turn(one, b"", 2) == b"ij"


def test_a_turn_that_takes_long_keeps_its_lock(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    expire_soon(monkeypatch, 0.4)
    one, other = server(), server()
    turn(one, b"abc")
    one.submit(b"", 8, state="s", keep=KeepState(id="s"))
    while not one.engine._scheduler._decoding.sequences:
        one.step()
    time.sleep(1.0)
    assert code(run_turn(other, b"")) == "state_busy"
    one.finish()
    assert text(one.ends[one.next]) == b"ghijklmn"
    assert turn(other, b"") == b"opq"


def test_a_state_that_takes_long_to_read_stays_locked(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    expire_soon(monkeypatch, 0.4)
    one, other = server(), server()
    turn(one, b"abc")
    cache = other.engine._cache
    assert cache.shared is not None
    opens, locked = cache.shared._store.open, threading.Event()

    def slow(*args: Any) -> store.Opened:
        opened = opens(*args)
        locked.set()
        time.sleep(1.2)
        return opened

    monkeypatch.setattr(cache.shared._store, "open", slow)
    id = other.submit(b"", 2, state="s", keep=KeepState(id="s"))
    assert locked.wait(10)
    time.sleep(0.8)
    assert code(run_turn(one, b"", 1)) == "state_busy"
    other.finish()
    assert text(other.ends[id]) == b"gh"


def test_requests_that_leave_while_the_store_is_asked_leave_no_lock(server: Server) -> None:
    one, other = server(), server()
    turn(one, b"abc")
    for _ in range(5):
        id = one.submit(b"", 2, state="s", keep=KeepState(id="s"))
        one.engine.abort("c", [id])
        one.finish()
        end = one.ends[id]
        assert isinstance(end, Finished) and end.reason == "abort"
    late = one.submit(b"", 2, state="s", keep=KeepState(id="s"), timeout=0.0)
    one.finish()
    assert isinstance(one.ends[late], Finished | Failed)
    for _ in range(200):
        one.engine.step()
        end = run_turn(other, b"", 1)
        if isinstance(end, Finished):
            break
    assert isinstance(end, Finished)


@pytest.mark.parametrize("leaves", ["aborted", "all aborted"])
def test_requests_that_leave_just_after_the_store_has_answered_leave_no_lock(
    server: Server, leaves: str
) -> None:
    one, other = server(), server()
    turn(one, b"abc")
    id = one.submit(b"", 2, state="s", keep=KeepState(id="s"))
    cache = one.engine._cache
    while not cache._fetched:  # as an engine without a round waits
        cache.wait(0.1)
    if leaves == "aborted":
        one.engine.abort("c", [id])
    else:
        one.engine.abort_all()
    one.finish()
    end = one.ends[id]
    assert isinstance(end, Finished) and end.reason == "abort"
    assert turn(other, b"") == b"ghi"


def test_a_call_gives_no_lock_back_that_a_request_has(server: Server) -> None:
    one, other = server(), server()
    id = one.submit(b"abc", 2, keep=KeepState(id="s"))
    cache = one.engine._cache
    while not cache._fetched:
        cache.wait(0.1)
    one.engine.ask("c", StateCall(call=1, action="export", id="s"))
    while not (replies := one.engine.replies()):
        cache.wait(0.1)
    assert replies[0][1].failed is not None and replies[0][1].failed.code == "state_not_found"
    one.finish()
    assert text(one.ends[id]) == b"de"
    assert turn(other, b"") == b"fgh"


def test_a_server_that_ends_leaves_no_lock(server: Server) -> None:
    one, other = server(), server()
    turn(one, b"abc")
    one.engine.ask("c", StateCall(call=1, action="fork", id="s", target="t"))
    one.engine.ask("c", StateCall(call=2, action="move", id="s", target="u"))
    one.submit(b"x", 3, keep=KeepState(id="v"))
    one.engine.abort_all()
    one.engine.close()
    shared = other.engine._cache.shared
    assert shared is not None
    for id in "stuv":
        name = store.StateName.of("", id)
        shared._store.open(name, store.ABSENT, store.Lock(name, "0" * 32))


def test_a_copy_that_is_lost_while_the_store_is_asked_is_read_again(server: Server) -> None:
    """The store has only said that the version is known, and no session may begin anew."""
    one = server()
    turn(one, b"abc")
    id = one.submit(b"", 2, state="s", state_optional=True, keep=KeepState(id="s"))
    one.engine._cache.states._remove(("", "s"))
    one.finish()
    assert text(one.ends[id]) == b"gh"
    assert turn(one, b"", 1) == b"i"


def test_a_session_that_was_fetched_is_not_forgotten_before_its_turn(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its turn would begin a new text, and replace what the store has."""
    one, other = server(), server()
    turn(one, b"abc")
    monkeypatch.setattr(named_states, "SPARE_NAMES", -1000)  # too many are remembered
    states = other.engine._cache.states
    monkeypatch.setattr(states, "_bring", lambda *args: None)  # no row is free
    assert turn(other, b"p") == b"qrs"
    assert other.ask("get", id="s").states[0].tokens == 10


def test_a_session_that_was_fetched_does_not_expire_before_its_turn(server: Server) -> None:
    one = server()
    turn(one, b"abc")
    id = one.submit(b"p", 3, state="s", state_optional=True, keep=KeepState(id="s"))
    cache = one.engine._cache
    while not cache._fetched:
        cache.wait(0.1)
    named = cache.states._index.get(("", "s"))
    assert named is not None
    cache.states._index.set_expiry(named, time.time() - 1)
    one.finish()
    assert text(one.ends[id]) == b"qrs"
    assert one.ask("get", id="s").states[0].tokens == 10


def test_a_new_text_never_replaces_one_that_the_store_has(server: Server) -> None:
    """Whatever this server has forgotten: it holds the lock of a version, so there is one."""
    one = server()
    turn(one, b"abc")
    states = one.engine._cache.states

    def found(key: Any, what: Any) -> bool:
        told = states.on_found(key, what)
        states._remove(key)
        return told

    shared = one.engine._cache.shared
    assert shared is not None
    shared.on_found = found
    assert code(run_turn(one, b"", 1)) == "state_store_unavailable"
    shared.on_found = states.on_found
    assert turn(one, b"", 1) == b"g"


def test_several_requests_for_one_session_at_once(server: Server) -> None:
    one, other = server(), server()
    turn(one, b"abc")
    ids = [one.submit(b"", 1, state="s", keep=KeepState(id="s")) for _ in range(4)]
    one.finish()
    served = [id for id in ids if isinstance(one.ends[id], Finished)]
    assert len(served) == 1
    assert {code(one.ends[id]) for id in set(ids) - set(served)} == {"state_busy"}
    assert turn(other, b"", 1) == b"h"


def test_what_cannot_be_served_gives_its_lock_back(server: Server) -> None:
    one, other = server(), server()
    assert code(one.run(b"", 1, state="s", state_optional=True, keep=KeepState(id="s"))) == (
        "invalid_request"
    )
    assert code(one.run(b"a", 1, state="none", keep=KeepState(id="s"))) == "state_not_found"
    assert turn(other, b"abc") == b"def"
    assert other.code("import", content=b"x", target="s") == "state_malformed"
    assert turn(one, b"") == b"ghi"


def test_any_interleaving_equals_one_server(server: Server) -> None:
    """Turns, forks, deletions and reads at random servers, against a plain list of texts."""
    servers = [server(share_slots=2, host_rows=2) for _ in range(3)]
    rng = random.Random(5)
    texts: dict[str, bytes] = {}
    for _ in range(120):
        talk, id = rng.choice(servers), rng.choice("abcde")
        match rng.randrange(8):
            case 0 if id in texts:
                assert talk.code("delete", id=id) == "ok"
                del texts[id]
            case 1 if id in texts:
                target = rng.choice("abcde")
                assert talk.code("fork", id=id, target=target) == "ok"
                texts[target] = texts[id]
            case 2:
                assert listed(talk) == sorted(texts)
            case 3:
                there = "ok" if id in texts else "state_not_found"
                assert talk.code("export", id=id) == there
            case _:
                more = bytes(rng.choices(b"abcdefghij", k=rng.randrange(1, 4)))
                answer = turn(talk, more, 2, id=id)
                last = more[-1]
                assert answer == bytes([last + 1, last + 2])
                texts[id] = texts.get(id, b"") + more + answer
    for id, expected in texts.items():
        (told,) = rng.choice(servers).ask("get", id=id).states
        assert told.tokens == len(expected)
        assert bytes(told.recent) == expected[-4:]


def test_a_folder_beside_the_store_has_cached_prompts(server: Server, tmp_path: Path) -> None:
    """Named states are in the store; a prompt is found in the folder after a restart."""
    options: dict[str, Any] = {"state_folder": str(tmp_path / "own"), "disk_cache_bytes": 10**8}
    one = server(**options)
    long = bytes(range(97, 107)) * 60
    assert text(one.run(long, 1)) == b"k"
    assert turn(one, b"abc") == b"def"
    one.engine.close()
    files = [path for path in (tmp_path / "own").rglob("*.safetensors")]
    assert files and {path.parent.name for path in files} == {"prefixes"}
    again = server(**options)
    end = again.run(long, 1)
    assert isinstance(end, Finished) and end.cached_tokens > 500
    assert turn(again, b"") == b"ghi"
