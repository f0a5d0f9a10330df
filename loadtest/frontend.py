"""The Python front end alone: tokens per second that one API process can stream, engine mocked.

The whole application runs, from the request's JSON to ASGI `send`, but no model and no socket: a
mock engine hands over one token per stream and step as fast as they are taken. `--steps` steps
lie ready each time the event loop comes round, as when the front end is behind the engine.

    python -m loadtest.frontend --streams 256 --steps 1 4 64
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections import deque
from collections.abc import MutableMapping
from pathlib import Path
from typing import Any

from engine.checkpoint import resolve
from engine.client import EngineClient
from engine.messages import (
    Abort,
    Finished,
    FromEngine,
    ModelInfo,
    Ping,
    Pong,
    Ready,
    Request,
    StepEvents,
    ToEngine,
)
from loadtest.report import print_environment, print_table, save_json
from service.app import create_app
from service.settings import Settings

TOKEN = ord("e")


class MockEngine:
    """A transport whose engine draws TOKEN for every request, `steps` steps at a time."""

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._left: dict[int, int] = {}  # tokens still to come, by request
        self._ready: deque[FromEngine] = deque()
        self._news = asyncio.Event()

    async def start(self) -> None:
        info = ModelInfo(
            name="mock",
            folder=str(resolve("shakespeare-mingru")),
            fingerprint="",
            cell="mingru",
            vocab_size=257,
            eos_token_id=256,
            parameters=0,
            state_bytes=0,
            slots=1 << 20,
            device="cpu",
            device_name="none",
            dtype="float32",
        )
        self._ready.append(Ready(info))
        self._news.set()

    def send(self, message: ToEngine) -> None:
        if isinstance(message, Request):
            self._left[message.id] = message.sampling.max_tokens
        elif isinstance(message, Abort):
            for request in message.ids:
                self._left.pop(request, None)
        elif isinstance(message, Ping):
            self._ready.append(Pong(message.nonce))
        self._news.set()

    async def receive(self) -> FromEngine:
        while True:
            if self._ready:
                return self._ready.popleft()
            if self._left:
                await asyncio.sleep(0)  # the streams' turn
                self._ready.extend(self._step() for _ in range(self._steps) if self._left)
                continue
            self._news.clear()
            await self._news.wait()

    def _step(self) -> StepEvents:
        requests = list(self._left)
        finished = []
        for request in requests:
            self._left[request] -= 1
            if not self._left[request]:
                del self._left[request]
                finished.append(Finished(request, "length", 1, 0, 1))
        return StepEvents(requests=requests, tokens=[TOKEN] * len(requests), finished=finished)

    async def close(self) -> None:
        """Nothing is held."""


async def _stream(app: Any, tokens: int) -> int:
    """One streamed request through the application; the bytes that it sent."""
    body = {"prompts": ["a"], "max_tokens": tokens, "stream": True, "ignore_eos": True}
    incoming = [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}]
    sent = 0

    async def receive() -> MutableMapping[str, Any]:
        if incoming:
            return incoming.pop()
        await asyncio.Event().wait()  # the client stays
        raise AssertionError

    async def send(message: MutableMapping[str, Any]) -> None:
        nonlocal sent
        if message["type"] == "http.response.start" and message["status"] != 200:
            raise RuntimeError(f"status {message['status']}")
        sent += len(message.get("body", b""))

    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "path": "/v1/generate",
        "raw_path": b"/v1/generate",
        "query_string": b"",
        "headers": [(b"content-type", b"application/json")],
        "scheme": "http",
        "server": ("127.0.0.1", 80),
        "client": ("127.0.0.1", 1),
    }
    await app(scope, receive, send)
    return sent


async def measure(streams: int, tokens: int, steps: int) -> float:
    """Tokens per second over `streams` concurrent streams of `tokens` each."""
    client = EngineClient(MockEngine(steps))
    app = create_app(client, Settings(max_waiting=streams, _env_file=None))  # type: ignore[call-arg]
    async with app.router.lifespan_context(app):
        await client.ready()
        await asyncio.sleep(0.2)  # the application takes notice
        begin = time.perf_counter()
        await asyncio.gather(*(_stream(app, tokens) for _ in range(streams)))
        return streams * tokens / (time.perf_counter() - begin)


def main(argv: list[str] | None = None) -> int:
    options = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    options.add_argument("--streams", type=int, default=256)
    options.add_argument("--tokens", type=int, default=512, help="of each stream")
    options.add_argument("--steps", type=int, nargs="+", default=[1, 4, 64])
    options.add_argument("--json", type=Path)
    args = options.parse_args(argv)
    figures = [
        {
            "steps": steps,
            "tokens_per_second": asyncio.run(measure(args.streams, args.tokens, steps)),
        }
        for steps in args.steps
    ]
    print_environment()
    print_table(
        f"front end, {args.streams} streams, mock engine",
        ["steps in flight", "tokens/s of one process"],
        [[str(one["steps"]), f"{one['tokens_per_second']:,.0f}"] for one in figures],
    )
    save_json(args.json, {"streams": args.streams, "frontend": figures})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
