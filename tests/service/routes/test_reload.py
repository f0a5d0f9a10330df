"""POST /admin/reload: another model takes over, and nobody notices but by the answers."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from pydantic import SecretStr

from engine.models.loader import save_model
from engine.models.minrnn.lm import LM
from tests.models.folders import UNREADABLE
from tests.models.variants import build
from tests.service.harness import Service, fake_runner, running, save_byte_tokenizer
from tests.service.inference.test_restart import (
    ENDLESS,
    SHORT,
    error_of,
    is_ready,
    restarts,
    starting,
    streaming,
    until,
)
from tests.service.process import Process, children, serving

KEY = "k" * 32
RELOAD = "/admin/reload"
# Of what tests/models/test_checkpoint.py knows: each is an engine that is started. One that is
# found before the weights are opened, one on opening, one on reading.
UNREAD = (
    pytest.param("folder-leads-nowhere", marks=pytest.mark.slow),
    pytest.param("model.safetensors-is-a-pipe", marks=pytest.mark.slow),
    "weights-cut-off",
)


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    """Two models."""
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        save_byte_tokenizer(tmp_path / name)
    return tmp_path / "one", tmp_path / "two"


@contextmanager
def reloadable(folder: Path, **settings: Any) -> Iterator[tuple[Process, httpx.Client]]:
    with starting(folder, admin_key=KEY, **settings) as (process, client):
        yield process, client


def reload(client: httpx.Client, model: Path | str | None = None) -> httpx.Response:
    """On a connection of its own: others may be busy."""
    body = {} if model is None else {"model": str(model)}
    headers = {"authorization": f"Bearer {KEY}"}
    return httpx.post(
        client.base_url.copy_with(path=RELOAD), json=body, headers=headers, timeout=60
    )


def later(client: httpx.Client, model: Path | str | None = None) -> Future[httpx.Response]:
    pool = ThreadPoolExecutor(1)
    answer = pool.submit(reload, client, model)
    pool.shutdown(wait=False)
    return answer


def served(client: httpx.Client) -> str:
    name: str = client.get("/v1/models").json()["data"][0]["id"]
    return name


def test_the_old_model_finishes_what_it_has_and_the_new_one_takes_what_comes(
    folders: tuple[Path, Path],
) -> None:
    one, two = folders
    with reloadable(one) as (process, client):
        (old,) = children(process.popen.pid)
        with streaming(client, {**ENDLESS, "max_tokens": 2000}) as lines:
            answer = reload(client, two)
            assert answer.status_code == 200
            assert {**answer.json(), "seconds": 0} == {
                "model": "two",
                "root": "two",
                "fingerprint": "fake",
                "seconds": 0,
            }
            assert served(client) == "two"
            assert client.post("/v1/generate", json=SHORT).json()["model"] == "two"
            assert len(children(process.popen.pid)) == 2  # the old one is busy
            slots = gauge(client, "minserve_state_slots_total")
            assert slots == 8  # of both
            rest = list(lines)
        assert (len(rest), rest[-1]) == (2000, "data: [DONE]")
        until(lambda: old not in children(process.popen.pid))
        assert gauge(client, "minserve_state_slots_total") == 4
        assert restarts(client) == 0
        # And the same model again, as its folder is now.
        answer = reload(client)
        assert answer.status_code == 200 and answer.json()["root"] == "two"
        until(lambda: len(children(process.popen.pid)) == 1)
        process.popen.send_signal(signal.SIGTERM)
        assert process.exit_code() == 0
        assert not any("Traceback" in line for line in process.lines)


def gauge(client: httpx.Client, name: str) -> float:
    """A series without labels."""
    lines = client.get("/metrics").text.splitlines()
    (line,) = [line for line in lines if line.startswith(f"{name} ")]
    return float(line.split()[1])


def test_no_request_is_dropped(folders: tuple[Path, Path]) -> None:
    over = threading.Event()
    statuses: list[int] = []

    def ask(url: str) -> None:
        with httpx.Client(base_url=url, timeout=60) as client:
            while not over.is_set():
                answer = client.post("/v1/generate", json={**SHORT, "max_tokens": 20})
                statuses.append(answer.status_code)
                assert "error" not in answer.text

    with reloadable(folders[0]) as (process, client), ThreadPoolExecutor(4) as pool:
        askers = [pool.submit(ask, process.url) for _ in range(4)]
        try:
            for folder in (folders[1], folders[0], None):
                assert reload(client, folder).status_code == 200
        finally:
            over.set()
        for asker in askers:
            asker.result()
    assert len(statuses) > 20 and set(statuses) == {200}


@pytest.mark.parametrize("name", UNREAD)
def test_a_model_that_cannot_be_read_changes_nothing(tmp_path: Path, name: str) -> None:
    """With the engine's own loading."""
    model = build({"cell": "mingru", "vocab_size": 257, "eos_token_id": 256})
    good = save_byte_tokenizer_in(tmp_path / "good", model)
    options = {"model": str(good), "device": "cpu", "threads": 1, "admin_key": KEY}
    with serving(engine="engine.engine:Engine.load", **options) as process:
        process.said("ready: ")
        with httpx.Client(base_url=process.url, timeout=60) as client:
            spoil, says = UNREADABLE[name]
            bad = save_byte_tokenizer_in(tmp_path / name, model)
            spoil(bad)
            answer = reload(client, bad)
            assert answer.status_code == 400, answer.text
            error = answer.json()["error"]
            assert (error["param"], error["code"]) == ("model", "checkpoint_error")
            assert says in error["message"]
            assert error["message"].endswith("; the present model keeps serving")
            assert served(client) == "good"
            assert client.post("/v1/generate", json=SHORT).json()["model"] == "good"
        assert not any("Traceback" in line for line in process.lines)


