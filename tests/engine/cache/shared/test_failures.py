"""A Redis that dies, hangs, is full or answers nonsense: only what needs it fails."""

from __future__ import annotations

import logging
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engine.cache.shared import client
from engine.cache.shared.connect import open_shared_store
from engine.cache.shared.redis_store import RedisStore
from engine.cache.shared.redis_url import redacted
from engine.cache.shared.store import ABSENT, Lock, StateName
from engine.errors import ConfigError, StoreUnavailable
from engine.protocol.events import Finished
from engine.protocol.requests import KeepState
from tests import redis_server
from tests.engine.cache.shared.test_servers import listed, run_turn, turn
from tests.engine.cache.test_named_states import Talk, code, text
from tests.redis_server import RedisServer, free_port

pytestmark = pytest.mark.skipif(bool(redis_server.MISSING), reason=redis_server.MISSING)


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RedisServer]:
    """A server that a test may harm."""
    monkeypatch.setattr(client, "PATIENCE_SECONDS", 1.5)
    monkeypatch.setattr(client, "RETRY_SECONDS", 0.05)
    monkeypatch.setattr(client, "SLOW_SECONDS", 0.2)
    monkeypatch.setattr(client, "REST_SECONDS", 0.2)
    server = RedisServer(tmp_path / "redis").start()
    yield server
    server.stop()


def served(url: str, **options: Any) -> Talk:
    return Talk(state_store=f"{url}?socket_timeout=0.5&socket_connect_timeout=0.5", **options)


def test_a_store_that_restarts_has_everything(own: RedisServer) -> None:
    one, other = served(own.url), served(own.url)
    other.runner.outside = one.runner.outside
    for at in range(3):
        assert turn([one, other][at % 2], b"abc" if not at else b"", 1) == b"def"[at : at + 1]
        own.kill()
        assert text(one.run(b"xy", 1)) == b"z", "requests without states go on"
        failed = run_turn(one, b"", 1)
        assert code(failed) == "state_store_unavailable"
        assert one.code("get", id="s") == "state_store_unavailable"
        assert one.code("list") == "state_store_unavailable"
        own.start()
    assert turn(other, b"") == b"ghi"
    assert other.ask("get", id="s").states[0].turns == 4


def test_a_turn_survives_a_short_outage_at_its_end(own: RedisServer) -> None:
    one = served(own.url)
    turn(one, b"abc")
    id = one.submit(b"", 4, state="s", keep=KeepState(id="s"))
    while not one.engine._scheduler._decoding.sequences:
        one.step()
    own.kill()
    back = threading.Timer(0.5, own.start)
    back.start()
    one.finish()
    back.join()
    end = one.ends[id]
    assert isinstance(end, Finished) and end.state is not None and end.state.stored
    assert turn(one, b"") == b"klm"


def test_a_turn_whose_state_the_store_never_took_says_so(own: RedisServer) -> None:
    one = served(own.url)
    turn(one, b"abc")
    lasting = KeepState(id="s", must_last=True)
    for keep in (KeepState(id="s"), lasting):
        id = one.submit(b"", 2, state="s", keep=keep)
        while not one.engine._scheduler._decoding.sequences:
            one.step()
        own.kill()
        one.finish()
        own.start()
        end = one.ends[id]
        if keep is lasting:
            assert code(end) == "state_not_stored"
        else:
            assert isinstance(end, Finished) and end.state is not None
            assert end.state.stored is False
    assert turn(one, b"", 1) == b"i", "this server has the turn of which it said so"
    other = served(own.url)
    other.runner.outside = one.runner.outside
    assert turn(other, b"", 1) == b"j", "and now the store has both"


@pytest.mark.parametrize("first", [True, False])
def test_a_turn_that_was_not_stored_can_be_asked_for_again(own: RedisServer, first: bool) -> None:
    """With its number, at the same server: it is carried out again, and then all servers have it.

    `first`: it is the session's first one.
    """
    one, other = served(own.url), served(own.url)
    other.runner.outside = one.runner.outside
    number = 1 if first else 2
    if not first:
        turn(one, b"abc", number=1)
    asked = {"state": "s", "state_optional": True, "keep": KeepState(id="s"), "turn": number}
    id = one.submit(b"xy", 3, **asked)
    while not one.engine._scheduler._decoding.sequences:
        one.step()
    own.kill()
    one.finish()
    own.start()
    end = one.ends[id]
    assert isinstance(end, Finished) and end.state is not None and end.state.stored is False
    again = one.run(b"xy", 3, **asked)
    assert isinstance(again, Finished) and again.state is not None and again.state.stored
    assert again.tokens == end.tokens and again.state.tokens == end.state.tokens
    assert code(run_turn(one, b"xy", number=number)) == "turn_done"
    assert code(run_turn(other, b"xy", number=number)) == "turn_done"
    assert turn(other, b"", 1, number=number + 1) and turn(one, b"", 1, number=number + 2)


