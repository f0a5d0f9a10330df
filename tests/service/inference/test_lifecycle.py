"""Loading, a full queue, draining, engine death, and clients that go away."""

from __future__ import annotations

import asyncio
import json
import threading
from pathlib import Path
from typing import Any

import pytest

from engine.engine import Engine
from engine.errors import CheckpointError, EngineError
from engine.inline import InlineTransport
from service.text.tokenizer import Tokenizer
from tests.service.harness import (
    Service,
    error_message,
    fake_runner,
    parse_events,
    running,
    until,
)

GENERATE, COMPLETIONS, SCORE = "/v1/generate", "/v1/completions", "/v1/score"
LONG = {"max_tokens": 100_000, "temperature": 0, "ignore_eos": True}


class SlowStart(InlineTransport):
    """An engine that says nothing until it is released."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self.released = threading.Event()

    async def receive(self) -> Any:
        await asyncio.to_thread(self.released.wait)
        return await super().receive()


async def test_while_the_model_loads(byte_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    transports: list[SlowStart] = []

    def make(engine: Engine) -> SlowStart:
        transports.append(SlowStart(engine))
        return transports[-1]

    monkeypatch.setattr("tests.service.harness.InlineTransport", make)
    async with running(fake_runner(byte_folder), ready=False) as service:
        try:
            health = await service.http.get("/health")
            assert (health.status_code, health.json()["status"]) == (200, "loading")
            for response in (
                await service.http.get("/ready"),
                await service.http.get("/v1/models"),
                await service.http.post(GENERATE, json={"prompts": ["a"]}),
                await service.http.post(COMPLETIONS, json={"prompt": "a", "stream": True}),
                await service.http.post(SCORE, json={"texts": ["ab"]}),
            ):
                assert response.status_code == 503
                assert response.headers["retry-after"] == "1"
                assert "loading" in error_message(response.json(), None)
            assert (await service.http.get("/metrics")).status_code == 200
        finally:
            transports[0].released.set()
        await until(lambda: service.lifecycle.state == "ready")
        assert (await service.http.get("/ready")).status_code == 200
        assert (await service.http.get("/health")).json() == {"status": "ready"}


async def test_loading_is_bounded(byte_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    transports: list[SlowStart] = []

    def make(engine: Engine) -> SlowStart:
        transports.append(SlowStart(engine))
        return transports[-1]

    monkeypatch.setattr("tests.service.harness.InlineTransport", make)
    failures: list[EngineError] = []
    runner = fake_runner(byte_folder)
    async with running(
        runner, ready=False, on_failure=failures.append, load_timeout=0.05
    ) as service:
        await until(lambda: failures)
        assert "0.05 s" in failures[0].message
        assert (await service.http.get("/health")).status_code == 503
        transports[0].released.set()


async def test_a_broken_tokenizer_is_a_failed_start(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{")
    failures: list[EngineError] = []
    async with running(fake_runner(tmp_path), ready=False, on_failure=failures.append) as service:
        await until(lambda: failures)
        assert isinstance(failures[0], CheckpointError)
        response = await service.http.get("/health")
        assert response.status_code == 503
        assert "tokenizer.json" in error_message(response.json(), None)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_full_queue_is_429_with_retry_after(byte_folder: Path, stream: bool) -> None:
    runner = fake_runner(byte_folder, slots=1, max_waiting=1, step_seconds=0.005)
    async with running(runner) as service:
        held = [
            asyncio.create_task(service.http.post(GENERATE, json={"prompts": ["a"], **LONG}))
            for _ in range(2)
        ]
        stats = lambda: service.client.stats  # noqa: E731
        await until(lambda: stats().waiting == 1 and stats().slots_used == 1)
        for body in ({"prompts": ["b"]}, {"prompts": ["b", "c"]}):
            response = await service.http.post(GENERATE, json={**body, "stream": stream})
            assert response.status_code == 429
            assert int(response.headers["retry-after"]) >= 1
            assert response.json()["error"]["code"] == "queue_full"
        for task in held:
            task.cancel()
        await asyncio.gather(*held, return_exceptions=True)
        # What was in flight had not been touched; now that it is gone there is room.
        await until(lambda: stats().waiting == 0 and stats().slots_used == 0)
        await service.post(GENERATE, {"prompts": ["b"], "max_tokens": 1})


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (GENERATE, {"prompts": ["a", "b", "c"], "max_tokens": 1}),
        (COMPLETIONS, {"prompt": "a", "n": 3, "max_tokens": 1}),
        (SCORE, {"texts": ["ab"] * 3}),
        (SCORE, {"items": [{"context": "a", "continuations": ["b", "c", "d"]}]}),
    ],
)
async def test_a_batch_is_taken_whole_or_refused_whole(
    byte_folder: Path, path: str, body: Any
) -> None:
    runner = fake_runner(byte_folder, slots=2, max_waiting=1, step_seconds=0.005)
    async with running(runner) as service:
        stats = lambda: service.client.stats  # noqa: E731
        await service.post(path, body)
        held = asyncio.create_task(service.http.post(GENERATE, json={"prompts": ["a"], **LONG}))
        await until(lambda: stats().slots_used == 1)
        steps = runner.requests.copy()
        message = await service.refused(path, body, None, 429)
        assert "no room for 3" in message
        assert runner.requests.keys() == steps.keys()  # nothing of it was begun
        held.cancel()
        await asyncio.gather(held, return_exceptions=True)


@pytest.mark.parametrize("stream", [False, True])
async def test_more_than_ever_fits_is_refused_for_good(byte_folder: Path, stream: bool) -> None:
    async with running(fake_runner(byte_folder, slots=2, max_waiting=1)) as service:
        for path, body in (
            (GENERATE, {"prompts": ["a"] * 4, "stream": stream}),
            (COMPLETIONS, {"prompt": ["a", "b"], "n": 2, "stream": stream}),
        ):
            assert "at most 3" in await service.refused(path, body, None, 400)


async def test_places_are_spoken_for_while_prompts_are_tokenised(
    byte_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encode_async = Tokenizer.encode_async

    async def slowly(self: Tokenizer, text: str, **how: bool) -> Any:
        await asyncio.sleep(0.05)
        return await encode_async(self, text, **how)

    monkeypatch.setattr(Tokenizer, "encode_async", slowly)
    async with running(fake_runner(byte_folder, slots=2, max_waiting=1)) as service:
        body = {"prompts": ["a", "b"], "max_tokens": 1}
        posts = [service.http.post(GENERATE, json=body) for _ in range(2)]
        answers = sorted(await asyncio.gather(*posts), key=lambda answer: answer.status_code)
        assert [answer.status_code for answer in answers] == [200, 429]
        assert all("error" not in result for result in answers[0].json()["results"])
        # A request that fails on its way gives its places back.
        await service.post(GENERATE, {"prompts": ["a", [999], "b"]}, 400)
        await service.post(GENERATE, {"prompts": ["a", "b", "c"], "max_tokens": 1})


async def test_the_engines_own_refusal_is_429_too(
    byte_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With several API processes the pre-check may be late; the engine has the last word, before
    the 200."""
    monkeypatch.setattr(
        "service.inference.admission_control.AdmissionControl.check", lambda *_: None
    )
    runner = fake_runner(byte_folder, slots=1, max_waiting=0, step_seconds=0.005)
    async with running(runner) as service:
        held = asyncio.create_task(service.http.post(GENERATE, json={"prompts": ["a"], **LONG}))
        await until(lambda: service.client.stats.slots_used == 1)
        for stream in (False, True):
            body = {"prompts": ["b"], "stream": stream}
            response = await service.http.post(GENERATE, json=body)
            assert response.status_code == 429, response.text
            assert "retry-after" in response.headers
        held.cancel()
        await asyncio.gather(held, return_exceptions=True)