def save_byte_tokenizer_in(folder: Path, model: LM) -> Path:
    save_model(folder, model, model.config, "float32")
    return save_byte_tokenizer(folder)


def test_a_model_that_cannot_be_loaded_changes_nothing(folders: tuple[Path, Path]) -> None:
    one, two = folders
    with reloadable(one, load_timeout=20) as (process, client), streaming(client) as lines:
        (old,) = children(process.popen.pid)
        (two / "broken").touch()
        answer = reload(client, two)
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert (error["param"], error["code"]) == ("model", "checkpoint_error")
        assert "two: the checkpoint cannot be used" in error["message"]
        # What the API processes cannot read is no model either.
        (two / "broken").unlink()
        (two / "tokenizer.json").write_text("{")
        answer = reload(client, two)
        assert answer.status_code == 400
        assert "tokenizer.json" in answer.json()["error"]["message"]
        # An engine that dies of it.
        (two / "slow").write_text("60")
        waiting = later(client, two)
        new = until(lambda: [pid for pid in children(process.popen.pid) if pid != old])[0]
        os.kill(new, signal.SIGKILL)
        answer = waiting.result()
        assert answer.status_code == 500
        assert "SIGKILL" in answer.json()["error"]["message"]
        assert served(client) == "one" and is_ready(client)
        next(lines)  # still going on
        assert children(process.popen.pid) == [old]
        assert client.post("/v1/generate", json=SHORT).json()["model"] == "one"


def test_one_reload_at_a_time(folders: tuple[Path, Path]) -> None:
    with reloadable(folders[0]) as (process, client):
        (folders[1] / "slow").write_text("60")
        first = later(client, folders[1])
        until(lambda: len(children(process.popen.pid)) == 2)
        second = reload(client)
        assert second.status_code == 409
        assert second.json()["error"]["code"] == "reload_under_way"
        (folders[1] / "slow").unlink()
        assert first.result().status_code == 200


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_reload_goes_on_if_nobody_waits_for_it(folders: tuple[Path, Path], workers: int) -> None:
    one, two = folders
    with reloadable(one, api_workers=workers) as (process, client):
        until(lambda: sum(": ready: " in line for line in process.lines) == workers)
        (two / "slow").write_text("60")
        with pytest.raises(httpx.ReadTimeout):
            client.post(RELOAD, json={"model": str(two)}, headers={"x-api-key": KEY}, timeout=0.3)
        (two / "slow").unlink()
        until(lambda: served(client) == "two")
        assert client.post("/v1/generate", json=SHORT).json()["model"] == "two"
        until(lambda: reload(client, one).status_code == 200)  # the next one is not in its way
        process.popen.send_signal(signal.SIGTERM)
        assert process.exit_code() == 0


