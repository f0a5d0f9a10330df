"""The ceiling: a bare ASGI application that does only what no front end can leave out.

`python -m loadtest.frontend.bare PORT BOARD ENGINE_CORE` starts the same mock engine behind the
same transport, reads requests, gives the engine ids, takes ids from the engine's messages, looks up
each token's text, and writes the same JSON and events: one joined write per stream and turn of the
event loop. It has no limits, keys, metrics, logs, stop strings, validation or framework, and does
not watch for clients that leave.
"""

from __future__ import annotations

import asyncio
import sys
from array import array
from itertools import accumulate
from typing import Any

import msgspec
import uvicorn

from engine.client.socket_transport import ProcessTransport
from engine.config import EngineConfig
from engine.models.loader import resolve
from engine.protocol.events import Finished, Ready, StepEvents
from engine.protocol.requests import Request
from engine.protocol.sampling_params import SamplingParams
from engine.protocol.token_ids import pack_ids
from service.text.tokenizer import Tokenizer

ENGINE = "loadtest.frontend.mock:load"
HOLE = "\x00"
EVENTS = [(b"content-type", b"text/event-stream; charset=utf-8")]
DONE = b"data: [DONE]\n\n"


class Ask(msgspec.Struct):
    """The body of a request, with the fields that the cases use."""

    prompts: list[str]
    max_tokens: int
    ignore_eos: bool = False
    seed: int = 0
    stream: bool = False
    stream_interval: int = 1
    stop: list[str] = []
    logprobs: int | None = None