def test_a_store_that_hangs_delays_nobody_else(own: RedisServer) -> None:
    one = served(own.url)
    turn(one, b"abc")
    own.pause()
    began = time.monotonic()
    waiting = one.submit(b"", 1, state="s", keep=KeepState(id="s"))
    assert text(one.run(b"xy", 1)) == b"z"
    one.finish()
    assert code(one.ends[waiting]) == "state_store_unavailable"
    assert time.monotonic() - began < 5
    own.go_on()
    for _ in range(50):
        end = run_turn(one, b"", 1)
        if isinstance(end, Finished):
            break
        time.sleep(0.1)
    assert text(end) == b"g"


def test_a_full_store(own: RedisServer) -> None:
    one = served(own.url)
    turn(one, b"abc")
    own.command(b"CONFIG SET maxmemory 1")
    end = run_turn(one, b"", 1)
    assert isinstance(end, Finished) and end.state is not None and end.state.stored is False
    lasting = KeepState(id="t", must_last=True)
    full = one.run(b"abc", 1, keep=lasting)
    assert code(full) == "state_not_stored" and "full" in full.message  # type: ignore[union-attr]
    assert one.code("fork", id="s", target="u") == "state_not_stored"
    assert text(one.run(b"", 1, state="s")) == b"h", "what is there can be read"
    own.command(b"CONFIG SET maxmemory 0")
    assert turn(one, b"", 1) == b"h"
    other = served(own.url)
    other.runner.outside = one.runner.outside
    assert turn(other, b"", 1) == b"i"
    assert listed(other) == ["s"]


@pytest.mark.parametrize(
    "harm",
    [
        b"HSET {key} generation nonsense",
        b"HSET {key} chunks 3",
        b"HSET {key} value nonsense",
        b"HSET {key} value ''",
        b"HSET {key} generation 9-00000000 value ''",
        b"HSET {key} chunks x",
        b"HDEL {key} ttl",
        b"SET {key} nonsense",
    ],
)
def test_a_store_with_nonsense(own: RedisServer, harm: bytes) -> None:
    one = served(own.url)
    turn(one, b"abc")
    store = open_shared_store(own.url, "fake")
    assert isinstance(store, RedisStore)
    key = store._key(StateName.of("", "s"))
    own.command(harm.replace(b"{key}", key.encode()))
    other = served(own.url)
    assert code(run_turn(other, b"", 1)) == "state_store_unavailable"
    assert code(run_turn(other, b"", 1)) == "state_store_unavailable", "its lock was given back"
    assert text(other.run(b"xy", 1)) == b"z"
    own.command(f"DEL {key}".encode())
    assert turn(other, b"abc") == b"def"
    store.close()


def test_a_state_of_another_owner_is_not_taken(own: RedisServer) -> None:
    """If somebody copies it in the store: it says for whom it was written."""
    one = served(own.url)
    assert text(one.run(b"abc", 1, keep=KeepState(id="s"), owner="emma")) == b"d"
    store = open_shared_store(own.url, "fake")
    assert isinstance(store, RedisStore)
    theirs, mine = (store._key(StateName.of(owner, "s")) for owner in ("emma", "otto"))
    own.command(f"COPY {theirs} {mine}".encode())
    assert code(one.run(b"", 1, state="s", owner="otto")) == "state_store_unavailable"
    store.close()


def test_a_server_that_speaks_no_redis() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]

        def answer() -> None:
            while True:
                try:
                    one, _ = listening.accept()
                except OSError:
                    return
                with one:
                    one.recv(1000)
                    one.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        one = Talk(state_store=f"redis://127.0.0.1:{port}/0")
        assert code(run_turn(one, b"abc")) == "state_store_unavailable"
        assert text(one.run(b"xy", 1)) == b"z"
        listening.shutdown(socket.SHUT_RDWR)


def test_a_store_that_is_not_there_yet(own: RedisServer, caplog: pytest.LogCaptureFixture) -> None:
    own.stop()
    with caplog.at_level(logging.WARNING):
        one = served(own.url)
    assert "does not answer" in caplog.text
    assert code(run_turn(one, b"abc")) == "state_store_unavailable"
    own.start()
    assert turn(one, b"abc") == b"def"