def test_the_old_engine_dies_while_the_new_one_loads(folders: tuple[Path, Path]) -> None:
    one, two = folders
    with reloadable(one) as (process, client), streaming(client) as lines:
        (old,) = children(process.popen.pid)
        (two / "slow").write_text("60")
        waiting = later(client, two)
        until(lambda: len(children(process.popen.pid)) == 2)
        os.kill(old, signal.SIGKILL)
        *_, last = lines
        assert error_of(last)["code"] == "engine_dead"
        assert client.get("/ready").status_code == 503
        (two / "slow").unlink()
        assert waiting.result().status_code == 200
        assert is_ready(client) and served(client) == "two"
        assert restarts(client) == 0  # what was being loaded has taken its place


@pytest.mark.slow
def test_the_old_engine_dies_and_the_new_one_cannot_be_loaded(folders: tuple[Path, Path]) -> None:
    one, two = folders
    with reloadable(one) as (process, client):
        (old,) = children(process.popen.pid)
        (two / "slow").write_text("60")
        (two / "broken").touch()
        waiting = later(client, two)
        until(lambda: len(children(process.popen.pid)) == 2)
        os.kill(old, signal.SIGKILL)
        until(lambda: not is_ready(client))
        (two / "slow").unlink()
        assert waiting.result().status_code == 400
        until(lambda: is_ready(client))
        assert served(client) == "one" and restarts(client) == 1


@pytest.mark.slow
def test_an_engine_that_died_after_a_reload_starts_with_the_new_model(
    folders: tuple[Path, Path],
) -> None:
    with reloadable(folders[0]) as (process, client):
        assert reload(client, folders[1]).status_code == 200
        (worker,) = until(
            lambda: (found := children(process.popen.pid)) and found[1:] == [] and found
        )
        os.kill(worker, signal.SIGKILL)
        until(lambda: restarts(client) == 1 and is_ready(client))
        assert served(client) == "two"


@pytest.mark.slow
def test_an_old_engine_that_dies_takes_only_its_own_requests_along(
    folders: tuple[Path, Path],
) -> None:
    with reloadable(folders[0]) as (process, client), streaming(client) as lines:
        (old,) = children(process.popen.pid)
        assert reload(client, folders[1]).status_code == 200
        with streaming(httpx.Client(base_url=process.url, timeout=60)) as others:
            os.kill(old, signal.SIGKILL)
            *_, last = lines
            assert error_of(last)["code"] == "engine_dead"
            next(others)
            assert is_ready(client) and restarts(client) == 0


def test_a_drain_gives_a_reload_up(folders: tuple[Path, Path]) -> None:
    with reloadable(folders[0]) as (process, client):
        (folders[1] / "slow").write_text("60")
        waiting = later(client, folders[1])
        until(lambda: len(children(process.popen.pid)) == 2)
        process.popen.send_signal(signal.SIGTERM)
        answer = waiting.result()
        assert answer.status_code == 503 and answer.json()["error"]["code"] == "draining"
        assert process.popen.wait(20) == 0
        assert not any("Traceback" in line for line in process.lines)


@pytest.mark.parametrize("body", [b"[]", b'{"model": 5}', b'{"modell": "x"}', b'{"model": ""}'])
async def test_bad_bodies(byte_folder: Path, body: bytes) -> None:
    async with running(fake_runner(byte_folder), admin_key=SecretStr(KEY)) as service:
        headers = {"authorization": f"Bearer {KEY}", "content-type": "application/json"}
        answer = await service.http.post(RELOAD, content=body, headers=headers)
        assert answer.status_code == 400, answer.text


async def test_it_asks_for_the_admin_key(byte_folder: Path, service: Service) -> None:
    assert (await service.http.post(RELOAD, json={})).status_code == 404
    assert RELOAD not in (await service.http.get("/openapi.json")).json()["paths"]
    async with running(fake_runner(byte_folder), admin_key=SecretStr(KEY)) as guarded:
        assert (await guarded.http.post(RELOAD, json={})).status_code == 401
        schema = (await guarded.http.get("/openapi.json")).json()
        assert "403" in schema["paths"][RELOAD]["post"]["responses"]
        assert json.dumps(schema["paths"][RELOAD]).count("shakespeare-minlstm") == 1
