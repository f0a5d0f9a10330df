"""loadtest.replicas: its careful client, against a server that is no replica; its figures."""

from __future__ import annotations

import asyncio
import math

import httpx
import pytest

from loadtest.replicas import faults
from loadtest.replicas.faults import Refused, Seen, carry_out, texts_of
from loadtest.replicas.proxies import read
from loadtest.subject import Subject

TURNS = 3


def test_what_one_server_does_is_right_and_anything_else_is_reported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(faults, "TEXTS", 2)
    with Subject(deterministic=True) as server:
        asyncio.run(server.started())
        expected = texts_of(server.url, TURNS)
        assert len(expected) == 2 and all(len(one) == TURNS for one in expected)
        seen = Seen()
        carry_out(server.url, [0, 1, 2], TURNS, expected, seen)
        assert (seen.turns, seen.wrong, dict(seen.retries)) == (9, [], {})
        again = Seen()
        carry_out(server.url, [1], TURNS, expected, again)
        assert (again.turns, again.done_before) == (3, 3), "each had been carried out"
        bad = Seen()
        carry_out(server.url, [4], TURNS, [["other"] * TURNS] * 2, bad)
        assert len(bad.wrong) == TURNS
        with (
            httpx.Client(base_url=server.url) as client,
            pytest.raises(Refused, match="turn_ahead"),
        ):
            faults._ask(client, "unknown", 0, 7)


def test_figures_are_read_from_the_load_tests_json() -> None:
    summary = {
        "requests_per_second": 5.0,
        "tokens_per_second": 7.0,
        "latency_ms": {"ttft": {"p50": 3.0}},
        "outcomes": {"ok": 10, "503": 2},
    }
    assert read(summary) == {
        "requests_per_second": 5.0, "tokens_per_second": 7.0, "ttft_p50_ms": 3.0, "errors": 2,
    }  # fmt: skip
    assert math.isnan(read({**summary, "latency_ms": {}})["ttft_p50_ms"])
