"""The front end's load test: its mock engine, its clients, and one case for a moment."""

from __future__ import annotations

import json
import socket
import threading
from itertools import islice, pairwise, repeat
from pathlib import Path

import pytest

from engine.config import EngineConfig
from engine.protocol.requests import Request
from engine.protocol.sampling_params import SamplingParams
from engine.protocol.token_ids import pack_ids
from loadtest.frontend.board import Board
from loadtest.frontend.cases import CASES, Case
from loadtest.frontend.command import main
from loadtest.frontend.mock import MockEngine, token_of
from loadtest.frontend.reader import Schedule, _Client, _requests


def _request(number: int, tokens: int, stream: bool = True) -> Request:
    sampling = SamplingParams(max_tokens=tokens)
    return Request(id=number, prompt=pack_ids([1]), sampling=sampling, stream=stream)


@pytest.fixture
def board(tmp_path: Path) -> Board:
    return Board(tmp_path / "board", create=True)


@pytest.fixture
def mock(board: Board, tmp_path: Path) -> MockEngine:
    return MockEngine(EngineConfig(model=str(tmp_path / "board")))


def test_the_mock_keeps_its_steps_within_the_window(board: Board, mock: MockEngine) -> None:
    board.set_up(window=3)
    for number in range(2):
        mock.add("api", _request(number, 100))
    steps = [events for _ in range(20) for events in mock.step().values()]
    assert len(steps) == 6  # a burst, and another while the first is not read
    assert [step.tokens for step in steps[:2]] == [[token_of(0)] * 2, [token_of(1)] * 2]
    board.count(0, 12)
    assert len([1 for _ in range(20) if mock.step()]) == 6


def test_the_window_holds_where_all_streams_have_ended_and_others_come(
    board: Board, mock: MockEngine
) -> None:
    board.set_up(window=3)
    mock.add("api", _request(0, 4))
    while mock.has_work:
        mock.step()
        board.count(0, mock._sent)
    mock.add("api", _request(1, 100))
    assert len([1 for _ in range(20) if mock.step()]) == 6


def test_without_a_window_or_a_pace_the_mock_waits_and_then_goes_on(
    board: Board, mock: MockEngine
) -> None:
    board.set_up(window=0)
    mock.add("api", _request(0, 100))
    assert not any(mock.step() for _ in range(5))
    board.window = 2
    assert len([1 for _ in range(20) if mock.step()]) == 4
    board.window = 0
    board.count(0, 4)
    assert not any(mock.step() for _ in range(5))


def test_servers_take_turns_one_after_another() -> None:
    slices = list(Schedule(10.0, warm_up=2.0, settle=0.5, seconds=1.0, turns=2).slices(2))
    assert [which for which, *_ in slices] == [0, 1, 0, 1]
    assert [counted - begin for _, begin, counted, _ in slices] == [2.0, 2.0, 0.5, 0.5]
    assert {end - counted for *_, counted, end in slices} == {1.0}
    assert slices[0][1] == 10.0
    assert all(before[3] == after[1] for before, after in pairwise(slices))


def test_requests_ask_for_all_lengths_of_a_case_alike() -> None:
    case = Case("x", 1.0, tokens=4, spread=2)
    requests = list(islice(_requests(case, seed=0), 10))
    bodies = [json.loads(request.partition(b"\r\n\r\n")[2]) for request in requests]
    assert sorted(body["max_tokens"] for body in bodies) == sorted([2, 3, 4, 5, 6] * 2)


def test_every_request_of_the_mock_ends_once(board: Board, mock: MockEngine) -> None:
    board.set_up(window=1 << 30)
    mock.add("api", _request(0, 3))
    mock.add("api", _request(1, 2, stream=False))
    mock.add("api", _request(2, 50))
    ended, seen = [], []
    while mock.has_work:
        (events,) = mock.step().values()
        seen += [
            token for who, token in zip(events.requests, events.tokens, strict=True) if not who
        ]
        ended += [(one.request, one.reason, len(one.tokens)) for one in events.finished]
        if len(seen) == 3:
            mock.abort("api", [2], "abort")
    assert sorted(ended) == [(0, "length", 0), (1, "length", 2), (2, "abort", 0)]
    assert len(seen) == 3


@pytest.mark.parametrize("step", [1, 5, 1000])
def test_clients_count_tokens_wherever_the_bytes_are_cut(step: int) -> None:
    event = b'data: {"index":0,"text":"a","token_ids":[97]}\n\n'
    chunk = b"%x\r\n%b\r\n" % (len(event), event)
    head = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
    stream = head + 3 * chunk + b"0\r\n\r\n"
    plain = b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\n0123456789"
    for answer, case in (
        (stream, Case("x", 1.0, tokens=3)),
        (plain, Case("x", 1.0, tokens=3, stream=False)),
    ):
        assert _counted(answer, case, step) == 3


def _counted(answer: bytes, case: Case, step: int) -> int:
    """Tokens that a client counts in an answer that comes in pieces; it must ask again then."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        client = _Client(server.getsockname(), repeat(b"ask"), case)
        client.ask()
        peer, _ = server.accept()
        tokens = 0
        with peer:
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            assert peer.recv(100) == b"ask"
            for begin in range(0, len(answer), step):
                peer.sendall(answer[begin : begin + step])
                tokens += client.read()
            asked = threading.Thread(target=lambda: peer.recv(100))
            asked.start()
            asked.join(10)
            assert not asked.is_alive(), "it does not ask again"
        client.socket.close()
    return tokens


def test_the_cases_are_those_of_the_bars() -> None:
    assert [case.bar for case in CASES] == [0.65, 0.65, 0.5, 0.5, 0.65, 0.65, 0.65, 0.5]


@pytest.mark.slow
def test_a_case_runs_on_all_three_servers_in_turns(tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    options = ["--cases", "6", "--seconds", "1", "--warm-up", "0.5", "--rounds", "1"]
    assert main([*options, "--no-pin", "--no-pace", "--json", str(figures)]) == 0
    (case,) = json.loads(figures.read_text())["cases"]
    assert case["tokens_per_second"] > 0 and case["ceiling"] > 0
