"""Kept states and sessions with a real server and model: exact, and there after a restart."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from threading import Event
from typing import Any

import httpx
import pytest

from tests.e2e.conftest import Server
from tests.service.process import running_module

PROMPT = "ROMEO:\nBut, soft! what light through yonder window breaks?\n"


def ask(url: str, path: str, body: Any, status: int = 200) -> Any:
    response = httpx.post(f"{url}{path}", json=body, timeout=120)
    assert response.status_code == status, response.text
    return response.json()


def generate(url: str, prompt: str, **more: Any) -> Any:
    body = {"prompts": [prompt], "max_tokens": 24, "temperature": 0, "ignore_eos": True, **more}
    (result,) = ask(url, "/v1/generate", body)["results"]
    return result


def test_going_on_equals_never_having_stopped(server: Server) -> None:
    whole = generate(server.url, PROMPT, max_tokens=60, logprobs=0)
    first = generate(server.url, PROMPT, max_tokens=20, logprobs=0, return_state=True)
    second = generate(
        server.url, "", state=first["state"]["id"], max_tokens=40, logprobs=0, return_state=True
    )
    assert first["text"] + second["text"] == whole["text"]
    both = first["logprobs"]["token_logprobs"] + second["logprobs"]["token_logprobs"]
    assert both == pytest.approx(whole["logprobs"]["token_logprobs"], abs=1e-4)
    assert second["state"]["tokens"] == len(PROMPT) + 60


def test_a_prompt_after_a_state_is_as_one_text(server: Server) -> None:
    more = "\nIt is the east, and Juliet is the sun."
    made = ask(server.url, "/v1/states", {"prompt": PROMPT})
    whole = generate(server.url, PROMPT + more)
    for state in (made["id"], {"snapshot": snapshot(server.url, made["id"])}):
        assert generate(server.url, more, state=state)["text"] == whole["text"]
    scored = ask(server.url, "/v1/score", {"texts": [more], "state": made["id"]})["results"][0]
    # By ids: of a text's end, white space would belong to the continuation.
    item = {"context": list(PROMPT.encode()), "continuations": [more]}
    expected = ask(server.url, "/v1/score", {"items": [item]})["results"][0]["continuations"][0]
    assert scored["total_logprob"] == pytest.approx(expected["logprob"], abs=1e-3)


def snapshot(url: str, id: str) -> str:
    """As return_state gives it."""
    body = {"prompt": "", "state": id, "return_state": "snapshot"}
    return str(ask(url, "/v1/states", body)["snapshot"])


def test_a_text_upload_is_as_a_prompt(server: Server) -> None:
    text = (PROMPT * 50).encode()
    made = httpx.post(f"{server.url}/v1/states/text", content=text, timeout=120).json()
    assert made["tokens"] == len(text)
    one = ask(server.url, "/v1/states", {"prompt": text.decode(), "cache_salt": "other"})
    assert one["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    answers = {generate(server.url, "JULIET:", state=id)["text"] for id in (made["id"], one["id"])}
    assert len(answers) == 1


def test_concurrent_turns_of_many_sessions(server: Server) -> None:
    def talk(number: int) -> list[str]:
        return [
            generate(server.url, f"Line {number}.{turn}: ", session_id=f"s{number}")["text"]
            for turn in range(3)
        ]

    with ThreadPoolExecutor(6) as pool:
        together = list(pool.map(talk, range(8)))
    for number, texts in enumerate(together):
        whole = ""
        for turn, text in enumerate(texts):
            whole += f"Line {number}.{turn}: "
            assert generate(server.url, whole)["text"] == text
            whole += text


def test_sessions_survive_a_restart(tmp_path: Path) -> None:
    options = ("--device", "cpu", "--threads", "1", "--state-folder", str(tmp_path / "states"))
    first = Server(*options)
    try:
        begun = generate(first.url, PROMPT, session_id="talk")
        expected = generate(first.url, PROMPT + begun["text"] + "\n")["text"]
        ask(first.url, "/v1/states", {"prompt": PROMPT, "id": "short", "ttl": 0.5})
    finally:
        assert first.stop() == 0
    second = Server(*options)
    try:
        seen = httpx.get(f"{second.url}/v1/states/session:talk").json()
        assert seen["tokens"] == len(PROMPT) + 24
        assert generate(second.url, "\n", session_id="talk")["text"] == expected
        listed = httpx.get(f"{second.url}/v1/states").json()["data"]
        assert [state["id"] for state in listed] == ["session:talk"]
    finally:
        second.stop()


@pytest.mark.slow
def test_states_are_there_again_after_another_model_was_served(tmp_path: Path) -> None:
    options = ("--device", "cpu", "--threads", "1", "--state-folder", str(tmp_path))
    options += ("--disk-cache-bytes", "1000000")
    prompt = PROMPT * 8  # long enough for a file of the cached prompt
    first = Server(*options)
    try:
        made = ask(first.url, "/v1/states", {"prompt": prompt, "id": "kept"})
        expected = generate(first.url, "", state="kept")["text"]
        ask(first.url, "/v1/completions", {"prompt": prompt + "cached", "max_tokens": 1})
    finally:
        assert first.stop() == 0
    before = {path: path.read_bytes() for path in tmp_path.rglob("*.safetensors")}
    assert {path.parent.name for path in before} == {tmp_path.name, "prefixes"}
    other = Server(*options, model="library-mingru")
    try:
        assert httpx.get(f"{other.url}/v1/states/kept").status_code == 404
        ask(other.url, "/v1/states", {"prompt": prompt, "id": "kept"})
    finally:
        assert other.stop() == 0
    after = {path: path.read_bytes() for path in tmp_path.rglob("*.safetensors")}
    assert before.items() < after.items()
    again = Server(*options)
    try:
        seen = httpx.get(f"{again.url}/v1/states/kept").json()
        assert (seen["tokens"], seen["stored"]) == (made["tokens"], True)
        assert generate(again.url, "", state="kept")["text"] == expected
    finally:
        assert again.stop() == 0


@contextmanager
def full_disk(server: Server) -> Iterator[None]:
    """The engine's process can write no file of the size of a state's meanwhile."""
    (pid,) = running_module(server.process.pid, "engine.worker")
    limit = resource.RLIMIT_FSIZE
    _, most = resource.prlimit(pid, limit)
    resource.prlimit(pid, limit, (4096, most))
    try:
        yield
    finally:
        resource.prlimit(pid, limit, (most, most))


@pytest.mark.slow
def test_a_disk_that_takes_no_more_costs_no_answer_and_no_state(tmp_path: Path) -> None:
    folder = tmp_path / "states"
    options = ("--device", "cpu", "--threads", "1", "--state-folder", str(folder))
    server = Server(*options, "--state-sync", "fsync")
    try:
        assert ask(server.url, "/v1/states", {"prompt": PROMPT, "id": "mine"})["stored"] is True
        first = generate(server.url, PROMPT, session_id="talk")
        assert first["state"]["stored"] is True
        expected = generate(server.url, "\n", state="session:talk")["text"]
        before = sorted(path.name for path in folder.iterdir())
        with full_disk(server):
            for body in ({"prompt": "A", "id": "mine"}, {"prompt": "A"}):
                error = ask(server.url, "/v1/states", body, status=507)["error"]
                assert error["code"] == "state_not_stored" and "too large" in error["message"]
            turn = generate(server.url, "\n", session_id="talk")
            assert turn["text"] == expected and turn["state"]["stored"] is False
            assert httpx.get(f"{server.url}/v1/states/mine").json()["tokens"] == len(PROMPT)
            assert httpx.get(f"{server.url}/ready").status_code == 200
        assert sorted(path.name for path in folder.iterdir()) == before
        metrics = httpx.get(f"{server.url}/metrics").text
        assert "\nminserve_state_store_errors_total 3.0\n" in metrics
    finally:
        assert server.stop() == 0
    server = Server(*options)
    try:
        listed = httpx.get(f"{server.url}/v1/states").json()["data"]
        assert [state["id"] for state in listed] == ["mine", "session:talk"]
        assert all(state["stored"] for state in listed)
        assert generate(server.url, "\n", session_id="talk")["text"] == expected
    finally:
        server.stop()


@pytest.mark.slow
def test_sessions_survive_another_number_of_engines(tmp_path: Path) -> None:
    names = "abcd"
    whole = PROMPT
    for engines, threads in (("2", "1"), ("1", "2")):
        server = Server(
            *("--device", "cpu", "--engines", engines, "--threads", threads),
            *("--state-folder", str(tmp_path / "states")),
        )
        try:
            prompt = PROMPT if whole == PROMPT else ""
            (text,) = {generate(server.url, prompt, session_id=name)["text"] for name in names}
            whole += text
            listed = httpx.get(f"{server.url}/v1/states").json()["data"]
            assert [state["id"] for state in listed] == [f"session:{name}" for name in names]
            assert {state["tokens"] for state in listed} == {len(whole)}
            for name in names:  # some of them are another engine's
                forked = ask(server.url, "/v1/states/session:a/fork", {"id": f"copy-{name}"})
                assert forked["tokens"] == len(whole)
                ends = {
                    generate(server.url, "", state=id)["text"] for id in (forked["id"], "session:b")
                }
                assert len(ends) == 1
                httpx.delete(f"{server.url}/v1/states/copy-{name}")
        finally:
            assert server.stop() == 0


def reloading(tmp_path: Path) -> tuple[Server, Callable[[], None]]:
    """A server with a state folder, and what reloads its model."""
    key = tmp_path / "key"
    key.write_text("an-admin-key-of-its-own")
    key.chmod(0o600)
    folder = str(tmp_path / "states")
    server = Server(
        "--device", "cpu", "--threads", "2", "--state-folder", folder, "--admin-key-file", str(key)
    )

    def reload() -> None:
        headers = {"x-api-key": key.read_text()}
        answer = httpx.post(f"{server.url}/admin/reload", json={}, headers=headers, timeout=120)
        assert answer.status_code == 200, answer.text

    return server, reload


@contextmanager
def reading(url: str, body: Any, pool: ThreadPoolExecutor) -> Iterator[None]:
    """A stream under way, which is left in the end."""
    begun, over = Event(), Event()

    def read() -> None:
        with httpx.stream("POST", f"{url}/v1/generate", json=body, timeout=120) as stream:
            assert stream.status_code == 200
            for _ in stream.iter_lines():
                begun.set()
                if over.is_set():
                    return
        assert over.is_set(), "it has ended by itself"

    reader = pool.submit(read)
    try:
        assert begun.wait(60)
        yield
    finally:
        over.set()
    reader.result()


@pytest.mark.slow
def test_a_turn_outlasts_a_reload(tmp_path: Path) -> None:
    """While the old engine is at it, the new one knows that the session is busy."""
    server, reload = reloading(tmp_path)
    session = {"session_id": "talk", "temperature": 0, "ignore_eos": True}
    endless = {**session, "prompts": ["\n"], "max_tokens": 10**6, "stream": True}
    try:
        begun = generate(server.url, PROMPT, session_id="talk")
        with ThreadPoolExecutor(1) as pool, reading(server.url, endless, pool):
            reload()
            body = {**session, "prompts": ["\n"], "max_tokens": 24}
            error = ask(server.url, "/v1/generate", body, status=409)["error"]
            assert error["code"] == "state_busy"
            after = generate(server.url, "\n", state="session:talk")["text"]
        # Its client has left, so that turn has not been; the new engine soon knows.
        deadline = time.monotonic() + 60
        while (answer := httpx.post(f"{server.url}/v1/generate", json=body)).status_code == 409:
            assert time.monotonic() < deadline
        (result,) = answer.json()["results"]
        assert result["state"]["tokens"] == len(PROMPT) + 24 + 1 + 24
        assert result["text"] == after
        assert after == generate(server.url, PROMPT + begun["text"] + "\n")["text"]
    finally:
        server.stop()


@pytest.mark.slow
def test_sessions_survive_a_reload(tmp_path: Path) -> None:
    server, reload = reloading(tmp_path)
    try:
        begun = generate(server.url, PROMPT, session_id="talk")
        reload()
        turn = generate(server.url, "\n", session_id="talk")
        assert turn["state"]["tokens"] == len(PROMPT) + 24 + 1 + 24
        assert turn["text"] == generate(server.url, PROMPT + begun["text"] + "\n")["text"]
    finally:
        server.stop()
