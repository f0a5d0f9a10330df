"""Streams over a real socket, whose tokens are written without waking a task: nothing is missing,
nothing comes twice, and clients that do not read or have left are left to the server's `send`."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from service import streaming
from service.direct import Write, direct_write
from tests.service.harness import fake_runner, parse_events, save_byte_tokenizer
from tests.service.live import listening

PROMPTS = ["a", "ka", "xyz"]


@pytest.mark.parametrize("interval", [1, 4])
def test_a_stream_is_what_its_plain_answer_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, interval: int
) -> None:
    written = []

    def counting(send: Any) -> Write | None:
        write = direct_write(send)

        def count(data: bytes) -> bool:
            went = write is not None and write(data)
            written.append(went and len(data))
            return went

        return count

    monkeypatch.setattr(streaming, "direct_write", counting)
    body = {"prompts": PROMPTS, "max_tokens": 60, "temperature": 0, "stop": ["tu", "never"]}
    runner = fake_runner(save_byte_tokenizer(tmp_path), step_seconds=0.002)
    with listening(runner) as (url, _):
        plain = httpx.post(f"{url}/v1/generate", json=body).json()
        asked = {**body, "stream": True, "stream_interval": interval}
        answer = httpx.post(f"{url}/v1/generate", json=asked)
        lines = httpx.get(f"{url}/metrics").text
    *events, done = parse_events(answer.text)
    assert done == "[DONE]"
    for result in plain["results"]:
        own = [event for event in events if event["index"] == result["index"]]
        assert "".join([event["text"] for event in own]) == result["text"]
        assert [id for event in own for id in event["token_ids"]] == result["token_ids"]
        assert own[-1]["finish_reason"] == result["finish_reason"]
        # A stream that ends at a stop string does not wait for the engine to tell the rest.
        result["usage"].pop("prompt_tokens_details")
        own[-1]["usage"].pop("prompt_tokens_details", None)
        assert own[-1]["usage"] == result["usage"]
    assert sum(written) > 0, "nothing was written directly"
    gaps = next(
        float(line.split()[1])
        for line in lines.splitlines()
        if line.startswith("minserve_inter_token_latency_seconds_count")
    )
    assert gaps > len(PROMPTS), "deliveries that nobody counted"


def _cycle() -> Any:
    cycle = RequestResponseCycle.__new__(RequestResponseCycle)
    cycle.chunked_encoding = True
    cycle.disconnected = cycle.response_complete = False
    written: list[bytes] = []
    cycle.transport = SimpleNamespace(write=written.append, written=written)
    cycle.flow = SimpleNamespace(write_paused=False)
    return cycle


@pytest.mark.parametrize("what", ["paused", "left", "over"])
def test_nothing_is_written_where_that_would_have_to_wait_or_is_pointless(what: str) -> None:
    cycle = _cycle()
    write = direct_write(cycle.send)
    assert write is not None
    assert write(b"ten bytes!") and write(b"")
    assert cycle.transport.written == [b"a\r\nten bytes!\r\n"]
    match what:
        case "paused":
            cycle.flow.write_paused = True
        case "left":
            cycle.disconnected = True
        case "over":
            cycle.response_complete = True
    assert not write(b"more")
    assert len(cycle.transport.written) == 1


def test_only_a_chunked_answer_of_the_server_itself_is_written_directly() -> None:
    async def send(message: Any) -> None: ...

    assert direct_write(send) is None
    cycle = _cycle()
    cycle.chunked_encoding = False
    assert direct_write(cycle.send) is None
