"""The parts of the HTTP load test: arrivals, lengths, SLOs, figures, the sweep, HTTP."""

from __future__ import annotations

import asyncio
import random
from array import array
from itertools import pairwise
from pathlib import Path

import pytest

from service.terminal.bench.arrivals import schedule
from service.terminal.bench.client import Report, Workload
from service.terminal.bench.connection import BadResponse, Connection, Server
from service.terminal.bench.lengths import parse_lengths
from service.terminal.bench.processes import split
from service.terminal.bench.prompts import Passages, Unit
from service.terminal.bench.request_bodies import RequestBodies, RequestOptions
from service.terminal.bench.responses import Record, StreamedResponse, WholeResponse, unpack
from service.terminal.bench.summary import parse_slo, summarize
from service.terminal.bench.sweep import Probe, highest_rate

ASKED = RequestOptions(parse_lengths("8"), parse_lengths("4"))


def test_constant_arrivals_are_even_and_bursts_come_at_once() -> None:
    assert schedule("constant", 4, count=3) == [0.0, 0.25, 0.5]
    assert schedule("burst", 4, count=5, burst=2) == [0.0, 0.0, 0.5, 0.5, 1.0]
    assert schedule("constant", 2, seconds=2) == [0.0, 0.5, 1.0, 1.5]


def test_poisson_arrivals_have_their_rate_and_their_spread() -> None:
    times = schedule("poisson", 50, count=20_000, seed=3)
    gaps = [b - a for a, b in pairwise(times)]
    mean = sum(gaps) / len(gaps)
    assert mean == pytest.approx(1 / 50, rel=0.03)
    variance = sum((gap - mean) ** 2 for gap in gaps) / len(gaps)
    assert variance == pytest.approx(mean**2, rel=0.1)  # that of the exponential distribution
    assert times == schedule("poisson", 50, count=20_000, seed=3)


def test_a_ramp_grows() -> None:
    times = schedule("ramp", 10, rate_to=90, seconds=100, seed=1)
    assert times == sorted(times)
    early, late = (sum(a <= time < a + 20 for time in times) for a in (0, 80))
    assert early == pytest.approx(20 * 18, rel=0.25)
    assert late == pytest.approx(20 * 82, rel=0.25)


@pytest.mark.parametrize(
    "arguments",
    [
        {"kind": "poisson", "rate": 0, "count": 1},
        {"kind": "poisson", "rate": float("nan"), "count": 1},
        {"kind": "poisson", "rate": 1},
        {"kind": "ramp", "rate": 1, "count": 3},
        {"kind": "burst", "rate": 1, "count": 3, "burst": 0},
        {"kind": "closed", "rate": 1, "count": 3},
    ],
)
def test_what_makes_no_schedule_is_refused(arguments: dict[str, object]) -> None:
    with pytest.raises(ValueError):
        schedule(**arguments)  # type: ignore[arg-type]


def test_lengths_are_drawn_as_asked() -> None:
    choice = random.Random(0)
    assert {parse_lengths("7").draw(choice) for _ in range(9)} == {7}
    assert {parse_lengths("uniform:2:4").draw(choice) for _ in range(99)} == {2, 3, 4}
    drawn = sorted(parse_lengths("lognormal:100:0.5:400").draw(choice) for _ in range(2001))
    assert drawn[1000] == pytest.approx(100, rel=0.1)
    assert drawn[0] >= 1 and drawn[-1] <= 400


@pytest.mark.parametrize("text", ["", "0", "uniform:5:2", "lognormal:0:1:9", "fixed:x", "other:1"])
def test_lengths_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="lengths"):
        parse_lengths(text)


def test_questions_repeat_with_their_seed() -> None:
    first, again, other = RequestBodies(ASKED, 5), RequestBodies(ASKED, 5), RequestBodies(ASKED, 6)
    drawn = [first.draw() for _ in range(3)]
    assert drawn == [again.draw() for _ in range(3)]
    assert drawn != [other.draw() for _ in range(3)]


STORM = "CHAPTER I\n\n" + "Rain — and wind." * 20
CALM = "CHAPTER II\n\n" + "Nobody spoke.\n\n" * 20
ESSAY = "A short essay.\n\nIt ends."
HEADER = "Title: Storms\nAuthor: Nobody\n\n"


@pytest.mark.parametrize(
    ("unit", "passages"),
    [
        ("chapter", {STORM, CALM.strip(), ESSAY}),
        ("book", {f"{HEADER}{STORM}\n\n{CALM}".strip(), ESSAY}),
        (
            "paragraph",
            {"CHAPTER I", STORM[11:], "CHAPTER II", "Nobody spoke."} | {*ESSAY.split("\n\n")},
        ),
    ],
)
def test_prompts_are_the_passages_of_books(tmp_path: Path, unit: Unit, passages: set[str]) -> None:
    (tmp_path / "a.txt").write_text(f"{HEADER}{STORM}\n\n{CALM}<|endoftext|>\n\n<|endoftext|>\n")
    (tmp_path / "b.txt").write_text(f"{ESSAY}\n")
    found, choice = Passages([tmp_path], unit), random.Random(0)
    assert {found.draw(choice) for _ in range(400)} == passages
    first, again = random.Random(3), random.Random(3)
    assert [found.draw(first) for _ in range(9)] == [found.draw(again) for _ in range(9)]


