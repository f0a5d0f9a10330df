"""loadtest.chaos --store: its proxy, its careful client, and a short run."""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path
from typing import Any

import pytest

from loadtest.chaos.command import main
from loadtest.chaos.store import client
from loadtest.chaos.store.client import Lost, Seen, StreamFailed, ask_until_done
from loadtest.chaos.store.proxy import Proxy
from loadtest.store.turns import Answer, Line
from service.terminal.bench.connection import BadResponse

RIGHT = Answer("ab", (-1.0, -0.5), 7, True)


async def _echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while part := await reader.read(100):
        writer.write(part)
    writer.close()


async def _behind(mode: str) -> list[bytes]:
    """What comes back: before, while the network behaves so, and on a new connection after."""
    found = []
    target = await asyncio.start_server(_echo, "127.0.0.1", 0)
    async with target, Proxy(target.sockets[0].getsockname()[1]) as proxy:
        reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
        for _ in range(2):
            try:
                writer.write(b"a")
                found.append(await asyncio.wait_for(reader.read(1), 1.0))
            except TimeoutError:
                found.append(b"nothing")
            except OSError:
                found.append(b"")
            proxy.become(mode)  # type: ignore[arg-type]
        proxy.become("pass")
        again, writing = await asyncio.open_connection("127.0.0.1", proxy.port)
        writing.write(b"b")
        found.append(await again.read(1))
        for one in (writer, writing):
            one.close()
    return found


@pytest.mark.parametrize(
    ("mode", "expected"), [("pass", b"a"), ("slow", b"a"), ("cut", b""), ("lost", b"nothing")]
)
def test_a_network_that_fails(mode: str, expected: bytes) -> None:
    assert asyncio.run(_behind(mode)) == [b"a", expected, b"b"]


def _refused(status: int, code: str, message: str = "") -> tuple[int, bytes]:
    return status, json.dumps({"error": {"code": code, "message": message}}).encode()


def _answer(text: str = "ab", tokens: int = 7, stored: bool = True, stream: bool = False) -> bytes:
    choice = {
        "text": text,
        "logprobs": {"token_logprobs": [-1.0, -0.5]},
        "state": {"tokens": tokens, "stored": stored},
    }
    body = json.dumps({"choices": [choice]})
    return f"data: {body}\n\ndata: [DONE]\n\n".encode() if stream else body.encode()


def _ask(monkeypatch: pytest.MonkeyPatch, *answers: Any) -> Seen:
    """Have turn 2 carried out by servers that answer so: a status and a body, or an error."""
    left = list(answers)

    async def fetch(self: Line, at: int, path: str, body: bytes, *_: Any) -> tuple[int, bytes]:
        assert json.loads(body)["turn"] == 2
        answer = left.pop(0)
        if isinstance(answer, Exception):
            raise answer
        if callable(answer):
            return 200, answer(stream=json.loads(body)["stream"])
        status, content = answer
        return status, content

    monkeypatch.setattr(Line, "fetch", fetch)
    monkeypatch.setattr(client, "PAUSE", (0.0, 0.0))
    seen = Seen()
    lines = {owner: Line([]) for owner in client.KEYS}
    asyncio.run(ask_until_done(lines, 3, 5, 2, RIGHT, random.Random(0), seen))
    assert not left
    return seen


DONE = "turn 2 was carried out before: the state has had 2 turns and has 7 tokens"


def test_a_turn_is_asked_for_until_it_is_carried_out(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = _ask(
        monkeypatch,
        OSError("refused"),
        BadResponse("closed"),
        TimeoutError(),
        _refused(409, "state_busy"),
        _refused(409, "state_conflict"),
        _refused(503, "state_store_unavailable"),
        _refused(507, "state_not_stored"),
        lambda stream: _answer(stored=False, stream=stream),
        _answer,
    )
    assert seen.turns == 1 and sum(seen.retries.values()) == 8 and not seen.done_before


def test_a_turn_whose_answer_was_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = _ask(monkeypatch, BadResponse("closed"), _refused(409, "turn_done", DONE))
    assert (seen.turns, seen.done_before) == (1, 1)


@pytest.mark.parametrize(
    "answers",
    [
        [lambda stream: _answer(text="zz", stream=stream)],
        [lambda stream: _answer(tokens=14, stream=stream)],
        [_refused(409, "turn_done", DONE)],  # nobody had asked for it before
        [OSError(), _refused(409, "turn_done", DONE.replace("had 2", "had 3"))],
        [OSError(), _refused(409, "turn_done", DONE.replace("has 7", "has 14"))],
        [OSError(), _refused(409, "turn_ahead", "turn is 2, but the state has had 0 turns")],
        [_refused(404, "state_not_found")],
        [_refused(400, "invalid")],
    ],
)
def test_what_no_fault_may_bring_about(answers: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Lost):
        _ask(monkeypatch, *answers)


@pytest.mark.parametrize(
    "content",
    [
        b"", b"data: [DONE]\n\n", b'data: {"error":{"code":"state_conflict"}}\n\n', b"data: {\n\n",
        b'data: {"choices":[{"text":"a","logprobs":null,"error":{"code":"x"}}]}\n\n',
        b'data: {"choices":[{"text":"a","logprobs":null,"finish_reason":null}]}\n\n',
    ],
)  # fmt: skip
def test_streams_that_fail(content: bytes) -> None:
    with pytest.raises(StreamFailed):
        client.streamed(content)


@pytest.mark.slow
def test_a_short_run(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "found.json"
    given = ["--turns", "120", "--sessions", "6", "--servers", "2", "--users", "6"]
    assert main(["--store", "folder", *given, "--json", str(file)]) == 0
    found = json.loads(file.read_text())
    assert found["seen"]["turns"] == 120 and found["checked"] == 6
    assert "0 lost, doubled or another's" in capsys.readouterr().out
