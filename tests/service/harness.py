"""The application over an in-line engine with the fake model, and ways to talk to it."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from fastapi import FastAPI

from engine.client.client import EngineClient
from engine.engine import Engine
from engine.inline import InlineTransport
from engine.training.tokenizer import byte_level_tokenizer
from service.app.app import create_app
from service.inference.lifecycle import Lifecycle
from service.settings import Settings
from tests.engine.fake import FakeRunner


@dataclass
class Service:
    """A running application."""

    app: FastAPI
    http: httpx.AsyncClient
    runner: FakeRunner
    engine: Engine

    @property
    def lifecycle(self) -> Lifecycle:
        lifecycle: Lifecycle = self.app.state.lifecycle
        return lifecycle

    @property
    def client(self) -> EngineClient:
        """Of its engine; the first where there are several."""
        return self.lifecycle.runtime.backend.clients[0]

    async def post(self, path: str, body: Any, status: int = 200) -> Any:
        response = await self.http.post(path, json=body)
        assert response.status_code == status, response.text
        return response.json()

    async def refused(self, path: str, body: Any, param: str | None, status: int = 400) -> str:
        """The message of an error, whose shape and param are checked."""
        return error_message(await self.post(path, body, status), param)

    async def stream(self, path: str, body: Any) -> list[Any]:
        """The events of a stream that ends well."""
        response = await self.http.post(path, json={**body, "stream": True})
        assert response.status_code == 200, response.text
        assert response.headers["content-type"].startswith("text/event-stream")
        frames = parse_events(response.text)
        assert frames.pop() == "[DONE]"
        return frames


def usage_of(prompt: int, completion: int, cached: int = 0) -> dict[str, Any]:
    """The `usage` object."""
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def error_message(body: Any, param: str | None) -> str:
    assert set(body) == {"error"}
    error = body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["param"] == param, error
    message: str = error["message"]
    return message


def parse_events(text: str) -> list[Any]:
    """Server-sent events, each framed as it must be."""
    assert text.endswith("\n\n")
    frames = []
    for frame in text[:-2].split("\n\n"):
        assert frame.startswith("data: ") and "\n" not in frame
        frames.append(json.loads(frame[6:]) if frame != "data: [DONE]" else "[DONE]")
    return frames


def fake_runner(folder: Path, **options: Any) -> FakeRunner:
    """A fake model whose folder is `folder`."""
    return FakeRunner(folder=folder, **options)


@asynccontextmanager
async def running(
    runner: FakeRunner, *, ready: bool = True, on_failure: Any = None, **settings: Any
) -> AsyncIterator[Service]:
    """The application over `runner`, with its lifespan."""
    engine = Engine(runner)
    client = EngineClient(InlineTransport(engine))
    options = {"model": "fake", "max_waiting": runner.config.max_waiting, **settings}
    app = create_app(client, Settings(**options), on_failure)
    async with app.router.lifespan_context(app):
        service = Service(app, http_client(app), runner, engine)
        if ready:
            await until(lambda: service.lifecycle.state == "ready")
        async with service.http:
            yield service


def http_client(app: Any) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url="http://test")


async def until(condition: Any, seconds: float = 10.0) -> None:
    """Waits for a condition that must come true."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition never came true"
        await asyncio.sleep(0.002)


def save_byte_tokenizer(folder: Path) -> Path:
    byte_level_tokenizer().save(str(folder / "tokenizer.json"))
    return folder