def test_books_without_text_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("\n<|endoftext|>\n\n")
    with pytest.raises(ValueError, match="no text"):
        Passages([tmp_path], "chapter")


def test_shares_hold_every_arrival_once() -> None:
    whole = Workload("http://x", ASKED, {}, 1.0, 0, due=[0.1 * i for i in range(7)], most_at_once=5)
    parts = split(whole, 3)
    assert sorted(time for part in parts for time in part.due) == whole.due
    assert sum(part.most_at_once or 0 for part in parts) == 5
    assert len({part.seed for part in parts}) == 3


def _record(due: float, first: float, end: float, gaps: list[float], **fields: object) -> Record:
    record = Record(due=due, sent=due, first=first, end=end, tokens=1 + len(gaps))
    record.gaps = array("d", gaps).tobytes()
    for name, value in fields.items():
        setattr(record, name, value)
    return record


def test_latencies_count_from_the_intended_time() -> None:
    late = _record(1.0, 1.5, 2.0, [0.1], sent=1.4)
    summary = summarize([Report([late])])
    assert summary["latency_ms"]["ttft"]["p50"] == pytest.approx(500)
    assert summary["latency_ms"]["e2e"]["mean"] == pytest.approx(1000)
    assert summary["client"]["sent_late_p99_ms"] == pytest.approx(400)


def test_goodput_counts_those_that_keep_every_limit() -> None:
    records = [
        _record(0.0, 0.1, 0.5, [0.01, 0.01]),
        _record(0.0, 0.3, 0.5, [0.01]),  # its first token is late
        _record(0.0, 0.1, 0.5, [0.2]),  # a gap is long
        _record(0.0, 0.1, 2.0, [0.01]),  # its end is late
        _record(0.0, 0.1, 0.5, [0.01], outcome="429 queue_full"),
    ]
    summary = summarize([Report(records)], parse_slo("ttft=200ms, itl=50ms,e2e=1s"))
    assert summary["goodput"]["share"] == pytest.approx(1 / 5)
    assert summary["outcomes"] == {"ok": 4, "429 queue_full": 1}
    assert summary["latency_ms"]["refusal"]["p50"] == pytest.approx(500)
    assert summary["tokens_per_second"] == pytest.approx((3 + 2 + 2 + 2) / 2)


def test_what_was_not_measured_is_neither_kept_nor_missed() -> None:
    records = [
        _record(0.0, 0.1, 0.5, [0.01]),
        _record(0.0, 0.1, 0.5, []),  # one token
        _record(0.0, 0.3, 0.5, []),  # its first token is late, whatever would have followed
        Record(due=0.0, sent=0.0, end=0.5),  # not streamed
    ]
    goodput = summarize([Report(records)], parse_slo("ttft=200ms,itl=50ms"))["goodput"]
    assert (goodput["share"], goodput["not_measured"]) == (1 / 2, 2)
    assert goodput["requests_per_second"] == pytest.approx(1 / 0.5)
    nothing = summarize([Report(records[3:])], parse_slo("tpot=9s"))["goodput"]
    assert (nothing["share"], nothing["not_measured"]) == (0, 1)


def test_prompts_of_answered_requests_are_counted() -> None:
    counted = {"prompt_bytes": 50, "prompt_tokens": 40, "cached_tokens": 8, "prompts": 2}
    records = [
        _record(0.0, 0.1, 0.5, [], **counted),
        _record(0.0, 0.1, 2.0, [], **counted),
        _record(0.0, 0.1, 0.5, [], **counted, outcome="413 body_too_large"),
    ]
    summary = summarize([Report(records)])
    assert summary["prompts"] == {"count": 4, "bytes": 100, "tokens": 80, "cached_tokens": 16}
    assert summary["prompt_tokens_per_second"] == pytest.approx(80 / 2)


@pytest.mark.parametrize("text", ["ttft", "ttft=200", "x=2s", "ttft=ms"])
def test_an_slo_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        parse_slo(text)


def test_a_client_that_is_late_or_busy_says_so() -> None:
    records = [_record(0.0, 0.1, 0.5, [])]
    assert summarize([Report(records)])["client"]["bottleneck"] == []
    late = Report(records, late=array("d", [0.02] * 10).tobytes(), busy=0.95)
    assert len(summarize([late])["client"]["bottleneck"]) == 2
    disturbed = Report(records, late=array("d", [0.02] * 10).tobytes(), busy=0.1)
    assert "other processes" in summarize([disturbed])["client"]["bottleneck"][0]


