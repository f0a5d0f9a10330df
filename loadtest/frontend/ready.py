"""An ASGI application that sends bytes the server sent before, ready-made, and no more.

`python -m loadtest.frontend.ready PORT BOARD SAMPLE`. Its streams are driven as the server's, with
as many steps in flight, but from a loop within: there is no engine, and nothing to receive, decide,
render or count. It shows what the HTTP server and the sockets can take.
"""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import uvicorn

from loadtest.frontend.board import Board

NAP = 50e-6  # seconds


class Sample(msgspec.Struct):
    """The parts of an answer: all prompts' first, middle and last events, or a plain body."""

    headers: list[tuple[bytes, bytes]]
    first: bytes
    middle: bytes = b""
    last: bytes = b""
    events: int = 1  # of each prompt in a whole answer
    tokens: int = 1  # of one event of all prompts together
    stream: bool = True


class Ready:
    """The ASGI application."""

    def __init__(self, board: Board, sample: Sample) -> None:
        self._board = board
        self._sample = sample
        self._waiting: list[asyncio.Future[int]] = []
        self._streams = 0
        self._sent = 0
        self._begun = 0  # of a steady pace, by time.monotonic_ns
        self._steps = 0
        self._driver: asyncio.Task[None] | None = None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["path"] == "/ready":
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b""})
            return
        while (await receive()).get("more_body"):
            pass
        sample = self._sample
        head = {"type": "http.response.start", "status": 200, "headers": sample.headers}
        if not sample.stream:
            await send(head)
            await send({"type": "http.response.body", "body": sample.first})
            return
        if self._driver is None:
            self._driver = asyncio.create_task(self._drive())
        self._streams += 1
        if self._streams == 1:
            self._sent = self._board.received
        try:
            await self._stream(head, send)
        finally:
            self._streams -= 1

    async def _stream(self, head: Any, send: Any) -> None:
        sample = self._sample
        await send(head)
        left = sample.events
        while left:
            waits = asyncio.get_running_loop().create_future()
            self._waiting.append(waits)
            events = min(await waits, left)
            self._sent += events * sample.tokens
            if left == sample.events:
                body = sample.first + sample.middle * (events - 1)
            else:
                body = sample.middle * events
            left -= events
            if not left:
                body += sample.last
            await send({"type": "http.response.body", "body": body, "more_body": bool(left)})

    async def _drive(self) -> None:
        """Let the streams send, step by step."""
        sample, board = self._sample, self._board
        while True:
            # Whole bursts: one as long as another one is in flight, two where nothing is.
            step = max(1, self._streams) * sample.tokens
            flying = -(-(self._sent - board.received) // step)
            steps = self._due() if board.period_ns else 2 * board.window - flying
            if not self._waiting or steps < (board.window or 1):
                await asyncio.sleep(NAP)
                continue
            waiting, self._waiting = self._waiting, []
            for waits in waiting:
                if not waits.done():
                    waits.set_result(steps)
            await asyncio.sleep(0)

    def _due(self) -> int:
        """Return how many steps of a steady pace are due, and stamp them."""
        board = self._board
        if self._streams < board.expected or len(self._waiting) < self._streams:
            return 0
        now = time.monotonic_ns()
        self._begun = self._begun or now
        steps = 0
        while self._begun + self._steps * board.period_ns <= now:
            board.stamp(self._steps, self._begun + self._steps * board.period_ns)
            self._steps += 1
            steps += 1
        return steps


def main(argv: list[str]) -> None:
    port, board, sample = argv
    app = Ready(Board(Path(board)), msgspec.msgpack.decode(Path(sample).read_bytes(), type=Sample))
    config = uvicorn.Config(
        app, port=int(port), log_config=None, access_log=False, lifespan="off", server_header=False
    )
    uvicorn.Server(config).run()


if __name__ == "__main__":
    main(sys.argv[1:])