class Texts(dict[int, tuple[str, bytes]]):
    """Each token's text, and its part of an event that has this token only."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def __missing__(self, token: int) -> tuple[str, bytes]:
        text = self._tokenizer.decode([token])
        self[token] = text, b'%b,"token_ids":[%d]' % (msgspec.json.encode(text), token)
        return self[token]


class Answer:
    """The answer to one prompt; the prompts of a request share `news`."""

    __slots__ = ("before", "behind", "finished", "interval", "news", "tokens")

    def __init__(self, ask: Ask, index: int, news: News) -> None:
        self.tokens: list[int] = []
        self.finished: Finished | None = None
        self.news = news
        self.interval = ask.stream_interval
        content = {"id": "gen-0", "index": index, "text": HOLE, "finish_reason": None}
        data = b"data: %b\n\n" % msgspec.json.encode(content | {"logprobs": None})
        self.before, _, self.behind = data.partition(msgspec.json.encode(HOLE))


class News:
    """The answers of one request that have something new, until its task takes them."""

    def __init__(self) -> None:
        self.answers: dict[Answer, None] = {}
        self.waiter: asyncio.Future[None] | None = None

    def put(self, answer: Answer) -> None:
        self.answers[answer] = None
        if self.waiter is not None and not self.waiter.done():
            self.waiter.set_result(None)

    async def next(self) -> list[Answer]:
        while not self.answers:
            self.waiter = asyncio.get_running_loop().create_future()
            await self.waiter
        taken, self.answers = list(self.answers), {}
        return taken


class Bare:
    """The ASGI application."""

    def __init__(self, board: str, engine_core: int | None) -> None:
        threads = None if engine_core is None else engine_core + 1  # as the mock engine reads it
        config = EngineConfig(model=board, max_slots=4096, threads=threads)
        self._transport = ProcessTransport(config, ENGINE)
        self._tokenizer = Tokenizer.load(resolve("shakespeare-mingru"), 257)
        assert self._tokenizer is not None
        self._texts = Texts(self._tokenizer)
        self._decode = msgspec.json.Decoder(Ask).decode
        self._encode = msgspec.json.Encoder().encode
        self._live: dict[int, Answer] = {}
        self._number = 0
        self._ready = False
        self._reader: asyncio.Task[None] | None = None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["path"] == "/ready":
            if self._reader is None:
                self._reader = asyncio.create_task(self._read())
            status = 200 if self._ready else 503
            await send({"type": "http.response.start", "status": status, "headers": []})
            await send({"type": "http.response.body", "body": b""})
            return
        message = await receive()
        body = message["body"]
        while message.get("more_body"):
            message = await receive()
            body += message["body"]
        ask = self._decode(body)
        news = News()
        answers = [self._submit(ask, index, news) for index in range(len(ask.prompts))]
        await (self._stream(send, answers) if ask.stream else self._plain(send, answers))

    def _submit(self, ask: Ask, index: int, news: News) -> Answer:
        assert self._tokenizer is not None
        self._number += 1
        params = SamplingParams(
            max_tokens=ask.max_tokens,
            ignore_eos=ask.ignore_eos,
            seed=ask.seed,
            logprobs=ask.logprobs,
        )
        packed = pack_ids(self._tokenizer.encode(ask.prompts[index]))
        self._transport.send(
            Request(id=self._number, prompt=packed, sampling=params, stream=ask.stream)
        )
        answer = self._live[self._number] = Answer(ask, index, news)
        return answer

    async def _read(self) -> None:
        await self._transport.start()
        find = self._live.get
        while True:
            message = await self._transport.receive()
            if isinstance(message, Ready):
                self._ready = True
            if not isinstance(message, StepEvents):
                continue
            for request, token in zip(message.requests, message.tokens, strict=True):
                if (answer := find(request)) is not None:
                    answer.tokens.append(token)
                    answer.news.put(answer)
            for finished in message.finished:
                if (answer := self._live.pop(finished.request, None)) is not None:
                    answer.finished = finished
                    answer.news.put(answer)

    async def _stream(self, send: Any, answers: list[Answer]) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": EVENTS})
        left = len(answers)
        while left:
            body = b""
            for answer in await answers[0].news.next():
                body += self._events(answer)
                left -= answer.finished is not None
            if body and left:
                await send({"type": "http.response.body", "body": body, "more_body": True})
        await send({"type": "http.response.body", "body": body + DONE})

    def _events(self, answer: Answer) -> bytes:
        """Return the events of the tokens that have arrived, as far as they fill events."""
        tokens, texts = answer.tokens, self._texts
        if answer.interval == 1:
            answer.tokens = []
            parts = [texts[token][1] for token in tokens]
        else:
            whole = len(tokens)
            if answer.finished is None:
                whole -= whole % answer.interval
            answer.tokens = tokens[whole:]
            groups = (tokens[i : i + answer.interval] for i in range(0, whole, answer.interval))
            parts = [
                b'%b,"token_ids":%b'
                % (
                    self._encode("".join([texts[token][0] for token in group])),
                    self._encode(group),
                )
                for group in groups
            ]
        if not parts:
            return b""
        return answer.before + (answer.behind + answer.before).join(parts) + answer.behind

    async def _plain(self, send: Any, answers: list[Answer]) -> None:
        left = len(answers)
        while left:
            left -= len(await answers[0].news.next())
        results = []
        for index, answer in enumerate(answers):
            finished, texts = answer.finished, self._texts
            assert finished is not None
            tokens = finished.tokens
            names = [texts[token][0] for token in tokens]
            results.append(
                {
                    "index": index,
                    "text": "".join(names),
                    "token_ids": tokens,
                    "finish_reason": finished.reason,
                    "logprobs": _logprobs(names, finished),
                }
            )
        body = self._encode({"id": "gen-0", "model": "mock", "results": results})
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
        ]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})


def _logprobs(names: list[str], finished: Finished) -> dict[str, Any] | None:
    if finished.reports is None:
        return None
    own = array("f", finished.reports.packed)[::2].tolist()
    return {
        "tokens": names,
        "token_logprobs": own,
        "top_logprobs": [{name: value} for name, value in zip(names, own, strict=True)],
        "text_offset": [0, *accumulate(map(len, names[:-1]))],
    }


def main(argv: list[str]) -> None:
    port, board, core = argv
    app = Bare(board, int(core) if core else None)
    config = uvicorn.Config(
        app,
        port=int(port),
        log_config=None,
        access_log=False,
        lifespan="off",
        server_header=False,
        timeout_graceful_shutdown=1,
    )
    uvicorn.Server(config).run()


if __name__ == "__main__":
    main(sys.argv[1:])