def test_start_up_warns_of_a_store_that_may_lose_states(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    careless = ("--appendonly", "no", "--maxmemory-policy", "allkeys-lru")
    server = RedisServer(tmp_path, *careless).start()
    with caplog.at_level(logging.WARNING):
        served(server.url).engine.close()
    assert "appendonly is not yes" in caplog.text
    assert "maxmemory-policy is allkeys-lru" in caplog.text
    caplog.clear()
    for line in (b"appendonly yes", b"maxmemory-policy noeviction", b"appendfsync everysec"):
        server.command(b"CONFIG SET " + line)
    with caplog.at_level(logging.WARNING):
        served(server.url).engine.close()
    assert "appendfsync is everysec" in caplog.text and "appendonly" not in caplog.text
    server.command(b"CONFIG SET appendfsync always")
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        served(server.url).engine.close()
    assert not caplog.text
    server.stop()


def test_secrets_are_not_shown(own: RedisServer, caplog: pytest.LogCaptureFixture) -> None:
    own.command(b"CONFIG SET requirepass geheim")
    for url in (own.url, own.url.replace("//", "//:wrong@")):
        one = served(url)
        failed = run_turn(one, b"abc")
        assert code(failed) == "state_store_unavailable"
        assert "wrong" not in failed.message  # type: ignore[union-attr]
    good = own.url.replace("//", "//:geheim@")
    assert turn(served(good), b"abc") == b"def"
    assert "geheim" not in caplog.text and "wrong@" not in caplog.text
    assert redacted("redis://me:geheim@host:1/2?password=geheim") == "redis://***@host:1/2"


@pytest.mark.parametrize(
    "url",
    [
        "", "redis", "http://host", "redis+other://host", "redis://host:port", "file://", "file:///",
        "file://host/folder", "redis+sentinel://host", "redis+sentinel://host/name/x",
        "redis://host?socket_timeout=soon", "redis://[::1", "redis+cluster://",
    ],
)  # fmt: skip
def test_wrong_urls(url: str) -> None:
    with pytest.raises(ConfigError, match="state_store") as error:
        open_shared_store(url, "model")
    assert error.value.param == "state_store"


@pytest.mark.parametrize("kind", ["redis", "rediss+sentinel", "redis+cluster"])
@pytest.mark.parametrize("password", ["se/cret", "se?cret", "se#cret", "12/34", "12?34", "a/b@c?d"])
def test_a_password_that_is_not_quoted_is_not_shown(kind: str, password: str) -> None:
    with pytest.raises(ConfigError, match="%2F, %3F and %23") as error:
        open_shared_store(f"{kind}://:{password}@host:6379/name", "model")
    assert "//***@host:6379" in error.value.message
    for part in password.replace("?", "/").replace("#", "/").replace("@", "/").split("/"):
        assert f":{part}" not in error.value.message and f"{part}@" not in error.value.message


@pytest.mark.parametrize("host", ["host", "host:1", "[::1]:1"])
def test_an_option_may_have_any_character(host: str) -> None:
    open_shared_store(f"redis://{host}/0?password=a@b", "model").close()
    open_shared_store(f"redis+sentinel://other:2,{host}/name?password=a@b", "model").close()


def test_a_folder_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="state_store"):
        open_shared_store(f"file://{tmp_path}/file", "model")


def test_a_master_that_sentinels_name(own: RedisServer, tmp_path: Path) -> None:
    port = free_port()
    config = tmp_path / "sentinel.conf"
    config.write_text(f"port {port}\nsentinel monitor states 127.0.0.1 {own.port} 1\n")
    assert redis_server.PROGRAM is not None
    sentinel = subprocess.Popen(
        [redis_server.PROGRAM, str(config), "--sentinel"], stdout=subprocess.DEVNULL
    )
    try:
        url = f"redis+sentinel://127.0.0.1:1,127.0.0.1:{port}/states/0"
        for _ in range(100):
            one = Talk(state_store=url)
            end = run_turn(one, b"abc")
            if isinstance(end, Finished):
                break
            time.sleep(0.05)
        assert text(end) == b"def"
        other = served(own.url)
        other.runner.outside = one.runner.outside
        assert turn(other, b"") == b"ghi"
    finally:
        sentinel.kill()
        sentinel.wait()


def test_a_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One node that has all slots: keys of one script must be of one slot there too."""
    monkeypatch.setattr("engine.cache.shared.redis_store.INLINE_BYTES", 500)
    monkeypatch.setattr("engine.cache.shared.redis_store.CHUNK_BYTES", 300)
    server = RedisServer(tmp_path, "--cluster-enabled", "yes").start()
    server.command(b"CLUSTER ADDSLOTSRANGE 0 16383")
    for _ in range(200):
        if b"cluster_state:ok" in server.command(b"CLUSTER INFO"):
            break
        time.sleep(0.05)
    url = f"redis+cluster://127.0.0.1:{server.port}"
    one, other = Talk(state_store=url), Talk(state_store=url)
    other.runner.outside = one.runner.outside
    assert turn(one, b"abc") == b"def"
    assert turn(other, b"") == b"ghi"
    assert turn(one, b"") == b"jkl"
    assert listed(other) == ["s"]
    assert other.code("move", id="s", target="t") == "ok"
    assert one.code("delete", id="t") == "ok"
    assert listed(one) == []
    store = open_shared_store(url, "fake")
    locks = [Lock(StateName.of("", str(i)), f"{i:032x}") for i in range(5)]
    for lock in locks:
        store.open(lock.name, ABSENT, lock)
    store.renew(locks)
    store.close()
    server.stop()
    with pytest.raises(StoreUnavailable):
        open_shared_store(url, "fake").open(StateName.of("", "s"), ABSENT)