async def test_draining(byte_folder: Path) -> None:
    async with running(fake_runner(byte_folder, step_seconds=0.002)) as service:
        body = {"prompts": ["a"], "max_tokens": 50, "temperature": 0, "ignore_eos": True}
        held = asyncio.create_task(service.http.post(GENERATE, json={**body, "stream": True}))
        await until(lambda: service.lifecycle.requests)
        drain = asyncio.create_task(service.lifecycle.drain(timeout=30))
        await until(lambda: service.lifecycle.draining)
        for response in (
            await service.http.get("/ready"),
            await service.http.post(GENERATE, json=body),
        ):
            assert response.status_code == 503
            assert "shutting down" in error_message(response.json(), None)
        assert (await service.http.get("/health")).status_code == 200
        frames = parse_events((await held).text)  # what was in flight is finished
        assert (len(frames), frames[-1]) == (51, "[DONE]")
        await drain


@pytest.mark.parametrize("upload", [False, True])
async def test_a_drain_waits_for_what_is_still_being_read(
    byte_folder: Path, upload: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A body on its way, or a prompt that is tokenised, is work in flight."""
    ready = asyncio.Event()
    encode_async = Tokenizer.encode_async

    async def slowly(self: Tokenizer, text: str, **how: bool) -> Any:
        await ready.wait()
        return await encode_async(self, text, **how)

    async with running(fake_runner(byte_folder)) as service:
        connection = Connection(GENERATE, {"prompts": ["abc"], "max_tokens": 2, "temperature": 0})
        if upload:
            connection.uploaded.clear()
        else:
            monkeypatch.setattr(Tokenizer, "encode_async", slowly)
        held = asyncio.create_task(
            service.app(connection.scope, connection.receive, connection.send)
        )
        await until(lambda: service.lifecycle.requests)
        await asyncio.sleep(0.05)
        drain = asyncio.create_task(service.lifecycle.drain(timeout=30))
        await asyncio.sleep(0.05)
        assert not drain.done()
        (connection.uploaded if upload else ready).set()
        await held
        await drain
        assert [message.get("status") for message in connection.sent] == [200, None]
        assert json.loads(connection.sent[1]["body"])["results"][0]["text"] == "de"


async def test_what_is_still_being_read_at_the_drains_end_is_refused(byte_folder: Path) -> None:
    async with running(fake_runner(byte_folder)) as service:
        connection = Connection(GENERATE, {"prompts": ["a"], **LONG})
        connection.uploaded.clear()
        held = asyncio.create_task(
            service.app(connection.scope, connection.receive, connection.send)
        )
        await until(lambda: service.lifecycle.requests)
        await service.lifecycle.drain(timeout=0.05)
        connection.uploaded.set()
        await asyncio.wait_for(held, 10)
        assert connection.sent[0]["status"] == 503
        assert "shut down" in error_message(json.loads(connection.sent[1]["body"]), None)


async def test_a_requests_time_begins_with_its_arrival(byte_folder: Path) -> None:
    """Not only when the engine has it."""
    async with running(fake_runner(byte_folder, step_seconds=0.001)) as service:
        connection = Connection(GENERATE, {"prompts": ["a"], **LONG, "timeout": 30.0})
        connection.uploaded.clear()
        held = asyncio.create_task(
            service.app(connection.scope, connection.receive, connection.send)
        )
        await until(lambda: service.lifecycle.requests)
        (inference,) = service.lifecycle.requests
        inference._arrived -= 31  # so long did the body take
        connection.uploaded.set()
        await asyncio.wait_for(held, 10)
        (result,) = json.loads(connection.sent[1]["body"])["results"]
        assert result["finish_reason"] == "timeout"


async def test_the_drains_end_cuts_what_is_left(byte_folder: Path) -> None:
    async with running(fake_runner(byte_folder, step_seconds=0.002)) as service:
        held = asyncio.create_task(service.http.post(GENERATE, json={"prompts": ["a"], **LONG}))
        await until(lambda: service.client.stats.running == 1)
        await service.lifecycle.drain(timeout=0.05)
        (result,) = (await held).json()["results"]
        assert result["finish_reason"] == "abort"
        assert result["text"]


async def test_engine_death(byte_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def die() -> None:
        raise RuntimeError("the engine dies")

    failures: list[EngineError] = []
    runner = fake_runner(byte_folder, step_seconds=0.005)
    async with running(runner, on_failure=failures.append) as service:
        streams = [
            asyncio.create_task(service.http.post(path, json={**prompt, **LONG, "stream": True}))
            for path, prompt in (
                (GENERATE, {"prompts": ["a", "b"]}),
                (COMPLETIONS, {"prompt": "a"}),
            )
        ]
        plain = asyncio.create_task(service.http.post(GENERATE, json={"prompts": ["a"], **LONG}))
        await until(lambda: service.client.stats.running == 4)
        seen = runner.steps
        await until(lambda: runner.steps > seen + 5)  # all have tokens: the status is sent
        monkeypatch.setattr(service.engine, "step", die)
        for stream in streams:
            response = await stream
            assert response.status_code == 200
            frames = parse_events(response.text)
            assert set(frames[-1]) == {"error"}  # and no [DONE]
            assert frames[-1]["error"]["code"] == "engine_dead"
            assert not any("error" in frame for frame in frames[:-1])
        assert (await plain).status_code == 503
        assert len(failures) == 1
        assert (await service.http.get("/health")).status_code == 503
        response = await service.http.post(GENERATE, json={"prompts": ["a"]})
        assert response.status_code == 503


async def test_a_failed_step_ends_its_streams_with_an_error(byte_folder: Path) -> None:
    runner = fake_runner(byte_folder, step_seconds=0.005)
    async with running(runner) as service:
        held = asyncio.create_task(
            service.http.post(GENERATE, json={"prompts": ["a"], **LONG, "stream": True})
        )
        await until(lambda: runner.steps > 5)
        runner.failures.append(RuntimeError("a step goes wrong"))
        frames = parse_events((await held).text)
        assert frames[-1]["error"]["code"] == "step_failed"
        # The engine lives on; an error before the first byte is a status.
        runner.failures.append(RuntimeError("a step goes wrong"))
        response = await service.http.post(GENERATE, json={"prompts": ["a"], "stream": True})
        assert response.status_code == 500
        await service.post(GENERATE, {"prompts": ["a"], "max_tokens": 1})


class Connection:
    """One ASGI request that the test can cut, and whose reader can stall."""

    def __init__(self, path: str, body: Any) -> None:
        self.uploaded = asyncio.Event()  # cleared, the body takes its time
        self.uploaded.set()
        self.scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": "POST",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "scheme": "http",
            "headers": [(b"content-type", b"application/json")],
            "client": ("test", 1),
            "server": ("test", 80),
        }
        self._body = json.dumps(body).encode()
        self._asked = False
        self.gone = asyncio.Event()
        self.reading = asyncio.Event()
        self.reading.set()
        self.sent: list[Any] = []

    async def receive(self) -> Any:
        if not self._asked:
            self._asked = True
            await self.uploaded.wait()
            return {"type": "http.request", "body": self._body, "more_body": False}
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        await self.reading.wait()
        self.sent.append(message)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (GENERATE, {"prompts": ["a", "b"], **LONG}),
        (GENERATE, {"prompts": ["a", "b"], **LONG, "stream": True}),
        (COMPLETIONS, {"prompt": "a", "n": 2, **LONG}),
        (COMPLETIONS, {"prompt": "a", "n": 2, **LONG, "stream": True}),
        (SCORE, {"texts": ["a" * 200_000, "b" * 200_000]}),
    ],
)
async def test_a_client_that_leaves_aborts_its_requests(
    byte_folder: Path, path: str, body: Any
) -> None:
    async with running(fake_runner(byte_folder, step_seconds=0.005)) as service:
        connection = Connection(path, body)
        task = asyncio.create_task(
            service.app(connection.scope, connection.receive, connection.send)
        )
        stats = lambda: service.client.stats  # noqa: E731
        await until(lambda: stats().running == 2)
        connection.gone.set()
        await asyncio.wait_for(task, 10)
        await until(lambda: stats().running == 0 and stats().waiting == 0)
        assert not service.lifecycle.requests
        if not body.get("stream"):
            assert connection.sent == []
        text = (await service.http.get("/metrics")).text
        endpoint = path.rsplit("/", 1)[-1]
        series = f'minserve_requests_total{{endpoint="{endpoint}",outcome="cancelled"}} 1.0'
        assert series in text


async def test_a_slow_reader_gets_merged_writes_with_one_event_per_token(
    service: Service,
) -> None:
    request = {"prompts": ["a"], "max_tokens": 400, "ignore_eos": True, "temperature": 0}
    connection = Connection(GENERATE, {**request, "stream": True})
    task = asyncio.create_task(service.app(connection.scope, connection.receive, connection.send))
    connection.reading.clear()
    await until(lambda: service.runner.steps >= 400)  # generation did not wait for the reader
    connection.reading.set()
    await asyncio.wait_for(task, 10)
    chunks = [message["body"] for message in connection.sent[1:] if message["body"]]
    frames = parse_events(b"".join(chunks).decode())
    assert frames.pop() == "[DONE]"
    assert [len(frame["token_ids"]) for frame in frames] == [1] * 400
    assert len(chunks) < 50


@pytest.mark.parametrize("stream", [False, True])
async def test_a_batch_of_which_the_engine_refuses_a_part_is_refused_whole(
    byte_folder: Path, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others may fill the queue between the first check and the engine's own."""
    monkeypatch.setattr(
        "service.inference.admission_control.AdmissionControl.check", lambda *_: None
    )
    runner = fake_runner(byte_folder, slots=1, max_waiting=1, step_seconds=0.002)
    async with running(runner) as service:
        stats = lambda: service.client.stats  # noqa: E731
        for path, body in (
            (GENERATE, {"prompts": ["a", "b", "c"], "max_tokens": 50}),
            (COMPLETIONS, {"prompt": ["a", "b", "c"], "max_tokens": 50}),
        ):
            response = await service.http.post(path, json={**body, "stream": stream})
            assert response.status_code == 429, response.text
            await until(lambda: stats().running == 0 and stats().waiting == 0)
        await service.refused(SCORE, {"texts": ["ab"] * 3}, None, 429)