def test_the_sweep_finds_the_highest_rate() -> None:
    best, probes = highest_rate(
        1, 100, lambda rate: Probe(rate, float(rate <= 37)), share=0.9, precision=0.02
    )
    assert best is not None and 37 / 1.02 <= best <= 37
    assert len(probes) < 15
    none, probes = highest_rate(50, 100, lambda r: Probe(r, 0.0), share=0.9, precision=0.02)
    assert none is None and len(probes) == 1
    limited, _ = highest_rate(
        1, 100, lambda r: Probe(r, 1.0, client_limited=r > 10), share=0.9, precision=0.1
    )
    assert limited is not None and limited <= 10


def test_streams_are_timed_per_prompt_wherever_they_are_cut() -> None:
    text = (
        b'data: {"index":0,"token_ids":[5]}\n\ndata: {"index":1,"token_ids":[5,6]}\n\n'
        b'data: {"index":0,"token_ids":[7]}\n\ndata: {"index":0,"token_ids":[],"x":1}\n\n'
        b"data: [DONE]\n\n"
    )
    for step in (1, 7, len(text)):
        answer, record = StreamedResponse(0.0), Record(0.0, 0.0)
        for begin in range(0, len(text), step):
            answer.take(text[begin : begin + step])
        answer.close(record)
        assert record.outcome == "ok" and record.tokens == 4
        assert len(unpack(record.gaps)) == 1 and len(unpack(record.per_token)) == 2


@pytest.mark.parametrize(
    ("text", "outcome"),
    [
        (b'data: {"token_ids":[5]}\n\n', "stream cut short"),
        (b'data: {"error":{"message":"x"}}\n\n', "error in the stream"),
        (b"data: {\n\ndata: [DONE]\n\n", "answer not understood"),
        (b'data: {"choices":[{"text":"a"}]}\n\ndata: [DONE]\n\n', "ok"),
    ],
)
def test_how_a_stream_ended_is_told(text: bytes, outcome: str) -> None:
    answer, record = StreamedResponse(0.0), Record(0.0, 0.0)
    answer.take(text)
    answer.close(record)
    assert record.outcome == outcome and record.tokens <= 1


def test_errors_have_the_code_of_their_body() -> None:
    answer = WholeResponse()
    answer.take(b'{"error": {"message": "m", "type": "t", "param": null, "code": "queue_full"}}')
    assert answer.error(429) == ("429 queue_full", "m")
    assert WholeResponse().error(502) == ("502", "")


def _asks(*answers: bytes, step: int = 1 << 20) -> list[tuple[int, bytes]]:
    """What a connection makes of a server that sends these bytes and closes."""

    async def run() -> list[tuple[int, bytes]]:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            for answer in answers:
                await reader.readuntil(b"\r\n\r\n")
                for begin in range(0, len(answer), step):
                    writer.write(answer[begin : begin + step])
                    await asyncio.sleep(0)
            writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        target = Server(f"http://127.0.0.1:{port}", {})
        connection: Connection = await target.connect()
        got = []
        for _ in answers:
            body = bytearray()
            status = await connection.ask(target.request("/x", b"", "GET"), body.extend)
            got.append((status, bytes(body)))
        server.close()
        return got

    return asyncio.run(run())


PLAIN = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello"
HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
CHUNKED = HEAD + b"3;x=1\r\nabc\r\nA\r\n0123456789\r\n0\r\n\r\n"


@pytest.mark.parametrize("step", [1, 3, 1 << 20])
def test_answers_are_read_wherever_they_are_cut(step: int) -> None:
    empty = b"HTTP/1.1 204 No Content\r\n\r\n"
    got = _asks(PLAIN, CHUNKED, b"HTTP/1.1 100 Continue\r\n\r\n" + PLAIN, empty, PLAIN, step=step)
    whole = [(200, b"hello"), (200, b"abc0123456789"), (200, b"hello"), (204, b""), (200, b"hello")]
    assert got == whole


def test_an_answer_without_a_length_ends_with_its_connection() -> None:
    assert _asks(b"HTTP/1.0 500 Oh\r\n\r\nrest") == [(500, b"rest")]


@pytest.mark.parametrize("answer", [PLAIN[:-1], CHUNKED[:-4], b"SSH-2.0\r\n\r\n", b""])
def test_what_is_no_whole_answer_raises(answer: bytes) -> None:
    with pytest.raises(BadResponse):
        _asks(answer)


@pytest.mark.parametrize("url", ["ftp://x", "localhost:8000", "http://"])
def test_addresses_that_are_none_are_refused(url: str) -> None:
    with pytest.raises(ValueError):
        Server(url, {})
